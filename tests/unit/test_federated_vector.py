"""Models as vectors, and messages as bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coordinator.errors import MismatchError
from fusion.federated.messages import Change, Goodbye, Work, pack, unpack, unpack_all
from fusion.federated.uplink import Uplink
from fusion.federated.vector import Layout, ModelState


def net(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2).to(torch.bfloat16))


def test_what_is_read_can_be_written_to_another_model() -> None:
    one, other = net(), net()
    one[1].num_batches_tracked += 5
    one[1].running_mean += 0.25
    layout = Layout.of(one)
    layout.write(other, layout.read(one))
    for name, value in one.state_dict().items():
        found = other.state_dict()[name]
        assert torch.equal(found, value) and found.dtype == value.dtype


def test_parameters_come_first_and_counters_apart() -> None:
    layout = Layout.of(net())
    assert [piece.name for piece in layout.parameters][:2] == ["0.weight", "0.bias"]
    assert [piece.name for piece in layout.buffers] == ["1.running_mean", "1.running_var"]
    assert [piece.name for piece in layout.counters] == ["1.num_batches_tracked"]
    assert layout.trained == sum(p.numel() for p in net().parameters())
    assert layout.size == layout.trained + 8


def test_frozen_parameters_do_not_travel() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in [piece.name for piece in Layout.of(model).parameters]


def test_a_double_anywhere_makes_the_vector_double() -> None:
    assert Layout.of(nn.Linear(2, 2, dtype=torch.float64)).read(nn.Linear(2, 2)).values.dtype == torch.float64


def test_personal_layers_are_left_out_and_kept() -> None:
    model = net()
    layout = Layout.of(model, ["1.*"])
    assert layout.personal == (
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    )
    kept = layout.read_personal(model)
    before = model[1].weight.detach().clone()
    nn.init.zeros_(model[1].weight)
    layout.write_personal(model, kept)
    assert torch.equal(model[1].weight, before)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Layout.of(nn.Linear(2, 2, dtype=torch.complex64)), TypeError, "complex"),
        (lambda: Layout.of(net(), ["conv.*"]), ValueError, "conv"),
        (lambda: Layout.of(net(), "1.*"), TypeError, "list"),
        (lambda: Layout.of(nn.Linear(2, 2).requires_grad_(False)), ValueError, "no parameter"),
    ],
)
def test_models_that_cannot_be_shared_are_refused(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


def test_ranks_with_other_models_are_named_with_the_first_difference() -> None:
    layouts = [Layout.of(net()), Layout.of(net()), Layout.of(net(5))]
    with pytest.raises(
        MismatchError, match=r"rank 4 has 0.weight float32\[4, 3\], rank 9 has 0.weight float32\[5, 3\]"
    ):
        layouts[0].require_same(layouts, [4, 7, 9])


def test_a_missing_tensor_is_a_difference() -> None:
    layouts = [Layout.of(nn.Linear(2, 2)), Layout.of(nn.Linear(2, 2, bias=False))]
    with pytest.raises(MismatchError, match=r"rank 0 has bias .* rank 1 has no such tensor"):
        layouts[0].require_same(layouts, [0, 1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_a_message_arrives_as_it_was_sent(dtype) -> None:
    tensors = [torch.arange(7).to(dtype), torch.empty(0, 3, dtype=dtype), torch.ones(2, 2, dtype=dtype)]
    header = Change(client=3, examples=10, version=7, loss=0.5, seconds=0.1)
    message = unpack(pack(5, header, tensors))
    assert (message.address, message.header) == (5, header)
    for one, other in zip(message.tensors, tensors, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


def test_messages_may_lie_one_behind_the_other() -> None:
    both = torch.cat([pack(1, Goodbye(4), [torch.ones(3)]), pack(2, Work(1, 2, True))])
    assert [(message.address, message.header) for message in unpack_all(both)] == [
        (1, Goodbye(4)),
        (2, Work(1, 2, True)),
    ]


def uplink(spec: str = "topk:0.25") -> tuple[Uplink, int]:
    layout = Layout.of(nn.Linear(8, 2))
    made = Uplink(layout, spec, 0)
    made.add_client(1)
    return made, layout.trained


def test_what_compression_leaves_out_comes_with_later_changes() -> None:
    made, size = uplink()
    change = torch.randn(size, generator=torch.Generator().manual_seed(0))
    arrived = torch.zeros(size)
    for _ in range(8):
        arrived += made.decode(made.encode(1, change))
        made.settle(1, used=True)
    rest = torch.cat([kept["residual"] for kept in made.state_dict()[1]["memory"].values()])
    assert torch.allclose(arrived + rest, 8 * change, atol=1e-5)


def test_a_change_that_was_not_used_leaves_the_memory_as_it_was() -> None:
    made, size = uplink()
    made.encode(1, torch.ones(size))
    made.settle(1, used=True)
    before = made.state_dict()[1]["memory"]
    made.encode(1, 100 * torch.ones(size))
    made.settle(1, used=False)
    after = made.state_dict()[1]["memory"]
    assert all(torch.equal(after[name]["residual"], kept["residual"]) for name, kept in before.items())


def test_a_restored_uplink_goes_on_alike() -> None:
    (made, size), (other, _) = uplink(), uplink()
    made.encode(1, torch.arange(float(size)))
    made.settle(1, used=True)
    other.load_state_dict(made.state_dict())
    assert torch.equal(made.encode(1, torch.ones(size)), other.encode(1, torch.ones(size)))


def test_a_residual_of_another_model_is_refused() -> None:
    made, size = uplink()
    made.encode(1, torch.ones(size))
    made.settle(1, used=True)
    other = Uplink(Layout.of(nn.Linear(9, 2)), "topk:0.25", 0)
    other.add_client(1)
    with pytest.raises(ValueError, match="another model"):
        other.load_state_dict(made.state_dict())


def test_a_value_that_the_type_of_the_wire_cannot_hold_is_an_error() -> None:
    made, size = uplink("fp16")
    with pytest.raises(OverflowError, match="1e\\+06"):
        made.encode(1, torch.full((size,), 1e6))


@pytest.mark.parametrize(("spec", "error"), [("topk:1.5", ValueError), ("zip", ValueError), (0.5, TypeError)])
def test_a_compression_that_does_not_exist_is_refused(spec, error) -> None:
    with pytest.raises(error):
        uplink(spec)


def test_a_state_can_be_copied() -> None:
    state = ModelState(torch.ones(2), torch.ones(1, dtype=torch.int64))
    state.clone().values.zero_()
    assert state.values.tolist() == [1.0, 1.0]
