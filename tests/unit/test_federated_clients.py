"""Clients, their data, who is chosen, and local training."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fusion.federated import Client, LocalTraining, choose_clients, dirichlet_split
from fusion.federated.training import Stopped

LABELS = torch.arange(10).repeat(30)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def training(**settings) -> LocalTraining:
    return LocalTraining(
        loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **settings,
    )


@pytest.mark.parametrize("wrap", [lambda rows: (rows,), TensorDataset])
def test_an_epoch_has_every_example_once(wrap) -> None:
    client = Client(0, wrap(torch.arange(10)))
    batches = [batch[0] for batch in client.batches(4, generator())]
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(torch.cat(batches).tolist()) == list(range(10))


def test_a_last_small_batch_can_be_left_out_but_not_the_only_one() -> None:
    assert [len(b[0]) for b in Client(0, (torch.arange(9),)).batches(4, generator(), drop_last=True)] == [
        4,
        4,
    ]
    assert [len(b[0]) for b in Client(0, (torch.arange(3),)).batches(4, generator(), drop_last=True)] == [3]
    assert list(Client(0, (torch.empty(0),)).batches(4, generator())) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Client(-1, (torch.ones(2),)), "0 or more"),
        (lambda: Client(3, (torch.ones(2), torch.ones(3))), r"client 3.*\[2, 3\]"),
        (lambda: Client(0, (torch.ones(2),), slowness=0.5), "slowness"),
        (lambda: Client(0, (torch.ones(2),), dropout=1.5), "dropout"),
        (lambda: training(epochs=0), "epochs"),
        (lambda: training(proximal=-1.0), "proximal"),
        (lambda: choose_clients({0: 1}, 0.0, seed=0, round_number=0), "fraction"),
        (lambda: choose_clients({0: 1}, float("nan"), seed=0, round_number=0), "fraction"),
        (lambda: choose_clients({0: 0, 1: 0}, 1.0, seed=0, round_number=0), "no client has any data"),
        (lambda: dirichlet_split(LABELS, 0, 1.0, seed=0), "clients"),
        (lambda: dirichlet_split(LABELS, 2, float("inf"), seed=0), "alpha"),
    ],
)
def test_bad_values_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_data_without_a_length_is_refused() -> None:
    with pytest.raises(TypeError, match="client 2"):
        Client(2, iter([1, 2]))  # type: ignore[arg-type]


def test_a_choice_depends_on_seed_and_round_alone_and_passes_empty_clients_by() -> None:
    examples = {number: number for number in range(20)}
    chosen = [choose_clients(examples, 0.3, seed=1, round_number=r) for r in range(50)]
    assert chosen == [
        choose_clients(dict(reversed(examples.items())), 0.3, seed=1, round_number=r) for r in range(50)
    ]
    assert all(len(its) == len(set(its)) == 6 for its in chosen)
    assert set().union(*chosen) == set(range(1, 20))
    assert choose_clients(examples, 1e-9, seed=1, round_number=0)


def test_a_split_gives_every_example_to_one_client_and_repeats() -> None:
    parts = dirichlet_split(LABELS, 7, 0.1, seed=3)
    assert sorted(torch.cat(parts).tolist()) == list(range(300))
    again = dirichlet_split(LABELS, 7, 0.1, seed=3)
    assert all(torch.equal(one, other) for one, other in zip(parts, again, strict=True))


def test_a_smaller_alpha_makes_clients_less_alike() -> None:
    def spread(alpha: float) -> float:
        counts = [
            LABELS[part].bincount(minlength=10).double() for part in dirichlet_split(LABELS, 5, alpha, seed=0)
        ]
        return torch.stack(counts).std(0).mean().item()

    assert spread(100.0) < spread(1.0) < spread(0.05)


def test_the_proximal_term_is_that_of_the_paper() -> None:
    data = (torch.randn(8, 3, generator=generator()), torch.randn(8, 1, generator=generator()))
    models = []
    for proximal in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        if proximal:
            training(epochs=5, batch_size=4, proximal=0.7).train(model, Client(0, data), generator())
        else:

            def loss(model: nn.Module, batch: tuple[torch.Tensor, ...], start=start) -> torch.Tensor:
                far = sum(((p - s) ** 2).sum() for p, s in zip(model.parameters(), start, strict=True))
                return ((model(batch[0]) - batch[1]) ** 2).mean() + 0.7 / 2 * far

            plain = LocalTraining(
                loss=loss,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                epochs=5,
                batch_size=4,
            )
            plain.train(model, Client(0, data), generator())
        models.append(model)
    assert torch.allclose(models[0].weight, models[1].weight, atol=1e-6)


def test_a_training_that_is_told_to_stop_ends_at_the_next_batch() -> None:
    stop = threading.Event()
    seen = []

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        seen.append(len(batch[0]))
        stop.set()
        return model(batch[0]).sum()

    plain = LocalTraining(loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=2)
    client = Client(0, (torch.ones(10, 3),), slowness=1e6)
    with pytest.raises(Stopped):
        plain.train(nn.Linear(3, 1), client, generator(), stop)
    assert seen == [2]
