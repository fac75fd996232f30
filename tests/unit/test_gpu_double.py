"""The double of a GPU takes no call that the real modules would not take."""

from __future__ import annotations

import pytest

from tests.gpu.signatures import WRITTEN_DOWN, check, nccl_is_there, real, signature


@pytest.mark.skipif(not nccl_is_there(), reason="needs NCCL: pip install nvidia-nccl-cu12")
@pytest.mark.parametrize("path", WRITTEN_DOWN)
def test_what_is_written_down_of_nccl_is_what_cupy_says(path: str) -> None:
    written = WRITTEN_DOWN[path].replace("=None", "")
    assert [p.name for p in signature(path).parameters.values()] == written[1:-1].replace(",", " ").split()


def test_a_call_with_an_argument_too_few_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"allReduce.*missing.*'stream'"):
        check("cupy.cuda.nccl.NcclCommunicator.allReduce", (1, 2, 3, 4, 5), {})


def test_a_call_with_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(TypeError, match="priorities"):
        check("torch.cuda.current_stream", (), {"priorities": 1})


@pytest.mark.parametrize(
    "path",
    [
        "cupy.RawKernel.__call__",
        "cupy.cuda.Stream.use",
        "cupy.cuda.alloc_pinned_memory",
        "cupy.cuda.runtime.memcpyAsync",
        "cupy.cuda.runtime.streamWaitEvent",
    ],
)
def test_cupy_says_how_it_is_called(path: str) -> None:
    pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda12x")
    assert real(path) is not None and signature(path) is not None
