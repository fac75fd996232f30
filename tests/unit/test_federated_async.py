"""The asynchronous server's decisions, with no message and no clock."""

from __future__ import annotations

import pytest
import torch

from fusion.federated import FedAsync, FedAvgM, FedBuff, Staleness
from fusion.federated.async_server import AsyncServer
from fusion.federated.vector import ModelState


def state(*values: float, counters: tuple[int, ...] = ()) -> ModelState:
    return ModelState(torch.tensor(values, dtype=torch.float64), torch.tensor(counters, dtype=torch.int64))


def server(rule, clients=(0, 1, 2), **settings) -> AsyncServer:
    return AsyncServer(state(1.0, 2.0), 1, clients, rule, **settings)


@pytest.mark.parametrize(
    ("staleness", "weights"),
    [
        (Staleness("constant"), [1, 1, 1, 1]),
        (Staleness("polynomial", a=0.5), [1, 2**-0.5, 3**-0.5, 0.5]),
        (Staleness("hinge", a=2.0, b=1), [1, 1, 1 / 3, 1 / 5]),
    ],
)
def test_weights_are_those_of_the_paper(staleness, weights) -> None:
    assert [staleness.weight(age) for age in range(4)] == pytest.approx(weights)


def test_fedasync_mixes_the_clients_model_in() -> None:
    served = server(FedAsync(mixing=0.5, staleness=Staleness("polynomial", a=1.0)))
    served.assign()
    assert served.take(0, state(2.0, 0.0)) == "new model"
    # Fresh: (1 - 0.5) * 1 + 0.5 * (1 + 2).
    assert served.state.values.tolist() == [2.0, 2.0]
    # One model old, so half the mixing, and the client's model started from 1, not from 2.
    served.take(1, state(-1.0, 4.0))
    assert served.state.values.tolist() == [0.75 * 2.0 + 0.25 * 0.0, 0.75 * 2.0 + 0.25 * 6.0]
    assert served.tally.staleness == {0: 1, 1: 1}


def test_fedbuff_makes_a_model_of_every_k_updates() -> None:
    served = server(FedBuff(2, staleness=Staleness("polynomial", a=1.0)))
    served.assign()
    assert served.take(0, state(1.0, 0.0)) == "buffered"
    assert served.version == 0
    assert served.take(1, state(3.0, 2.0)) == "new model"
    assert served.state.values.tolist() == [1.0 + 4.0 / 2, 2.0 + 2.0 / 2]
    served.assign()
    served.take(2, state(2.0, 0.0))  # Started from the first model: half its weight.
    served.take(0, state(4.0, 0.0))
    assert served.state.values[0].item() == 3.0 + (2.0 / 2 + 4.0) / 2


def test_fedbuff_steps_a_server_optimizer_on_parameters_only() -> None:
    served = server(FedBuff(1, server=FedAvgM(momentum=0.5), staleness=Staleness("constant")))
    for _ in range(2):
        served.assign()
        served.take(0, state(1.0, 1.0))
    assert served.state.values.tolist() == [1.0 + 1.0 + 1.5, 4.0]


def test_counters_become_the_largest() -> None:
    served = AsyncServer(state(0.0, counters=(5,)), 1, (0, 1), FedAsync())
    served.assign()
    served.take(0, state(0.0, counters=(3,)))
    assert served.state.counters.tolist() == [5]
    served.take(1, state(0.0, counters=(9,)))
    assert served.state.counters.tolist() == [9]


def test_a_model_that_was_sent_is_not_changed() -> None:
    served = server(FedAsync())
    first = served.assign()[0].state
    served.take(0, state(9.0, 9.0))
    assert first.values.tolist() == [1.0, 2.0]


def test_an_update_that_is_too_stale_is_rejected_and_its_client_told() -> None:
    served = server(FedAsync(), clients=(0, 1), max_staleness=1)
    served.assign()
    for _ in range(2):
        assert served.take(0, state(1.0, 0.0)) == "new model"
        assert [(its.client, its.work.accepted) for its in served.assign()] == [(0, True)]
    before = served.state.values.clone()
    assert served.take(1, state(1.0, 0.0)) == "rejected"
    assert torch.equal(served.state.values, before)
    assert served.tally.rejected == {1: 1}
    assert served.tally.rejected_staleness == {2: 1}
    work = served.assign()[0]
    assert (work.client, work.work.accepted, work.work.version) == (1, False, 2)


def test_an_update_exactly_as_stale_as_allowed_is_used() -> None:
    served = server(FedAsync(), clients=(0, 1), max_staleness=1)
    served.assign()
    served.take(0, state(1.0, 0.0))
    assert served.take(1, state(1.0, 0.0)) == "new model"


def test_a_client_never_waits_for_a_slow_one() -> None:
    served = server(FedAsync())
    assert [its.client for its in served.assign()] == [0, 1, 2]
    for _ in range(5):
        served.take(1, state(0.0, 0.0))
        assert [its.client for its in served.assign()] == [1]


def test_with_less_concurrency_the_client_that_waited_longest_is_next() -> None:
    served = server(FedAsync(), concurrency=2)
    assert [its.client for its in served.assign()] == [0, 1]
    served.take(1, state(0.0, 0.0))
    assert [its.client for its in served.assign()] == [2]
    served.dropped(0)
    assert [its.client for its in served.assign()] == [1]


def test_a_failed_client_gets_no_more_work() -> None:
    served = server(FedAsync(), clients=(0, 1))
    served.assign()
    served.failed(0, "it raised")
    served.failed(1, "it raised")
    assert served.assign() == []
    assert not served.clients_left
    assert served.tally.failed == {0: "it raised", 1: "it raised"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAsync(mixing=0.0),
        lambda: FedAsync(mixing=float("nan")),
        lambda: FedBuff(0),
        lambda: Staleness("linear"),  # type: ignore[arg-type]
        lambda: Staleness("hinge", a=-1.0),
    ],
)
def test_numbers_out_of_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match="must"):
        make()
