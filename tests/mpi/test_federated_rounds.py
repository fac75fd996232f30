"""Federated averaging in rounds: equal to one process, the same on all ranks, errors that name the client."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import fusion.federated as fed
from fusion.federated.sampling import seed_of
from tests.ranks import ranks

SIZES = [5, 12, 1, 0, 7, 20]
"""Examples of the clients."""


def data(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    rows = torch.randn(SIZES[number], 3, generator=generator)
    return rows, (rows.sum(1) > 0).long() ^ (number % 2)


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def clients(hvd, **settings) -> list[fed.Client]:
    """This rank's; the last rank hosts none if there are three."""
    hosts = min(hvd.size(), 2)
    return [fed.Client(n, data(n), **settings) for n in range(len(SIZES)) if n % hosts == hvd.rank()]


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def training(its_loss=loss, **settings) -> fed.LocalTraining:
    return fed.LocalTraining(loss=its_loss, optimizer=sgd, epochs=2, batch_size=4, **settings)


def train_alone(model: nn.Module, chosen, number: int, seed: int) -> list[tuple[int, list[torch.Tensor]]]:
    """What each client's parameters become, with nothing of `fusion.federated` but its random order."""
    trained = []
    for client in chosen:
        mine = copy.deepcopy(model)
        optimizer = sgd(mine.parameters())
        generator = torch.Generator().manual_seed(seed_of(seed, number, client))
        rows, labels = data(client)
        for _ in range(2):
            for batch in torch.randperm(len(rows), generator=generator).split(4):
                optimizer.zero_grad()
                functional.cross_entropy(mine(rows[batch]), labels[batch]).backward()
                optimizer.step()
        trained.append((len(rows), [parameter.detach() for parameter in mine.parameters()]))
    return trained


def average(model: nn.Module, trained: list[tuple[int, list[torch.Tensor]]]) -> list[torch.Tensor]:
    total = sum(count for count, _ in trained)
    return [
        sum(count / total * its[index] for count, its in trained)
        for index, _ in enumerate(model.parameters())
    ]


def assert_equal_on_all_ranks(hvd, model: nn.Module) -> None:
    mine = [value.tolist() for value in model.state_dict().values()]
    assert all(theirs == mine for theirs in hvd.allgather_object(mine))


@ranks(2, 3)
def test_rounds_equal_a_single_process_to_rounding(hvd):
    model, reference = net(hvd.rank()), net(0)
    federation = fed.FederatedAveraging(model, clients(hvd), training(), fraction=0.6, seed=4)
    for number in range(4):
        report = federation.round()
        assert report.answered == report.chosen
        assert 3 not in report.chosen
        new = average(reference, train_alone(reference, report.chosen, number, 4))
        with torch.no_grad():
            for parameter, value in zip(reference.parameters(), new, strict=True):
                parameter.copy_(value)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        assert report.examples == sum(SIZES[client] for client in report.chosen)
    assert_equal_on_all_ranks(hvd, model)


@ranks(2)
def test_a_server_optimizer_gets_the_average_change(hvd):
    model, reference = net(), net()
    server, own = fed.FedAdam(lr=0.05), fed.FedAdam(lr=0.05)
    federation = fed.FederatedAveraging(model, clients(hvd), training(), server=server, threads=3)
    for number in range(3):
        report = federation.round()
        old = nn.utils.parameters_to_vector(reference.parameters()).detach()
        new = average(reference, train_alone(reference, report.chosen, number, 0))
        values = old.clone()
        own.step(values, torch.cat([value.reshape(-1) for value in new]) - old)
        nn.utils.vector_to_parameters(values, reference.parameters())
        mine = nn.utils.parameters_to_vector(model.parameters())
        assert torch.allclose(mine, values, rtol=1e-4, atol=1e-5)


@ranks(2)
def test_clients_that_drop_out_have_no_part_in_the_average(hvd):
    def leaving(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if len(batch[0]) == 1:  # Client 2, and the last batch of client 0.
            raise fed.ClientDropped("no power")
        return loss(model, batch)

    model, reference = net(), net()
    report = fed.FederatedAveraging(model, clients(hvd), training(leaving)).round()
    assert report.dropped == (0, 2)
    assert report.answered == (1, 4, 5)
    new = average(reference, train_alone(reference, report.answered, 0, 0))
    for mine, theirs in zip(model.parameters(), new, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_a_round_without_enough_answers_changes_nothing(hvd):
    model = net()
    before = copy.deepcopy(model.state_dict())
    dropping = fed.FederatedAveraging(model, clients(hvd, dropout=1.0), training(), compression="topk:0.1")
    report = dropping.round()
    assert (report.applied, report.answered, report.dropped) == (False, (), (0, 1, 2, 4, 5))
    few = fed.FederatedAveraging(model, clients(hvd), training(), least_clients=6)
    report = few.round()
    assert not report.applied
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@ranks(2)
@pytest.mark.parametrize("compression", [None, "topk:0.1"])
def test_a_client_that_raises_is_named_on_every_rank_and_the_next_round_works(hvd, compression):
    broken = [True]

    def failing(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if broken[0] and len(batch[0]) == 1 and hvd.rank() == 0:
            raise KeyError("no such file")
        return loss(model, batch)

    model = net()
    before = copy.deepcopy(model.state_dict())
    federation = fed.FederatedAveraging(model, clients(hvd), training(failing), compression=compression)
    with pytest.raises(fed.ClientError, match=r"client 0 on rank 0: it raised KeyError: 'no such file'"):
        federation.round()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    broken[0] = False
    assert federation.round().applied
    assert_equal_on_all_ranks(hvd, model)


@ranks(2)
def test_a_client_that_diverges_can_be_left_out_of_the_round(hvd):
    def diverging(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss(model, batch) * (float("nan") if hvd.rank() == 1 else 1.0)

    model = net()
    report = fed.FederatedAveraging(model, clients(hvd), training(diverging), on_failure="drop").round()
    assert report.failed == (1, 5)
    assert report.answered == (0, 2, 4)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@ranks(2)
def test_compressed_rounds_with_feedback_lose_nothing_in_the_long_run(hvd):
    """Clients' changes are always the same: after r rounds, r of them have arrived, less what is kept."""
    change = torch.linspace(-1, 1, 500)

    def constant(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return -(model.weight.reshape(-1) * change).sum() * batch[0].mean()

    # Plain SGD at rate 1 over one batch of ones: the client's change is `change` each time.
    fixed = fed.LocalTraining(loss=constant, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), batch_size=8)
    model = nn.Linear(500, 1, bias=False)
    nn.init.zeros_(model.weight)
    mine = [fed.Client(hvd.rank(), (torch.ones(4, 1),))]
    federation = fed.FederatedAveraging(model, mine, fixed, compression="topk:0.1")
    for _ in range(12):
        report = federation.round()
    assert report.payload_bytes < 2 * 500 * 4 / 3
    kept = federation.state_dict()["uplinks"][hvd.rank()]["memory"]["weight"]["residual"]
    everything = hvd.allreduce(kept) + model.weight.detach().reshape(-1)
    assert torch.allclose(everything, 12 * change, atol=1e-4)
    assert_equal_on_all_ranks(hvd, model)


def normed() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@ranks(2)
def test_running_statistics_are_averaged_and_counters_the_largest(hvd):
    model = normed()
    mine = [fed.Client(hvd.rank(), data([1, 5][hvd.rank()]))]
    start = copy.deepcopy(model)
    fed.FederatedAveraging(model, mine, training()).round()
    statistics = []
    for client, its in enumerate((1, 5)):
        alone = copy.deepcopy(start)
        training().train(
            alone, fed.Client(client, data(its)), torch.Generator().manual_seed(seed_of(0, 0, client))
        )
        statistics.append(alone[1])
    expected = (12 * statistics[0].running_var + 20 * statistics[1].running_var) / 32
    assert torch.allclose(model[1].running_var, expected, rtol=1e-5)
    assert (
        model[1].num_batches_tracked.item() == max(its.num_batches_tracked.item() for its in statistics) == 10
    )


@ranks(2)
def test_personal_layers_stay_with_their_client(hvd):
    model = normed()
    mine = [fed.Client(hvd.rank(), data([1, 5][hvd.rank()]))]
    federation = fed.FederatedAveraging(model, mine, training(), personal=["1.*"])
    before = model[1].weight.detach().clone()
    for _ in range(2):
        federation.round()
    assert torch.equal(model[1].weight, before)
    kept = hvd.allgather_object(mine[0].personal["1.weight"].tolist())
    assert kept[0] != kept[1]
    assert mine[0].personal["1.num_batches_tracked"].item() == [12, 20][hvd.rank()]


@ranks(2)
def test_a_restored_federation_goes_on_as_if_nothing_had_happened(hvd):
    def make(model: nn.Module) -> fed.FederatedAveraging:
        server = fed.FedAvgM(momentum=0.5)
        return fed.FederatedAveraging(model, clients(hvd), training(), server=server, compression="topk:0.2")

    models = net(), net()
    whole, first = make(models[0]), make(models[1])
    first.round()
    second = make(models[1])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for federation in (whole, whole, second):
        federation.round()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="another kind of optimizer"):
        fed.FederatedAveraging(net(), clients(hvd), training()).load_state_dict(first.state_dict())


@ranks(2)
def test_other_models_and_bad_clients_are_errors_on_every_rank(hvd):
    with pytest.raises(hvd.MismatchError, match=r"rank 0 has 0.weight .* rank 1 has 0.weight"):
        fed.FederatedAveraging(nn.Sequential(nn.Linear(3, 2 + hvd.rank())), clients(hvd), training())
    with pytest.raises(hvd.MismatchError, match=r"seed differs .* 0 on rank 0, and 1 on rank 1"):
        fed.FederatedAveraging(net(), clients(hvd), training(), seed=hvd.rank())
    with pytest.raises(ValueError, match=r"client number 7 is used 2 times, on ranks \[0, 1\]"):
        fed.FederatedAveraging(net(), [fed.Client(7, data(0))], training())
    with pytest.raises(ValueError, match="none of the 2 clients has any data"):
        fed.FederatedAveraging(net(), [fed.Client(hvd.rank(), data(3))], training())
    with pytest.raises(ValueError, match="fraction"):
        fed.FederatedAveraging(net(), clients(hvd), training(), fraction=2.0)
    with pytest.raises(ValueError, match="on_failure"):
        fed.FederatedAveraging(net(), clients(hvd), training(), on_failure="ignore")


@ranks(2)
def test_one_call_averages_models_by_weight(hvd):
    model = normed()
    with torch.no_grad():
        for value in (*model.parameters(), model[1].running_mean):
            value.fill_(1.0 + hvd.rank())
    model[1].num_batches_tracked.fill_(3 - hvd.rank())
    fed.fedavg(model, weight=[1e9, 3e9][hvd.rank()])
    for value in (*model.parameters(), model[1].running_mean):
        assert torch.allclose(value, torch.full_like(value, 1.75))
    assert model[1].num_batches_tracked.item() == 3


@ranks(2)
def test_a_model_of_weight_0_has_no_influence(hvd):
    model = net(0)
    if hvd.rank() == 1:
        nn.init.constant_(model[0].weight, float("nan"))
    fed.fedavg(model, weight=1 - hvd.rank())
    assert torch.equal(model[0].weight, net(0)[0].weight)


@ranks(2)
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0, 0), "all ranks gave weight 0"),
        ((1, -2), "rank 1 gave -2"),
        ((float("nan"), 1), "rank 0 gave nan"),
    ],
)
def test_bad_weights_are_errors_on_every_rank_and_change_nothing(hvd, weights, message):
    model = net(hvd.rank())
    with pytest.raises(ValueError, match=message):
        fed.fedavg(model, weight=weights[hvd.rank()])
    assert torch.equal(model[0].weight, net(hvd.rank())[0].weight)
