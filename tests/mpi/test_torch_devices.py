"""`fusion.torch` with tensors on a device: from the call to the result, on a double of a GPU.

`OnGpu` says that it is on a GPU and is in host memory, where the double works.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mpi4py import MPI

import fusion.devices
import fusion.torch as hvd
from coordinator.errors import FusionError, MismatchError
from fusion import runtime
from fusion.compression import Compressor, Feedback, Policy, randomk, topk
from tests.gpu.doubles import Gpu
from tests.ranks import inside, ranks

INIT = None


class OnGpu(torch.Tensor):
    """A tensor in host memory that says it is on this rank's GPU."""

    is_cpu = False
    is_cuda = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", MPI.COMM_WORLD.rank)

    def get_device(self) -> int:
        return MPI.COMM_WORLD.rank


def on_gpu(*values: float) -> Any:
    return torch.tensor(values).as_subclass(OnGpu)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[Gpu | None]:
    if not inside():
        yield None
        return
    made = Gpu(index=MPI.COMM_WORLD.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusion.devices, "load_modules", lambda: made.modules)
        patch.setattr(fusion.devices, "missing", lambda: None)
        hvd.init(gpu="nccl")
        yield made
        hvd.shutdown()


@ranks(2)
def test_tensors_on_devices_and_on_cpus_are_reduced_in_one_job() -> None:
    handles = [
        hvd.allreduce_async(on_gpu(1.0, 2.0), name="a", op=hvd.Sum),
        hvd.allreduce_async(torch.ones(2), name="b", op=hvd.Sum),
        hvd.allreduce_async(on_gpu(3.0), name="c", op=hvd.Sum),
    ]
    assert [handle.result().tolist() for handle in handles] == [[2.0, 4.0], [2.0, 2.0], [6.0]]


@ranks(2)
def test_nccl_reduces_what_is_on_devices_and_nothing_else(gpu: Gpu) -> None:
    before = len(gpu.calls)
    hvd.allreduce(torch.ones(4))
    assert len(gpu.calls) == before
    tensor = on_gpu(1.0, 2.0)
    assert hvd.allreduce_(tensor) is tensor
    assert gpu.paths()[before:].count("cupy.cuda.nccl.NcclCommunicator.allReduce") == 1


@ranks(2)
def test_ranks_that_disagree_about_the_device_are_named(gpu: Gpu) -> None:
    mine = on_gpu(1.0) if hvd.rank() == 0 else torch.ones(1)
    with pytest.raises(MismatchError, match=r"'m': rank 0: device cuda; rank 1: device cpu"):
        hvd.allreduce(mine, name="m")
    assert hvd.allreduce(on_gpu(2.0), name="m").tolist() == [2.0]


@ranks(2)
def test_every_operation_takes_tensors_on_devices() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = on_gpu(*[float(rank)] * (rank + 1))
    assert hvd.allgather(mine).tolist() == [0.0, 1.0, 1.0]
    assert hvd.broadcast(on_gpu(float(rank)), root_rank=1).tolist() == [1.0]
    rows, counts = hvd.alltoall(on_gpu(0.0, 1.0, 2.0), splits=[1, 2])
    assert counts.tolist() == [rank + 1] * size and rows.tolist() == [[0.0, 0.0], [1.0, 2.0, 1.0, 2.0]][rank]
    assert hvd.reducescatter(on_gpu(1.0, 2.0, 3.0), op=hvd.Sum).tolist() == [[2.0, 4.0], [6.0]][rank]
    results = hvd.grouped_allreduce([on_gpu(1.0), on_gpu(2.0, 3.0)], op=hvd.Sum)
    assert [result.tolist() for result in results] == [[2.0], [4.0, 6.0]]


@ranks(2)
def test_a_group_on_two_kinds_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensors of 'g' are on cpu, cuda:\d: put them on one device"):
        hvd.grouped_allreduce([on_gpu(1.0), torch.ones(1)], name="g")


@ranks(2)
def test_a_result_can_be_had_while_the_device_works_and_poll_says_that_it_does(gpu: Gpu) -> None:
    hvd.allreduce(on_gpu(1.0))
    side = _executor()._device.side
    gpu.hold(side)
    handle = hvd.allreduce_async(on_gpu(1.0), name="early", op=hvd.Sum)
    result = handle.result(30.0)
    assert not hvd.poll(handle)
    gpu.release(side)
    assert hvd.synchronize(handle) is result and result.tolist() == [2.0]
    while not hvd.poll(handle):
        pass


@ranks(2)
def test_a_graph_capture_is_refused_and_the_runtime_goes_on(gpu: Gpu) -> None:
    gpu.capturing = True
    with pytest.raises(FusionError, match="CUDA graph"):
        hvd.allreduce_async(on_gpu(1.0), name="captured")
    gpu.capturing = False
    assert hvd.allreduce(on_gpu(1.0), name="captured").tolist() == [1.0]


@ranks(2)
def test_a_rank_that_has_joined_adds_nothing_on_its_device() -> None:
    if hvd.rank() == 0:
        assert hvd.allreduce(on_gpu(5.0), name="alone", op=hvd.Sum).tolist() == [5.0]
    assert hvd.join() in (0, 1)


@ranks(2)
def test_a_process_set_has_a_communicator_of_its_own(gpu: Gpu) -> None:
    subset = hvd.add_process_set([1])
    before = len(gpu.modules.nccl.alive)
    if hvd.rank() == 1:
        assert hvd.allreduce(on_gpu(4.0), op=hvd.Sum, process_set=subset).tolist() == [4.0]
    assert len(gpu.modules.nccl.alive) == before + hvd.rank()
    assert hvd.remove_process_set(subset)


class Weights(torch.nn.Module):
    """A linear model whose parameters say that they are on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3).as_subclass(OnGpu))
        self.bias = torch.nn.Parameter(torch.zeros(2).as_subclass(OnGpu))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.as_subclass(torch.Tensor).t() + self.bias.as_subclass(torch.Tensor)


@ranks(2)
def test_static_buckets_live_and_are_reduced_on_the_device(gpu: Gpu) -> None:
    model = Weights()
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), buckets="static")
    inputs = [torch.ones(1, 3) * (rank + 1) for rank in range(2)]
    for step in range(3):
        before = len(gpu.calls)
        weight = model.weight.detach().clone().as_subclass(torch.Tensor)
        optimizer.zero_grad()
        model(inputs[hvd.rank()]).sum().backward()
        optimizer.step()
        expected = torch.stack(inputs).mean(0).expand(2, 3)
        torch.testing.assert_close(model.weight.grad.as_subclass(torch.Tensor), expected)
        torch.testing.assert_close(model.weight.as_subclass(torch.Tensor), weight - 0.5 * expected)
        paths = gpu.paths()[before:]
        assert paths.count("cupy.cuda.nccl.NcclCommunicator.allReduce") == 1
        # Nothing is copied in, and what comes out is divided where it lies.
        assert paths.count("cupy.RawKernel.__call__") == 1, step


@ranks(2)
def test_a_gradient_is_reduced_after_every_stream_that_put_something_into_its_bucket(gpu: Gpu) -> None:
    model = Weights()
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), buckets="static")
    streams = {name: gpu.add_stream() for name in ("weight", "bias")}
    before = len(gpu.calls)
    for name, stream in streams.items():
        with gpu.on(stream):
            model(torch.ones(1, 3)).sum().backward(inputs=[getattr(model, name)])
    optimizer.step()
    recorded = {call.args[1] for call in gpu.calls[before:] if call.path.endswith("eventRecord")}
    assert recorded >= set(streams.values())


def _executor() -> Any:
    return runtime.current().world.devices._cuda


@ranks(2)
@pytest.mark.parametrize(("method", "moves"), [(topk(0.125), "allGather"), (randomk(0.999), None)])
def test_a_compressed_tensor_comes_back_to_the_device_and_some_never_leave_it(
    gpu: Gpu, method: Compressor, moves: str | None
) -> None:
    before = len(gpu.calls)
    tensor = on_gpu(*([2.0] * 7 + [8.0]))
    memory, name = Feedback(method), f"compressed.{method.name}"
    results = [
        hvd.allreduce(tensor, name=name, op=hvd.Average, compression=memory).tolist() for _ in range(2)
    ]
    residual = memory.memories.residual(name)
    assert residual is not None
    if moves is None:
        assert results == [[2.0] * 7 + [8.0]] * 2 and not residual.any()
    else:
        assert results == [[0.0] * 7 + [8.0]] * 2 and residual.tolist() == [4.0] * 7 + [0.0]
    nccl = [path for path in gpu.paths()[before:] if path.startswith("cupy.cuda.nccl.NcclCommunicator.")]
    assert {path.rsplit(".", 1)[1] for path in nccl} - {"check_async_error"} == ({moves} - {None})


@ranks(2)
def test_an_optimizer_compresses_gradients_on_a_device() -> None:
    parameter = torch.nn.Parameter(on_gpu(0.0, 0.0, 0.0, 0.0))
    assert parameter.is_cuda
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        [("w", parameter)],
        compression=Policy("topk:0.25", dense_below=0, dense_vectors=False),
    )
    for _ in range(2):
        optimizer.zero_grad()
        (parameter * on_gpu(1.0, 2.0, 3.0, 4.0)).sum().backward()
        optimizer.step()
    # First the fourth; then what was left of the third, twice, is the largest.
    assert parameter.tolist() == [0.0, 0.0, -6.0, -4.0]


@ranks(2)
def test_a_step_that_is_not_finite_on_one_rank_is_remembered_by_none() -> None:
    parameters = [torch.nn.Parameter(on_gpu(0.0, 0.0, 0.0, 0.0)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.0),
        [("a", parameters[0]), ("b", parameters[1])],
        # A bucket each, so that what spoils one has to be known of the other.
        compression=Policy("topk:0.25", {"b": "topk:0.5"}, dense_below=0, dense_vectors=False),
    )
    kept = []
    for spoilt in (False, True, False):
        optimizer.zero_grad()
        factor = float("inf") if spoilt and hvd.rank() == 1 else 1.0
        loss = (parameters[0] * on_gpu(1.0, 2.0, 3.0, 4.0 * factor)).sum()
        (loss + (parameters[1] * on_gpu(1.0, 2.0, 3.0, 4.0)).sum()).backward()
        optimizer.synchronize()
        assert parameters[0].grad.isnan().any() == spoilt
        state = optimizer.state_dict()["compression"]["tensors"]
        kept.append([state[name]["residual"].tolist() for name in "ab"])
        with optimizer.skip_synchronize():
            optimizer.step()
    assert kept[0] == kept[1] == [[1.0, 2.0, 3.0, 0.0], [1.0, 2.0, 0.0, 0.0]]
    assert kept[2] == [[2.0, 4.0, 0.0, 4.0], [2.0, 0.0, 3.0, 0.0]]
