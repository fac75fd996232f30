"""Parameters, optimizer state and objects of one rank on all ranks; elastic state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.mpi.torch_models import assert_same_on_all_ranks, loss, net, sgd, train
from tests.ranks import ranks

OPTIMIZERS: dict[str, Any] = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9},
    "Adam": {},
    "Adam amsgrad": {"amsgrad": True},
    "AdamW": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "Rprop": {},
    "LBFGS": {},
    "Adafactor": {},
    "Muon": {},
    "SparseAdam": {},
    "Adam tensor options": {"lr": torch.tensor(0.01), "foreach": False},
}


def make(title: str, model: nn.Module) -> torch.optim.Optimizer:
    name = title.partition(" ")[0]
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    parameters = (
        [p for p in model.parameters() if p.dim() == 2] if name == "Muon" else list(model.parameters())
    )
    options = dict(OPTIMIZERS[title])
    if "lr" in options:
        options["lr"] = options["lr"].clone()
    return kind(parameters, **options)


def take_steps(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> None:
    def closure() -> torch.Tensor:
        model.zero_grad()
        value = loss(model, 0, 0)
        value.backward()
        if isinstance(optimizer, torch.optim.SparseAdam):
            for parameter in model.parameters():
                parameter.grad = parameter.grad.to_sparse()
        return value

    for _ in range(steps):
        optimizer.step(closure)


def assert_equal(mine: Any, roots: Any, where: str = "state") -> None:
    """Equal in value and type, all the way down."""
    assert type(mine) is type(roots), f"{where}: {type(mine)} is not {type(roots)}"
    if isinstance(roots, torch.Tensor):
        assert (mine.dtype, mine.shape, mine.stride()) == (roots.dtype, roots.shape, roots.stride()), where
        assert torch.equal(mine, roots), where
    elif isinstance(roots, dict):
        assert list(mine) == list(roots), where
        for key, value in roots.items():
            assert_equal(mine[key], value, f"{where}.{key}")
    elif isinstance(roots, (list, tuple)):
        assert len(mine) == len(roots), where
        for number, (one, other) in enumerate(zip(mine, roots, strict=True)):
            assert_equal(one, other, f"{where}[{number}]")
    else:
        assert mine == roots, where


def pickled_state(hvd: Any, optimizer: torch.optim.Optimizer) -> Any:
    return hvd.allgather_object(optimizer.state_dict())[0]


def test_no_optimizer_of_this_torch_is_left_out() -> None:
    classes = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert classes - {"Optimizer"} <= {title.partition(" ")[0] for title in OPTIMIZERS}


@ranks(2)
@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("title", OPTIMIZERS)
def test_every_optimizer_ends_with_the_state_of_the_root(hvd, title, root):
    model = net()
    optimizer = make(title, model)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1 * hvd.rank()
    take_steps(optimizer, model, 3 if hvd.rank() == root else 0)
    before = pickled_state(hvd, optimizer) if root == 0 else hvd.allgather_object(optimizer.state_dict())[1]
    hvd.broadcast_optimizer_state(optimizer, root)
    assert_equal(optimizer.state_dict(), before)
    hvd.broadcast_parameters(model.state_dict(), root)
    take_steps(optimizer, model, 1)
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_the_root_is_not_touched(hvd):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    take_steps(optimizer, model, 2)
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    copies = [value.clone() for value in tensors]
    values = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert all(torch.equal(p.grad, value) for p, value in zip(model.parameters(), gradients, strict=True))
    if hvd.rank() == 0:
        kept = [value for state in optimizer.state.values() for value in state.values()]
        assert all(one is other for one, other in zip(kept, tensors, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))


@ranks(2)
@pytest.mark.parametrize("with_state", [0, 1])
def test_state_on_one_rank_only(hvd, with_state):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    take_steps(optimizer, model, 1 if hvd.rank() == with_state else 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert len(optimizer.state) == (6 if with_state == 0 else 0)


@ranks(2)
def test_options_of_every_type_arrive_unchanged(hvd):
    options = {
        "lr": 1e-5,
        "momentum": 0.5,
        "initial_lr": 0.3,
        "nothing": None,
        "flag": True,
        "betas": (0.1, 0.2),
        "title": "first",
        "scalar": np.float32(1.5),
        "tensor": torch.tensor(3.0),
        "nested": {"list": [1, (2, None)]},
        "large": torch.arange(2000.0).view(2, 1000),
    }
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    optimizer.param_groups[0]["stale"] = hvd.rank()
    if hvd.rank() == 0:
        del optimizer.param_groups[0]["stale"]
        optimizer.param_groups[0].update(options)
    groups = optimizer.param_groups
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert "stale" not in groups[0]
    for key, value in options.items():
        assert_equal(groups[0][key], value, key)


@ranks(2)
def test_a_scheduler_still_steers_the_groups(hvd):
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1 / (hvd.rank() + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(optimizer), 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@ranks(2)
def test_state_wider_than_the_parameters_keeps_its_dtype(hvd):
    weight = nn.Parameter(torch.ones(3000, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if hvd.rank() == 0:
        optimizer.state[weight]["master"] = torch.full((3000,), 1 / 3)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert torch.equal(optimizer.state[weight]["master"], torch.full((3000,), 1 / 3))


@ranks(2)
def test_an_optimizer_built_differently_is_refused_where_it_is(hvd):
    parameters = list(net().parameters())
    optimizer = torch.optim.SGD(parameters[: 6 - hvd.rank()], lr=0.1)
    if hvd.rank() == 0:
        hvd.broadcast_optimizer_state(optimizer, 0)
    else:
        with pytest.raises(ValueError, match=r"\[5\].*\[6\]"):
            hvd.broadcast_optimizer_state(optimizer, 0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@ranks(2)
def test_bulk_state_does_not_go_through_pickle(hvd, monkeypatch):
    weight = nn.Parameter(torch.ones(200_000))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(200_000)
    optimizer.step()
    lengths = []
    from fusion.torch import objects

    plain = objects._pickle
    monkeypatch.setattr(objects, "_pickle", lambda obj: lengths.append(len(plain(obj)[0])) or plain(obj))
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert sum(lengths) < 20_000


@ranks(1, 2, 3)
@pytest.mark.parametrize("kind", ["state_dict", "pairs", "parameters"])
def test_parameters_are_overwritten_in_place(hvd, kind):
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(hvd.rank())
    addresses = [p.data_ptr() for p in model.parameters()]
    given = {
        "state_dict": model.state_dict(),
        "pairs": model.named_parameters(),
        "parameters": model.parameters(),
    }[kind]
    hvd.broadcast_parameters(given, root_rank=hvd.size() - 1)
    expected = net()
    for parameter, value, address in zip(model.parameters(), expected.parameters(), addresses, strict=True):
        assert torch.equal(parameter, value + (hvd.size() - 1)) and parameter.data_ptr() == address


@ranks(2)
def test_entries_that_are_no_tensors_are_left_alone(hvd):
    state = {"weight": torch.full((2,), float(hvd.rank())), "epoch": hvd.rank(), "nothing": None}
    hvd.broadcast_parameters(state, 0)
    assert state["weight"].tolist() == [0, 0] and state["epoch"] == hvd.rank()


@ranks(2)
def test_layout_and_dtype_of_parameters_do_not_matter(hvd):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    state = {**model.state_dict(), "turned": torch.full((3, 2), hvd.rank() + 1j).t()}
    state["half"] = torch.full((2,), hvd.rank() + 0.5).bfloat16()
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(hvd.rank())
    hvd.broadcast_parameters(state, 1)
    assert (model[0].weight == 1).all() and model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert (state["turned"] == 1 + 1j).all() and (state["half"] == 1.5).all()


@ranks(2)
def test_parameters_of_no_known_form_are_refused(hvd):
    with pytest.raises(ValueError, match="got int"):
        hvd.broadcast_parameters(3, 0)
    with pytest.raises(ValueError, match="more than once"):
        hvd.broadcast_parameters([("a", torch.ones(1)), ("a", torch.ones(1))], 0)


@ranks(1, 2, 3)
def test_any_object_is_broadcast(hvd):
    root = hvd.size() - 1
    thing = {"a": [1, None], "b": {2.5}, "t": torch.ones(2)}
    mine = thing if hvd.rank() == root else None
    result = hvd.broadcast_object(mine, root_rank=root)
    assert_equal(result, thing)
    assert (result is mine) == (hvd.rank() == root)
    assert hvd.broadcast_object(b"", 0) == b"" and hvd.broadcast_object("x", 0, name="named") == "x"


@ranks(1, 2, 3)
def test_objects_are_gathered_in_rank_order(hvd):
    gathered = hvd.allgather_object({"rank": hvd.rank(), "bulk": b"x" * 10_000 * hvd.rank()})
    assert [part["rank"] for part in gathered] == list(range(hvd.size()))
    assert [len(part["bulk"]) for part in gathered] == [10_000 * rank for rank in range(hvd.size())]


@ranks(2)
def test_an_object_that_cannot_be_pickled_fails_on_every_rank(hvd):
    secret = (lambda: 0) if hvd.rank() == 0 else 1
    with pytest.raises(hvd.FusionError, match="pickle"):
        hvd.broadcast_object(secret, 0)
    with pytest.raises(hvd.FusionError, match="pickle"):
        hvd.allgather_object(secret)
    assert hvd.allgather_object(hvd.rank()) == [0, 1]


@ranks(2)
def test_state_is_that_of_rank_0_and_can_be_put_back(hvd):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    with torch.no_grad():
        model[0].bias.fill_(hvd.rank() + 1.0)
    state = hvd.elastic.TorchState(model, optimizer, epoch=5 + hvd.rank(), note=["a"])

    @hvd.elastic.run
    def work(state: object, steps: int) -> int:
        assert (model[0].bias == 1).all() and state.epoch == 5
        train(optimizer, model, range(steps), hvd.rank())
        state.epoch += 1
        state.note.append("b")
        state.commit()
        return state.epoch

    assert work(state, 2) == 6
    committed = [parameter.detach().clone() for parameter in model.parameters()]
    train(optimizer, model, range(2), hvd.rank())
    state.epoch = 99
    state.note.clear()
    state.restore()
    assert state.epoch == 6 and state.note == ["a", "b"]
    for parameter, value in zip(model.parameters(), committed, strict=True):
        assert torch.equal(parameter, value)
    train(optimizer, model, [0], hvd.rank())
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_a_failed_collective_puts_the_state_back_and_says_that_ranks_are_not_replaced(hvd):
    state = hvd.elastic.ObjectState(batch=3)

    @hvd.elastic.run
    def work(state: object) -> None:
        state.batch = 8
        hvd.allreduce(torch.ones(hvd.rank() + 1), name="uneven")

    with pytest.raises(hvd.HorovodInternalError, match="uneven") as caught:
        work(state)
    assert state.batch == 3
    assert any("does not replace lost ranks" in note for note in caught.value.__notes__)


@ranks(2)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sampler_shares_out_what_is_left(hvd, shuffle):
    sampler = hvd.elastic.ElasticSampler(range(11), shuffle=shuffle)
    sampler.set_epoch(1)
    first = list(sampler)
    assert len(first) == len(sampler) == 6
    assert {i for each in hvd.allgather_object(first) for i in each} == set(range(11))
    sampler.record_batch(0, 2)
    again = hvd.elastic.ElasticSampler(range(11), shuffle=shuffle)
    again.load_state_dict(sampler.state_dict())
    done = {i for each in hvd.allgather_object(first[:2]) for i in each}
    rest = {i for each in hvd.allgather_object(list(again)) for i in each}
    assert len(again) == 4 and done | rest == set(range(11)) and not done & rest
