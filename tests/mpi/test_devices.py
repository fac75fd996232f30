"""How work is given to a device: order, lifetimes, communicators, errors; on a double of a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

from coordinator.errors import FusionError
from coordinator.messages import OpKind, ReduceOp, Request
from fusion.cuda import present
from fusion.cuda.work import DeviceWork
from fusion.devices import Devices
from tests.gpu.doubles import DEFAULT, Gpu
from tests.mpi.plane import Plane, Settings, entry
from tests.ranks import ranks

INIT = None
COMM = "cupy.cuda.nccl.NcclCommunicator"


@pytest.fixture
def plane() -> Iterator[Plane]:
    made = Plane("device")
    yield made
    made.close()


def launch(plane: Plane, tensor: torch.Tensor, output: torch.Tensor | None = None, **options: Any) -> Any:
    """Give an all-reduce to the device; the entry and what is under way."""
    made = entry(
        plane._request(OpKind.ALLREDUCE, tensor, **options), tensor, tensor if output is None else output
    )
    made.ready = plane.executor.mark(made.inputs, made.request.name)
    return made, plane.executor.execute(plane.response_of([made]), [made])


def finish(plane: Plane, work: Any) -> None:
    plane.waiter.until(work.done)


@ranks(1, 2)
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_tensor_is_read_after_what_its_stream_had_been_given(plane: Plane, own_stream: bool) -> None:
    stream = plane.gpu.add_stream() if own_stream else DEFAULT
    tensor = torch.zeros(100)
    plane.gpu.hold(stream)
    with plane.gpu.on(stream):
        plane.gpu.give(stream, lambda: tensor.fill_(3.0))
        _, work = launch(plane, tensor)
    assert not work.done() and not tensor.any()
    plane.gpu.release(stream)
    finish(plane, work)
    assert (tensor == 3.0 * plane.size).all()


@ranks(1)
def test_a_tensor_is_not_read_after_later_work_of_its_stream(plane: Plane) -> None:
    tensor, output = torch.ones(100), torch.zeros(100)
    made = entry(plane._request(OpKind.ALLREDUCE, tensor), tensor, output)
    made.ready = plane.executor.mark(made.inputs, "t")
    plane.gpu.hold(DEFAULT)
    plane.gpu.give(DEFAULT, lambda: tensor.fill_(9.0))
    finish(plane, plane.executor.execute(plane.response_of([made]), [made]))
    assert (output == 1.0).all()
    plane.gpu.release(DEFAULT)


@ranks(1)
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_callers_later_work_sees_the_result_without_the_host_waiting(
    plane: Plane, own_stream: bool
) -> None:
    tensor, seen = torch.ones(10), torch.zeros(10)
    launch(plane, torch.ones(10))
    side = plane.executor._cuda._device.side
    plane.gpu.hold(side)
    _, work = launch(plane, tensor, postscale=5.0)
    consumer = plane.gpu.add_stream() if own_stream else DEFAULT
    with plane.gpu.on(consumer):
        work.join()
        plane.gpu.give(consumer, lambda: seen.copy_(tensor))
    assert not work.done() and not seen.any()
    plane.gpu.release(side)
    assert work.done() and (seen == 5.0).all()


@ranks(1)
def test_cupys_current_stream_waits_for_the_result_too(plane: Plane) -> None:
    _, work = launch(plane, torch.ones(10))
    cupys = plane.gpu.add_stream()
    plane.gpu.modules.cupy.cuda._local.stream = cupys
    before = len(plane.gpu.calls)
    work.join()
    waits = [call.args[0] for call in plane.gpu.calls[before:] if call.path.endswith("streamWaitEvent")]
    assert waits == [DEFAULT, cupys]


@ranks(1)
def test_tensors_are_kept_until_the_device_is_done_and_no_longer(plane: Plane) -> None:
    launch(plane, torch.ones(10))
    side = plane.executor._cuda._device.side
    plane.gpu.hold(side)
    tensor, output = torch.ones(10), torch.empty(10)
    made, work = launch(plane, tensor, output)
    alive = weakref.ref(tensor), weakref.ref(output)
    made.inputs, made.outputs = (), []
    del tensor, output
    gc.collect()
    assert all(each() is not None for each in alive)
    plane.gpu.release(side)
    assert work.done()
    gc.collect()
    assert all(each() is None for each in alive)


@ranks(1)
def test_work_that_nobody_asks_about_any_more_leaves_its_tensors_to_the_allocator(plane: Plane) -> None:
    recorded: list[int] = []

    class OnDevice(torch.Tensor):
        device = torch.device("cuda:0")  # type: ignore[assignment]

        def record_stream(self, stream: Any) -> None:
            recorded.append(stream.cuda_stream)

    launch(plane, torch.ones(1))
    device = plane.executor._cuda._device
    tensor = torch.ones(3).as_subclass(OnDevice)
    work = DeviceWork(device, device.record(), [[tensor], tensor], lambda: None, lambda seconds: None)
    work.abandon()
    assert recorded == [device.side] * 2


@ranks(1, 2)
@pytest.mark.parametrize("count", [1, 50])
def test_a_repeated_operation_gives_the_device_three_things_and_waits_for_nothing(
    plane: Plane, count: int
) -> None:
    tensors = [torch.ones(30) for _ in range(count)]
    made = [
        entry(plane._request(OpKind.ALLREDUCE, tensor, name=str(n), postscale=0.5), tensor, tensor)
        for n, tensor in enumerate(tensors)
    ]
    response = plane.response_of(made)
    for _ in range(2):
        for each in made:
            each.ready = plane.executor.mark(each.inputs, each.request.name)
        before = len(plane.gpu.calls)
        work = plane.executor.execute(response, made)
        calls = plane.gpu.paths()[before:]
        finish(plane, work)
    pack = [] if count == 1 else ["cupy.RawKernel.__call__"]
    assert calls == [
        "cupy.cuda.runtime.streamWaitEvent",
        *pack,
        f"{COMM}.allReduce",
        "cupy.RawKernel.__call__",
        "cupy.cuda.Event",
        "cupy.cuda.runtime.eventRecord",
    ]


@ranks(1)
def test_one_tensor_that_nccl_can_sum_as_it_is_is_not_copied(plane: Plane) -> None:
    launch(plane, torch.ones(30))
    before = len(plane.gpu.calls)
    tensor, output = torch.ones(30), torch.empty(30)
    launch(plane, tensor, output)
    (reduction,) = [call for call in plane.gpu.calls[before:] if call.path == f"{COMM}.allReduce"]
    assert reduction.args[:3] == (tensor.data_ptr(), output.data_ptr(), 30)
    assert "cupy.RawKernel.__call__" not in plane.gpu.paths()[before:]


@ranks(1)
def test_addresses_are_sent_again_only_when_tensors_have_moved(plane: Plane) -> None:
    def uploads(tensors: list[torch.Tensor]) -> int:
        before = len(plane.gpu.calls)
        for each, tensor in zip(made, tensors, strict=True):
            each.inputs = each.outputs = [tensor]
        finish(plane, plane.executor.execute(response, made))
        return plane.gpu.paths()[before:].count("cupy.cuda.MemoryPointer.copy_from_host_async")

    first = [torch.ones(30), torch.ones(5)]
    second = [torch.ones(30), torch.ones(5)]
    made = [entry(plane._request(OpKind.ALLREDUCE, t, name=str(n)), t, t) for n, t in enumerate(first)]
    for each in made:
        each.ready = plane.executor.mark(each.inputs, each.request.name)
    response = plane.response_of(made)
    uploads(first)
    assert [uploads(first), uploads(second), uploads(second)] == [0, 1, 0]
    assert (second[0] == 1.0).all()


@ranks(2)
def test_16_bit_floats_travel_as_they_are_where_that_was_asked_for() -> None:
    plane = Plane("device", Settings(gpu_sums="native"))
    tensor = torch.full((100,), 40_000.0, dtype=torch.float16)
    _, work = launch(plane, tensor, op=ReduceOp.AVERAGE)
    finish(plane, work)
    assert (tensor == 40_000.0).all()
    (reduction,) = [call for call in plane.gpu.calls if call.path == f"{COMM}.allReduce"]
    assert reduction.args[3] == plane.gpu.modules.nccl.NCCL_FLOAT16
    plane.close()


# Communicators.


@ranks(1, 2)
def test_communicators_are_made_when_needed_and_destroyed_at_the_end() -> None:
    plane = Plane("device")
    assert not plane.gpu.modules.nccl.alive
    for _ in range(3):
        finish(plane, launch(plane, torch.ones(3))[1])
    (communicator,) = plane.gpu.modules.nccl.alive
    plane.close()
    assert communicator.state == "destroyed"
    paths = plane.gpu.paths()
    assert paths.index("cupy.cuda.Stream.synchronize") < paths.index(f"{COMM}.destroy")


@ranks(1, 2)
def test_communicators_are_aborted_when_the_runtime_has_failed() -> None:
    plane = Plane("device")
    launch(plane, torch.ones(3))
    MPI.COMM_WORLD.barrier()
    plane.executor.abort()
    assert [each.state for each in plane.gpu.modules.nccl.alive] == ["aborted"]
    plane.host.close()


@ranks(2)
def test_a_job_on_cpus_makes_no_use_of_a_device(plane: Plane) -> None:
    request = Request("t", OpKind.ALLREDUCE, ("float32",), ((3,),))
    made = entry(request, torch.ones(3), torch.empty(3))
    assert (
        plane.executor.execute(Plane.response_of(SimpleNamespace(request=lambda r: r), [made]), [made])
        is None
    )
    assert (made.outputs[0] == plane.size).all() and not plane.gpu.calls


@ranks(2)
def test_where_nccl_cannot_connect_it_is_an_error_on_all_ranks_if_it_was_asked_for() -> None:
    plane = Plane("device")
    if plane.rank == 1:
        plane.gpu.refusal = RuntimeError("unhandled system error")
    else:  # In NCCL's place: it waits for the other until it is told to stop.
        plane.gpu.refusal = RuntimeError("remote process exited")
    with pytest.raises(FusionError, match=r"rank 0 could not connect GPU 0 by NCCL.*NCCL_DEBUG"):
        launch(plane, torch.ones(3))
    plane.host.close()


@ranks(2)
def test_where_nccl_cannot_connect_auto_goes_through_the_host(caplog: pytest.LogCaptureFixture) -> None:
    plane = automatic(Gpu(index=MPI.COMM_WORLD.rank))
    plane.gpu.refusal = RuntimeError("unhandled system error")
    tensor = torch.ones(3)
    finish(plane, launch(plane, tensor)[1])
    assert (tensor == plane.size).all()
    assert ("unhandled system error" in caplog.text) == (plane.rank == 0)
    plane.close()


@ranks(2)
def test_ranks_that_share_a_gpu_go_through_the_host() -> None:
    plane = automatic(Gpu(index=0))
    tensor = torch.ones(3)
    finish(plane, launch(plane, tensor)[1])
    assert (tensor == plane.size).all() and not plane.gpu.modules.nccl.alive
    plane.close()


def automatic(gpu: Gpu) -> Plane:
    """A plane of devices with the setting `auto`."""
    plane = Plane("one node")
    plane.gpu, plane.on_device = gpu, True
    plane.executor = Devices(
        plane.host,
        plane.topology,
        plane.waiter,
        plane.spans,
        Settings(),
        load=lambda: gpu.modules,
        lacking=lambda: None,
    )
    return plane


@ranks(1)
def test_what_nccl_finds_out_later_is_raised_when_the_work_is_asked_about(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusion.cuda.work.CHECK_EVERY_S", 0.0)
    launch(plane, torch.ones(3))
    side = plane.executor._cuda._device.side
    plane.gpu.hold(side)
    _, work = launch(plane, torch.ones(3))
    assert not work.done()
    plane.gpu.failure = RuntimeError("remote process exited")
    with pytest.raises(RuntimeError, match="remote process exited"):
        work.done()
    plane.gpu.release(side)


@ranks(2)
def test_adasum_goes_through_the_host(plane: Plane) -> None:
    tensor = torch.tensor([1.0, 0.0]) if plane.rank == 0 else torch.tensor([0.0, 2.0])
    finish(plane, launch(plane, tensor, op=ReduceOp.ADASUM)[1])
    assert tensor.tolist() == [1.0, 2.0]


# What is refused.


@ranks(1)
def test_submitting_while_a_graph_is_captured_is_refused(plane: Plane) -> None:
    plane.gpu.capturing = True
    with pytest.raises(FusionError, match=r"'w' was submitted while a CUDA graph is being captured"):
        plane.executor.mark([torch.ones(3)], "w")


@ranks(1)
def test_a_tensor_on_another_device_than_this_ranks_is_refused(plane: Plane) -> None:
    plane.executor.mark([torch.ones(3)], "w")
    other: Any = SimpleNamespace(device="cuda:3", get_device=lambda: 3)
    with pytest.raises(ValueError, match=r"'v' is on cuda:3, but this rank's GPU is cuda:0.*set_device"):
        plane.executor.mark([other], "v")


def devices(plane: Plane, setting: str, **options: Any) -> Devices:
    return Devices(plane.host, plane.topology, plane.waiter, plane.spans, Settings(gpu=setting), **options)


@ranks(2)
@pytest.mark.parametrize("setting", ["nccl", "hierarchical"])
def test_asking_for_nccl_where_one_rank_cannot_have_it_is_an_error_on_all(plane: Plane, setting: str) -> None:
    with pytest.raises(FusionError, match=rf'gpu="{setting}".*rank 1 cannot use a GPU: no driver'):
        devices(plane, setting, lacking=lambda: "no driver" if plane.rank == 1 else None)


@ranks(1)
def test_without_a_gpu_tensors_on_one_are_refused_and_say_what_is_missing(plane: Plane) -> None:
    without = devices(plane, "auto", lacking=lambda: "CuPy is not installed: pip install cupy-cuda12x")
    with pytest.raises(FusionError, match=r"'w' is on a GPU.*pip install cupy.*tensor\.cpu\(\)"):
        without.mark([torch.ones(3)], "w")


@ranks(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_is_missing_here_is_said() -> None:
    reason = present.missing()
    assert reason is not None and (":" in reason or "doctor" in reason)
