"""The `DistributedOptimizer` around the training: options, the wrapper itself, static buckets."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from tests.mpi.torch_models import (
    assert_close,
    assert_same_on_all_ranks,
    both,
    loss,
    net,
    sgd,
    train,
    trained_alone,
)
from tests.ranks import ranks


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"groups": 100},
        {"num_groups": 3},
        {"compression": "fp16"},
        {"compression": "bf16", "groups": 2},
        {"gradient_predivide_factor": 2.0},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:num_groups is deprecated")
def test_options_that_change_only_the_way(hvd, options):
    model = net()
    if "compression" in options:
        options = {**options, "compression": getattr(hvd.Compression, options["compression"])}
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)
    train(optimizer, model, range(3), hvd.rank())
    assert_close(model, trained_alone(2, range(3)), 2e-2 if "compression" in options else 1e-5)
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_groups_of_named_parameters_with_one_that_a_rank_lacks(hvd):
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    model = nn.ModuleList([first, second])
    hvd.broadcast_parameters(model.state_dict(), 0)
    groups = [[first.weight, second.weight]]
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), groups=groups)
    for _ in range(2):
        optimizer.zero_grad()
        model[hvd.rank()](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert first.weight.grad.tolist() == second.weight.grad.tolist() == [[0.5, 0.5]]
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_other_reductions(hvd):
    weight = nn.Parameter(torch.zeros(2))
    for op, expected in ((hvd.Max, 2.0), (hvd.Min, 1.0), (hvd.Product, 2.0), (hvd.Sum, 3.0)):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=op)
        optimizer.zero_grad()
        (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.synchronize()
        assert weight.grad.tolist() == [expected] * 2


@ranks(2)
def test_options_that_contradict_each_other_are_refused(hvd):
    base = sgd(net().parameters())
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedOptimizer(base, gradient_predivide_factor=2.0, op=hvd.Sum)
    with pytest.raises(ValueError, match="at least 1"):
        hvd.DistributedOptimizer(base, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="compression makes a copy"):
        hvd.DistributedOptimizer(base, buckets="static", compression=hvd.Compression.fp16)
    with pytest.raises(ValueError, match="op is MIN"):
        hvd.DistributedOptimizer(base, buckets="static", op=hvd.Min)
    with pytest.raises(ValueError, match="groups of their own"):
        hvd.DistributedOptimizer(base, buckets="static", groups=2)
    with pytest.raises(ValueError, match="dynamic"):
        hvd.DistributedOptimizer(base, buckets="elastic")


@ranks(2)
def test_the_wrapper_is_the_optimizer_it_wraps(hvd):
    model = net()
    base = torch.optim.AdamW(model.parameters(), lr=0.1)
    early = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    assert isinstance(optimizer, torch.optim.AdamW) and type(optimizer).__name__ == "AdamW"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, model, [0], hvd.rank())
        early.step()
        late.step()
    assert calls == ["hook"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    assert base.state is optimizer.state and len(base.state) == 6
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
@pytest.mark.parametrize("keep", ["wrapper", "optimizer"])
def test_a_scheduler_made_before_the_wrapper_works_with_either_of_them(hvd, keep):
    model = net()
    base = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(base, lambda _: 1.0)
    wrapper = hvd.DistributedOptimizer(base, model.named_parameters())
    kept = {"wrapper": wrapper, "optimizer": base}[keep]
    del wrapper, base
    for step in range(2):
        kept.zero_grad()
        loss(model, step, hvd.rank()).backward()
        kept.step()
        scheduler.step()
    assert_close(model, trained_alone(2, range(2)))


@ranks(2)
def test_a_checkpoint_loads_into_the_wrapper_and_the_scheduler_still_steers_it(hvd):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(optimizer, model, [0], hvd.rank())
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    train(optimizer, model, [1], hvd.rank())
    assert_same_on_all_ranks(hvd, model)


@ranks(1)
def test_a_copy_of_the_wrapper_is_the_plain_optimizer(hvd):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is torch.optim.SGD and twin.param_groups[0]["lr"] == 0.1


@ranks(2)
@both
def test_a_rank_that_throws_its_gradients_away_while_others_step_is_named(hvd, buckets):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets=buckets)
    loss(model, 0, hvd.rank()).backward()
    with pytest.raises(hvd.FusionError, match=r"ranks \[1\] threw"):
        optimizer.zero_grad() if hvd.rank() == 1 else optimizer.step()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@ranks(2)
def test_a_wrapper_goes_on_after_the_runtime_was_restarted(hvd):
    for buckets in ("dynamic", "static"):
        model = net()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), buckets=buckets
        )
        train(optimizer, model, [0], hvd.rank())
        hvd.shutdown()
        hvd.init()
        train(optimizer, model, [1, 2], hvd.rank())
        assert_close(model, trained_alone(2, range(3)))


@ranks(2)
@both
@pytest.mark.skipif(not hasattr(torch, "compile"), reason="this torch has no compiler")
def test_a_compiled_model_trains_alike(hvd, buckets):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets=buckets)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        optimizer.zero_grad()
        loss(compiled, step, hvd.rank()).backward()
        optimizer.step()
    assert_close(model, trained_alone(2, range(2)))


@ranks(2)
@both
def test_a_compiled_training_step_trains_alike(hvd, buckets):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets=buckets)

    @torch.compile(backend="eager")
    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        ((model(inputs) - targets) ** 2).mean().backward()

    def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(5, 6, generator=generator), torch.randn(5, 2, generator=generator)

    with torch._dynamo.config.patch(compiled_autograd=True):
        for step in range(2):
            optimizer.zero_grad()
            backward(*batch(step, hvd.rank()))
            optimizer.step()
    assert_close(model, trained_alone(2, range(2)))
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
@both
def test_a_rank_that_fails_in_the_middle_of_backward_and_goes_on_is_named(hvd, buckets):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("out of memory")

    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets=buckets)
    train(optimizer, model, [0], hvd.rank())
    optimizer.zero_grad()
    if hvd.rank() == 1:
        broken = nn.Sequential(*model[:2], _Call(Fails.apply), *model[2:])
        with pytest.raises(RuntimeError, match="out of memory"):
            loss(broken, 1, 1).backward()
    else:
        loss(model, 1, 0).backward()
    with pytest.raises(hvd.FusionError, match=r"ranks \[1\] threw"):
        optimizer.zero_grad() if hvd.rank() == 1 else optimizer.step()
    train(optimizer, model, [2], hvd.rank())
    assert_close(model, trained_alone(2, [0, 2]))
    assert_same_on_all_ranks(hvd, model)


class _Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@ranks(2)
def test_static_buckets_give_the_same_bits_in_every_run(hvd):
    def run() -> list[torch.Tensor]:
        model = net()
        base = sgd(model.parameters())
        optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), buckets="static")
        train(optimizer, model, range(3), hvd.rank())
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@ranks(2)
def test_static_gradients_stay_where_they_are_reduced(hvd):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets="static")
    train(optimizer, model, [0], hvd.rank())
    places = [p.grad.data_ptr() for p in model.parameters()]
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none)
        loss(model, 1, hvd.rank()).backward()
        optimizer.step()
        assert [p.grad.data_ptr() for p in model.parameters()] == places


@ranks(2)
def test_static_buckets_follow_the_order_in_which_gradients_arrive(hvd):
    class Backwards(nn.Module):
        """Runs its layers against the order in which they are registered."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    model = Backwards()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets="static")
    model(torch.full((1, 3), hvd.rank() + 1.0)).sum().backward()
    local = [p.grad.clone() for p in model.parameters()]
    optimizer.synchronize()
    for parameter, mine in zip(model.parameters(), local, strict=True):
        assert torch.allclose(parameter.grad, hvd.allreduce(mine))
    places = [p.grad.data_ptr() for p in model.parameters()]
    assert places == sorted(places)  # The first layer registered is the first whose gradient arrives.
    optimizer.step()
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_static_buckets_of_any_size_give_the_same_gradients(hvd):
    gradients = []
    for threshold in (0, 0.0001, 64):
        hvd.shutdown()
        hvd.init(fusion_threshold_mb=threshold)
        model = net()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), buckets="static"
        )
        loss(model, 0, hvd.rank()).backward()
        optimizer.synchronize()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True))


@ranks(2)
def test_gradients_of_static_buckets_outlive_the_runtime(hvd):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets="static")
    train(optimizer, model, [0], hvd.rank())
    hvd.shutdown()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    hvd.init()
