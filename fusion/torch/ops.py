"""The collective operations on tensors.

Each is described once below; `forms` makes its blocking, in-place, asynchronous
and grouped functions. They may be called from any thread of every rank. Ranks
may submit in any order: operations are matched by name.

Parameters that many of them share:

name            how ranks find each other's tensors; made up from the order of
                calls if it is not given. Must not be in flight on this rank.
op              `Average` (default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
average         deprecated; `True` means `op=Average`, `False` means `op=Sum`.
prescale_factor, postscale_factor
                the values are multiplied by these before and after the sum.
root_rank       whose values a broadcast sends; a rank among all ranks, also in a process set.
splits          how many rows of `tensor` go to each rank (default: equal parts).
compression     a method of `fusion.compression` such as `topk(0.01)`, its specification
                "topk:0.01", or a `fusion.compression.Feedback` of it to remember what did not
                get across; or a cast to a narrower type, see `Compression`.
process_set     the ranks that take part, by default all. Only they may call; averages, splits
                and the order of gathered rows are those of the set.

Integers keep their dtype: a sum wraps around at the limits of the dtype and an
average is truncated toward zero. For bool, Sum and Max mean "any", Min and
Product mean "all".
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from coordinator.handle import Handle
from coordinator.messages import OpKind, ReduceOp, Request
from fusion import runtime
from fusion.torch.codec import NO_CODEC, codec_for, codec_of
from fusion.torch.compression import Compression
from fusion.torch.forms import Form, forms
from fusion.torch.process_sets import ProcessSet, global_process_set, group_of
from fusion.torch.repeats import quick
from fusion.torch.submission import Collective, Options

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def _reduction(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The reduction that the old and the new parameter together ask for."""
    if average is None:
        return ReduceOp.AVERAGE if op is None else op
    if op is not None:
        raise ValueError("give either op or the deprecated average, not both")
    warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def _allreduce(  # noqa: PLR0917, the order that scripts use
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = Compression.none,
) -> Options:
    return Options(
        name,
        _reduction(op, average),
        float(prescale_factor),
        float(postscale_factor),
        codec=NO_CODEC if compression is Compression.none else codec_for(compression),
        process_set=process_set,
    )


def _allreduce_blocking(  # noqa: PLR0917
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Options:
    codec = codec_of(compression)
    return Options(
        name,
        _reduction(op, average),
        float(prescale_factor),
        float(postscale_factor),
        compression=compression if codec is None else Compression.none,
        codec=codec or NO_CODEC,
        process_set=process_set,
    )


def _allgather(name: str | None = None, process_set: ProcessSet = global_process_set) -> Options:
    return Options(name, process_set=process_set)


def _broadcast(
    root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Options:
    if isinstance(root_rank, bool) or not hasattr(root_rank, "__index__"):
        raise TypeError(f"root_rank must be an integer, not {root_rank!r}")
    return Options(name, root_rank=root_rank.__index__(), process_set=process_set)


def _alltoall(
    splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Options:
    return Options(name, splits=splits, process_set=process_set)


def _reducescatter(
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Options:
    return Options(name, op, float(prescale_factor), float(postscale_factor), process_set=process_set)


def _reducescatter_blocking(  # noqa: PLR0917
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Options:
    codec = codec_of(compression)
    return Options(
        name,
        op,
        float(prescale_factor),
        float(postscale_factor),
        compression=compression if codec is None else Compression.none,
        codec=codec or NO_CODEC,
        process_set=process_set,
    )


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective(
            "allreduce",
            OpKind.ALLREDUCE,
            "Combine the tensors of all ranks element by element, by `op`.",
            _allreduce,
            _allreduce_blocking,
            in_place=True,
            grouped=True,
        ),
        Collective(
            "allgather",
            OpKind.ALLGATHER,
            "Concatenate the tensors of all ranks along the first dimension, which may differ between ranks.",
            _allgather,
            _allgather,
            in_place=False,
            grouped=True,
            free_first_dim=True,
            makes_output=True,
        ),
        Collective(
            "broadcast",
            OpKind.BROADCAST,
            "Give every rank the values of `root_rank`.",
            _broadcast,
            _broadcast,
            in_place=True,
            grouped=False,
        ),
        Collective(
            "alltoall",
            OpKind.ALLTOALL,
            "Send `splits[r]` rows of the tensor to each rank r, and concatenate the rows that arrive, in "
            "rank order. The result is the pair (rows, how many came from each rank); the blocking form "
            "without `splits` returns the rows only.",
            _alltoall,
            _alltoall,
            in_place=False,
            grouped=False,
            free_first_dim=True,
            makes_output=True,
        ),
        Collective(
            "reducescatter",
            OpKind.REDUCESCATTER,
            "Combine the tensors of all ranks by `op`, and give each rank its share of the rows; if the rows "
            "cannot be shared equally, the first ranks get one more.",
            _reducescatter,
            _reducescatter_blocking,
            in_place=False,
            grouped=True,
            makes_output=True,
        ),
    )
}


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called this."""
    group = group_of(process_set)
    name = group.unnamed("barrier", blocking=True)
    nothing = torch.empty(0, dtype=torch.uint8)  # Executed like any request: part by part.
    group.submit(Request(name, OpKind.BARRIER, ("uint8",), ((0,),)), [nothing], [nothing]).result()


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's parameter, for GPUs
    """Take part in the others' operations with values that change nothing, until all ranks have joined.

    For ranks with less data than others: their all-reduces (an average still divides by
    the number of all ranks) and barriers go on. Adasum and other operations need every
    rank, and fail on the ranks that ask for them.

    Args:
        device: for scripts that pass it.

    Returns:
        The rank that joined last, the same on every rank.
    """
    last: int = runtime.current().join().result()
    return last


def poll(handle: Handle) -> bool:
    """Whether the operation is complete, so that `synchronize` will not wait."""
    try:
        done = handle.done
    except AttributeError:
        raise _no_handle(handle) from None
    return done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its output.

    Raises:
        FusionError: the operation failed; the message says why and on which rank.
    """
    try:
        result = handle.result
    except AttributeError:
        raise _no_handle(handle) from None
    return result()


def _no_handle(handle: object) -> TypeError:
    return TypeError(f"expected the handle of an asynchronous operation, got {type(handle).__name__}")


_FORMS: dict[str, Form] = {
    name: form for collective in COLLECTIVES.values() for name, form in forms(collective, COLLECTIVES).items()
}

allreduce = _FORMS["allreduce"]
allreduce_ = _FORMS["allreduce_"]
allreduce_async = quick(COLLECTIVES["allreduce"], _FORMS["allreduce_async"], in_place=False)
allreduce_async_ = quick(COLLECTIVES["allreduce"], _FORMS["allreduce_async_"], in_place=True)
grouped_allreduce = _FORMS["grouped_allreduce"]
grouped_allreduce_ = _FORMS["grouped_allreduce_"]
grouped_allreduce_async = _FORMS["grouped_allreduce_async"]
grouped_allreduce_async_ = _FORMS["grouped_allreduce_async_"]
allgather = _FORMS["allgather"]
allgather_async = _FORMS["allgather_async"]
grouped_allgather = _FORMS["grouped_allgather"]
grouped_allgather_async = _FORMS["grouped_allgather_async"]
broadcast = _FORMS["broadcast"]
broadcast_ = _FORMS["broadcast_"]
broadcast_async = _FORMS["broadcast_async"]
broadcast_async_ = _FORMS["broadcast_async_"]
alltoall = _FORMS["alltoall"]
alltoall_async = _FORMS["alltoall_async"]
reducescatter = _FORMS["reducescatter"]
reducescatter_async = _FORMS["reducescatter_async"]
grouped_reducescatter = _FORMS["grouped_reducescatter"]
grouped_reducescatter_async = _FORMS["grouped_reducescatter_async"]
