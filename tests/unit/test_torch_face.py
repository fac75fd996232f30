"""What the torch face decides by itself: names, overlap, forms, compression, arrays."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fusion.torch as hvd
from coordinator.errors import NotInitializedError
from fusion.arrays import as_tensor
from fusion.torch.groups import split
from fusion.torch.slots import Slot, check_parameters, names_of
from fusion.torch.submission import overlaps
from tests.launch import ROOT


def test_importing_the_face_leaves_the_compiler_of_torch_alone():
    """It takes longer than everything else; only SyncBatchNorm needs it."""
    code = "import sys, fusion.torch as hvd; assert 'torch._dynamo' not in sys.modules; hvd.SyncBatchNorm"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_no_dense_tensor_overlaps_itself(shape, data):
    tensor = torch.empty(shape)
    if shape:
        tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    assert not overlaps(tensor)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(0, 5), min_size=3, max_size=3)
)
def test_a_tensor_said_not_to_overlap_has_as_many_addresses_as_elements(shape, strides):
    strides = strides[: len(shape)]
    tensor = torch.zeros(200).as_strided(shape, strides)
    addresses = {sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)}
    assert overlaps(tensor) or len(addresses) == tensor.numel()


def test_expanded_tensors_overlap_and_slices_do_not():
    assert overlaps(torch.ones(3, 1).expand(3, 4))
    assert overlaps(torch.arange(5.0).unfold(0, 2, 1))
    assert not overlaps(torch.ones(6, 4)[::2, ::3])
    assert not overlaps(torch.ones(2, 3).T)


def test_every_documented_form_exists_and_names_its_parameters():
    in_place = [
        f"{name}{form}" for name in ("allreduce", "broadcast") for form in ("", "_", "_async", "_async_")
    ]
    others = [
        f"{name}{form}" for name in ("allgather", "alltoall", "reducescatter") for form in ("", "_async")
    ]
    single = ("broadcast", "alltoall")
    forms = in_place + others
    forms += [f"grouped_{name}" for name in forms if not name.startswith(single)]
    for name in forms:
        form = getattr(hvd, name)
        first = next(iter(inspect.signature(form).parameters))
        assert form.__name__ == name and form.__doc__
        assert first == ("tensors" if name.startswith("grouped_") else "tensor")


def test_the_blocking_form_takes_compression_where_horovod_has_it():
    def parameters(form) -> list[str]:
        return list(inspect.signature(form).parameters)

    assert parameters(hvd.allreduce)[:5] == ["tensor", "average", "name", "compression", "op"]
    assert parameters(hvd.allreduce_async)[:4] == ["tensor", "average", "name", "op"]
    assert parameters(hvd.reducescatter)[:4] == ["tensor", "name", "compression", "op"]


def test_operations_before_init_say_so():
    with pytest.raises(NotInitializedError, match="init"):
        hvd.allreduce(torch.ones(1))
    with pytest.raises(NotInitializedError, match="init"):
        hvd.rank()


def test_generated_names_are_unique_over_groups():
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(4)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    assert len(set(names_of(groups, None).values())) == 4


def test_names_must_be_unique():
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    groups = [{"params": [*one.parameters(), *two.parameters()]}]
    with pytest.raises(ValueError, match="bias, weight"):
        names_of(groups, [*one.named_parameters(), *two.named_parameters()])


def test_names_must_cover_every_parameter():
    net = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="does not name 1 of"):
        names_of([{"params": list(net.parameters())}], list(net.named_parameters())[:1])


def test_names_must_be_pairs():
    net = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="pairs"):
        names_of([{"params": list(net.parameters())}], net.parameters())  # type: ignore[arg-type]


def test_sharded_parameters_are_refused():
    class DTensor(nn.Parameter):
        pass

    with pytest.raises(ValueError, match=r"'layer.weight' is a shard"):
        check_parameters({DTensor(torch.ones(1)): "layer.weight"})


def test_a_model_that_is_averaged_already_is_warned_about(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match="DistributedDataParallel"):
        check_parameters({nn.Parameter(torch.ones(1)): "module.weight"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_parameters({nn.Parameter(torch.ones(1)): "weight"})


def test_lazy_parameters_are_refused():
    lazy = nn.LazyLinear(2)
    with pytest.raises(ValueError, match="forward pass"):
        check_parameters({parameter: name for name, parameter in lazy.named_parameters()})


def test_groups_split_evenly():
    slots = [Slot(nn.Parameter(torch.ones(1)), str(n), n) for n in range(7)]
    assert [[slot.index for slot in group] for group in split(slots, 3)] == [[0, 1, 2], [3, 4], [5, 6]]


def test_a_parameter_in_two_groups_is_refused():
    slots = [Slot(nn.Parameter(torch.ones(1)), str(n), n) for n in range(2)]
    with pytest.raises(ValueError, match="two groups"):
        split(slots, [[slots[0].parameter], [slots[0].parameter]])


@pytest.mark.parametrize(
    ("compressor", "wire"), [(hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)]
)
def test_compression_casts_floating_point_and_leaves_integers(compressor, wire):
    sent, ctx = compressor.compress(torch.ones(3, dtype=torch.float64))
    assert sent.dtype == wire
    assert compressor.decompress(sent, ctx).dtype == torch.float64
    sent, ctx = compressor.compress(torch.ones(3, dtype=torch.int32))
    assert sent.dtype == compressor.decompress(sent, ctx).dtype == torch.int32


def test_a_numpy_array_and_its_tensor_share_memory():
    array = np.zeros(3)
    tensor, restore = as_tensor(array, "x", writable=True)
    tensor += 1
    assert array.tolist() == [1, 1, 1]
    assert restore is not None and isinstance(restore(tensor), np.ndarray)


def test_a_read_only_array_can_be_read_but_not_written():
    array = np.broadcast_to(np.float32(2), (3,))
    assert as_tensor(array, "x")[0].tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="'x' is read-only"):
        as_tensor(array, "x", writable=True)


def test_a_reversed_array_can_be_read_but_not_written():
    array = np.arange(3.0)[::-1]
    assert as_tensor(array, "x")[0].tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match="negative strides"):
        as_tensor(array, "x", writable=True)


def test_what_is_no_array_is_refused():
    with pytest.raises(TypeError, match=r"'x'.*list"):
        as_tensor([1.0], "x")
    with pytest.raises(TypeError, match=r"'x'.*complex256|'x'.*<U1|'x'"):
        as_tensor(np.array(["a"]), "x")


def test_arrays_of_other_libraries_come_in_by_dlpack():
    class Foreign:
        """An array of a library that torch does not know."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __dlpack__(self, **kwargs):
            return self.tensor.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

        def __array_namespace__(self):
            class Library:
                from_dlpack = Foreign

            return Library

    memory = torch.ones(3)
    tensor, restore = as_tensor(Foreign(memory), "x")
    assert tensor.data_ptr() == memory.data_ptr()
    assert restore is not None and isinstance(restore(tensor), Foreign)
