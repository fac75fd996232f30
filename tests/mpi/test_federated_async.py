"""Asynchronous training: nobody waits for a straggler, nobody hangs, every failure has a name."""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import fusion.federated as fed
from fusion import runtime
from fusion.federated.async_client import Inbox
from fusion.federated.link import Link
from fusion.federated.messages import Goodbye, pack
from tests.conftest import RunRanks
from tests.ranks import ranks


def net() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def clients(hvd, count: int = 4) -> list[fed.Client]:
    """This rank's; a client's number is in its data, and the last one has none."""
    mine = [number for number in range(count) if number % hvd.size() == hvd.rank()]
    made = [fed.Client(number, (torch.randn(6, 3), torch.full((6, 1), float(number)))) for number in mine]
    return made + ([fed.Client(99, (torch.empty(0, 3), torch.empty(0, 1)))] if hvd.rank() == 0 else [])


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return ((model(batch[0]) - 1.0) ** 2).mean()


def training(its_loss=loss) -> fed.LocalTraining:
    return fed.LocalTraining(loss=its_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), batch_size=6)


def federation(hvd, model: nn.Module, its_loss=loss, **settings) -> fed.AsyncFederation:
    return fed.AsyncFederation(model, clients(hvd), training(its_loss), **settings)


def assert_equal_on_all_ranks(hvd, model: nn.Module) -> None:
    mine = [value.tolist() for value in model.state_dict().values()]
    assert all(theirs == mine for theirs in hvd.allgather_object(mine))


class Straggler:
    """A loss with which client 0, on rank 0, stays in its training until it is let go.

    Attributes:
        turns: how often client 0 has been given work; the second time its first update has been taken.
    """

    def __init__(self) -> None:
        self.go = threading.Event()
        self.turns = 0

    def __call__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if batch[1][0] == 0:
            self.turns += 1
            assert self.go.wait(50)
        return loss(model, batch)


@ranks(2, 3)
@pytest.mark.parametrize("compression", [None, "topk:0.25"])
def test_a_run_makes_the_models_it_was_asked_for_and_all_ranks_get_the_last(hvd, compression):
    model = net()
    made = federation(hvd, model, rule=fed.FedBuff(3), compression=compression)
    report = made.run(versions=5)
    assert report.versions == 5
    assert sum(report.updates.values()) == sum(report.staleness.values()) == 15
    assert set(report.updates) <= {0, 1, 2, 3}
    assert_equal_on_all_ranks(hvd, model)
    assert model[1].num_batches_tracked > 0
    moved = hvd.allgather_object((report.sent_bytes, report.received_bytes))
    assert sum(sent for sent, _ in moved) == sum(received for _, received in moved)
    assert (moved[0][0] > 0) == (hvd.size() > 1)


@ranks(2)
def test_one_client_is_plain_training_with_the_models_mixed_in(hvd):
    """With a single client nothing is stale, so the result is known exactly."""
    model, reference = net(), net()
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    mine = [fed.Client(0, (rows, torch.zeros(6, 1)))] if hvd.rank() == 1 else []
    fed.AsyncFederation(model, mine, training(), rule=fed.FedAsync(mixing=0.5)).run(versions=3)
    for _ in range(3):
        alone = copy.deepcopy(reference)
        training().train(alone, fed.Client(0, (rows, torch.zeros(6, 1))), torch.Generator())
        with torch.no_grad():
            for parameter, trained in zip(reference.parameters(), alone.parameters(), strict=True):
                parameter.lerp_(trained, 0.5)
            for buffer, trained in zip(reference[1].buffers(), alone[1].buffers(), strict=True):
                buffer.copy_(torch.lerp(buffer, trained, 0.5) if buffer.is_floating_point() else trained)
    for mine_, theirs in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.allclose(mine_.double(), theirs.double(), atol=1e-5)


@ranks(2)
def test_a_straggler_blocks_nobody_and_its_update_is_used_when_it_comes(hvd):
    slow = Straggler()

    def watch(_model: nn.Module, progress: fed.Progress) -> bool:
        if progress.version == 20:
            slow.go.set()
        return slow.turns > 1

    report = federation(hvd, net(), slow, rule=fed.FedAsync()).run(watch=watch)
    assert report.updates[0] >= 1
    assert report.max_staleness >= 20


@ranks(2)
def test_an_update_beyond_the_bound_is_rejected_and_reported(hvd):
    slow = Straggler()

    def watch(_model: nn.Module, progress: fed.Progress) -> bool:
        if progress.version == 10:
            slow.go.set()
        return slow.turns > 1

    made = federation(hvd, net(), slow, rule=fed.FedAsync(), max_staleness=5, compression="topk:0.5")
    report = made.run(watch=watch)
    assert report.rejected[0] == 1
    assert max(report.rejected_staleness) >= 10
    assert report.max_staleness <= 5


@ranks(2)
def test_a_client_that_raises_is_named_on_every_rank_and_the_runtime_goes_on(hvd):
    def failing(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if batch[1][0] == 3:
            raise KeyError("no such file")
        return loss(model, batch)

    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fed.ClientError, match=r"client 3 on rank 1: it raised KeyError: 'no such file'"):
        federation(hvd, model, failing).run(versions=1000, watch=lambda _model, _progress: False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert federation(hvd, model).run(versions=2).versions == 2


@ranks(2)
def test_a_client_that_exits_is_a_failed_client(hvd):
    def exiting(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if batch[1][0] == 1:
            raise SystemExit(3)
        return loss(model, batch)

    with pytest.raises(fed.ClientError, match=r"client 1 on rank 1: it raised SystemExit: 3"):
        federation(hvd, net(), exiting).run(versions=1000)


@ranks(2)
def test_failed_clients_can_be_left_out_until_none_is_left(hvd):
    def failing(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss(model, batch) * (float("nan") if batch[1][0] >= least else 1.0)

    least = 2
    report = federation(hvd, net(), failing, on_failure="drop").run(versions=20)
    assert set(report.failed) <= {2, 3}
    assert set(report.updates) == {0, 1}
    least = 0
    with pytest.raises(fed.ClientError, match="no client is left"):
        federation(hvd, net(), failing, on_failure="drop").run(versions=10)


@ranks(2)
def test_clients_that_only_drop_out_end_the_run_with_an_error(hvd):
    made = fed.AsyncFederation(net(), [fed.Client(hvd.rank(), (torch.ones(6, 3),), dropout=1.0)], training())
    with pytest.raises(hvd.FusionError, match="they all drop out"):
        made.run(versions=1)


@ranks(2)
def test_an_exception_of_the_watch_ends_the_run_on_every_rank(hvd):
    def watch(_model: nn.Module, _progress: fed.Progress) -> None:
        raise ZeroDivisionError("in the evaluation")

    error = ZeroDivisionError if hvd.rank() == 0 else hvd.FusionError
    with pytest.raises(error, match="in the evaluation"):
        federation(hvd, net()).run(versions=1000, watch=watch)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@ranks(2)
def test_a_client_that_does_not_stop_is_named_on_every_rank(hvd):
    slow = Straggler()
    made = federation(hvd, net(), slow, stop_timeout_s=0.3)
    with pytest.raises(fed.ClientError, match=r"client 0 on rank 0 did not stop within 0\.3 s"):
        made.run(versions=5)
    slow.go.set()


@ranks(2)
def test_fewer_may_work_at_a_time(hvd):
    working, most = [0], [0]
    lock = threading.Lock()

    def counting(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with lock:
            working[0] += 1
            most[0] = max(most[0], working[0])
        value = loss(model, batch)
        with lock:
            working[0] -= 1
        return value

    report = federation(hvd, net(), counting, concurrency=1).run(versions=8)
    assert most[0] == 1
    assert report.max_staleness == 0
    assert report.updates == {0: 2, 1: 2, 2: 2, 3: 2}


@ranks(2)
def test_bad_settings_are_errors_on_every_rank(hvd):
    for settings, message in (
        ({"max_staleness": -1}, "max_staleness"),
        ({"concurrency": 0}, "concurrency"),
        ({"on_failure": "ignore"}, "on_failure"),
        ({"stop_timeout_s": 0.0}, "stop_timeout_s"),
        ({"compression": "topk:0"}, "ratio"),
    ):
        with pytest.raises(ValueError, match=message):
            federation(hvd, net(), **settings)
    with pytest.raises(ValueError, match="needs an end"):
        federation(hvd, net()).run()
    with pytest.raises(ValueError, match="versions"):
        federation(hvd, net()).run(versions=0)
    with pytest.raises(hvd.MismatchError, match="rank 1 has no such tensor"):
        federation(hvd, nn.Linear(3, 1, bias=hvd.rank() == 0))


@contextmanager
def linked(inboxes: int, **settings):
    """A link and the inboxes of so many addresses of this rank."""
    current = runtime.current()
    link = Link(current.comm, lambda: current.world.coordinator.end, **settings)
    made = [Inbox(link.check) for _ in range(inboxes)]
    for address, inbox in enumerate(made):
        link.register(address, inbox.put)
    link.start()
    yield link, made
    link.close()


@ranks(2)
def test_messages_arrive_whole_and_in_order_in_however_many_pieces(hvd):
    with linked(2, longest_piece=100) as (link, inboxes):
        for index in range(10):
            for rank in range(hvd.size()):
                values = torch.arange(7 * index) + 1000 * hvd.rank()
                link.send(rank, pack(index % 2, Goodbye(hvd.rank()), [values]))
        for address, inbox in enumerate(inboxes):
            found: dict[int, list[torch.Tensor]] = {}
            for _ in range(5 * hvd.size()):
                message = inbox.get(20)
                found.setdefault(message.header.client, []).append(message.tensors[0])
            for rank in range(hvd.size()):
                expected = [torch.arange(7 * index) + 1000 * rank for index in range(address, 10, 2)]
                assert all(torch.equal(one, other) for one, other in zip(found[rank], expected, strict=True))
    hvd.barrier()


def test_a_rank_that_leaves_is_named_on_the_others(run_ranks: RunRanks) -> None:
    done = run_ranks(
        """
import threading
import torch
import fusion.torch as hvd
import fusion.federated as fed

hvd.init()
leaving = hvd.rank() == 1
calls = 0

def loss(model, batch):
    global calls
    calls += 1
    if leaving and calls == 5:
        threading.Thread(target=hvd.shutdown).start()
    return model(batch[0]).sum()

training = fed.LocalTraining(loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
made = fed.AsyncFederation(
    torch.nn.Linear(2, 1), [fed.Client(hvd.rank(), (torch.ones(4, 2),))], training
)
try:
    made.run(seconds=50)
except hvd.FusionError as error:
    print("caught:", type(error).__name__, error)
""",
        np=2,
        expect_failure=None,
    )
    assert "caught: RankLeftError" in done.outputs[0]
    assert "rank 1: it called shutdown()" in done.outputs[0]
    assert "caught: ShutdownError" in done.outputs[1]
