"""Gradients through the collective operations, and operations beside a graph."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import ranks


@ranks(2)
def test_ops_do_not_disturb_an_autograd_graph(hvd):
    leaf = torch.ones(3, requires_grad=True)
    hvd.broadcast_(leaf, 0)
    assert leaf.is_leaf and leaf.requires_grad and leaf.grad is None
    assert not hvd.allreduce_async(leaf, op=hvd.Sum).result().requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(leaf).requires_grad


@ranks(2)
def test_writing_in_place_is_seen_by_autograd(hvd):
    value = torch.ones(3)
    weight = torch.ones(3, requires_grad=True)
    product = value * weight
    hvd.allreduce_(value, op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def gradient(call, *inputs):
    result = call(*inputs)
    (result * torch.arange(1.0, result.numel() + 1).view_as(result)).sum().backward()
    return inputs[0].grad


@ranks(2, 3)
def test_gradients_of_allreduce(hvd):
    n, r = hvd.size(), hvd.rank()
    weights = torch.arange(1.0, 4.0)

    def of(op, value, **options):
        x = torch.full((3,), float(value), requires_grad=True)
        return gradient(lambda x: hvd.allreduce(x, op=op, **options), x)

    assert torch.equal(of(hvd.Sum, 1), n * weights)
    assert torch.allclose(of(hvd.Average, 1), weights)
    assert torch.equal(of(hvd.Sum, 1, prescale_factor=2.0, postscale_factor=3.0), 6 * n * weights)
    assert torch.equal(of(hvd.Max, r), n * weights * (r == n - 1))
    assert torch.equal(of(hvd.Min, r), n * weights * (r == 0))
    assert torch.allclose(of(hvd.Max, 5), weights)  # All ranks hold the maximum, and share it.
    assert torch.equal(of(hvd.Product, 2), n * weights * 2 ** (n - 1))
    zero_here = n * weights * (2 ** (n - 1) if r == 0 else 0)
    assert torch.equal(of(hvd.Product, 0 if r == 0 else 2), zero_here)


@ranks(2, 3)
def test_gradients_of_the_other_operations(hvd):
    n, r = hvd.size(), hvd.rank()
    x = torch.ones(r + 1, requires_grad=True)
    start = r * (r + 1) // 2
    assert torch.allclose(gradient(hvd.allgather, x), torch.arange(1.0, r + 2) + start)
    x = torch.ones(2, requires_grad=True)
    assert torch.allclose(gradient(lambda x: hvd.broadcast(x, 1), x), torch.tensor([1.0, 2.0]) * (r == 1))
    x = torch.ones(n, requires_grad=True)
    assert torch.equal(gradient(hvd.alltoall, x), torch.full((n,), r + 1.0))
    x = torch.ones(n + 1, requires_grad=True)
    rows, _ = hvd.alltoall(x, splits=[1] * n)
    rows.sum().backward()
    assert x.grad.tolist() == [1] * n + [0]
    x = torch.ones(n, requires_grad=True)
    assert torch.equal(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), x), torch.full((n,), float(n)))
    x = torch.ones(n, requires_grad=True)
    assert torch.equal(gradient(lambda x: hvd.reducescatter(x, op=hvd.Average), x), torch.ones(n))


@ranks(2)
def test_gradients_of_groups_and_through_compression(hvd):
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    a, b = hvd.grouped_allreduce([x, y], op=hvd.Sum, compression=hvd.Compression.fp16)
    (a.sum() + 3 * b.sum()).backward()
    assert x.grad.tolist() == [2, 2] and y.grad.tolist() == [6] * 3
    x = torch.ones(2, requires_grad=True)
    first, second = hvd.grouped_allgather([x, 2 * x])
    (first.sum() + second.sum()).backward()
    assert x.grad.tolist() == [3, 3]
