"""From a call to a request: everything one rank can check by itself, before others are involved.

Called on the thread that submits; nothing here waits. What is wrong raises here,
names the tensor, and leaves nothing behind on this or any other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from coordinator.handle import Handle
from coordinator.messages import ANY, OpKind, ReduceOp, Request
from fusion import dtypes
from fusion.arrays import Restore, as_tensor
from fusion.torch.codec import NO_CODEC, Codec, check_codec, ledgers
from fusion.torch.compression import Compressor, NoneCompressor
from fusion.torch.process_sets import ProcessSet, global_process_set, group_of, root_in

if TYPE_CHECKING:
    from fusion.group import Group

Unpack = Callable[[list[Any]], Any]
"""Turns the outputs of an operation into what its handle returns."""


class Options(msgspec.Struct, frozen=True):
    """What a caller asked for, beside the tensors."""

    name: str | None = None
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root_rank: int = -1
    """A rank among all ranks."""
    splits: Any = None
    compression: type[Compressor] = NoneCompressor
    """Casts tensors before they are submitted; only the blocking forms have it."""
    codec: Codec = NO_CODEC
    """Compresses what was submitted."""
    process_set: ProcessSet = global_process_set


class Collective(msgspec.Struct, frozen=True):
    """One operation, described once; its forms are made from this by `forms`."""

    name: str
    kind: OpKind
    summary: str
    """What it does, one sentence; the documentation of every form begins with it."""
    options: Callable[..., Options]
    """Keyword parameters of the asynchronous and in-place forms."""
    blocking_options: Callable[..., Options]
    """Keyword parameters of the blocking out-of-place form."""
    in_place: bool
    grouped: bool
    free_first_dim: bool = False
    """The first dimension may differ between ranks."""
    makes_output: bool = False
    """The executor makes the output, whose shape is not known at submission."""


class Submission(msgspec.Struct, frozen=True):
    """A checked call, ready to be queued; the fields are the arguments of `Group.submit`."""

    group: Group
    request: Request
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor | None]
    extra: Any
    unpack: Unpack | None

    def submit(self) -> Handle:
        """Queue it."""
        return self.group.submit(
            self.request, self.inputs, self.outputs, extra=self.extra, unpack=self.unpack
        )


def submit(
    collective: Collective,
    arrays: Sequence[Any],
    options: Options,
    *,
    in_place: bool,
    grouped: bool,
    blocking: bool,
) -> Handle:
    """Check, describe and queue one call; raises what `prepare` raises."""
    return prepare(
        collective, arrays, options, in_place=in_place, grouped=grouped, blocking=blocking
    ).submit()


def prepare(
    collective: Collective,
    arrays: Sequence[Any],
    options: Options,
    *,
    in_place: bool,
    grouped: bool,
    blocking: bool,
) -> Submission:
    """Check and describe one call.

    Raises:
        TypeError: an argument is of a kind or dtype that cannot be used.
        ValueError: a value cannot be used.
    """
    group = group_of(options.process_set)
    base = f"grouped_{collective.name}" if grouped else collective.name
    name = options.name if options.name is not None else group.unnamed(base, blocking=blocking)
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    if not arrays:
        raise ValueError(f"'{name}': {base} needs at least one tensor")
    tensors, restores = _tensors(arrays, name, in_place)
    _check(collective, tensors, options, name, in_place)
    inputs = [_plain(tensor.detach()) if collective.makes_output else tensor.detach() for tensor in tensors]
    extra: Any = None
    if collective.kind == OpKind.ALLTOALL:
        extra = _splits(inputs[0], options.splits, name, group.topology.size)
        inputs[0] = inputs[0][: sum(extra)]
    if options.codec.compressor is not None:
        extra = ledgers(inputs, options.codec, options.name, name)
    request = describe(collective, inputs, options, name)
    outputs = _outputs(collective, inputs, in_place)
    if collective.kind == OpKind.ALLTOALL:
        unpack: Unpack | None = _unpack_alltoall(restores[0], options.splits)
    else:
        unpack = _unpack(restores, arrays if in_place else None, grouped)
    return Submission(group, request, inputs, outputs, extra, unpack)


def describe(collective: Collective, tensors: Sequence[torch.Tensor], options: Options, name: str) -> Request:
    """The request of checked tensors."""
    free = collective.free_first_dim
    rooted = collective.kind == OpKind.BROADCAST
    return Request(
        name,
        collective.kind,
        tuple(dtypes.name_of(tensor.dtype, name) for tensor in tensors),
        tuple((ANY, *tensor.shape[1:]) if free else tuple(tensor.shape) for tensor in tensors),
        op=options.op,
        root_rank=root_in(options.process_set, options.root_rank, name) if rooted else -1,
        prescale=options.prescale,
        postscale=options.postscale,
        codec=options.codec.spec,
        device=kind_of(tensors, name),
    )


def kind_of(tensors: Sequence[torch.Tensor], name: str) -> str:
    """The kind of device that the tensors of one operation are on.

    Raises:
        ValueError: they are on several.
    """
    first = tensors[0].device
    if len(tensors) > 1 and any(tensor.device != first for tensor in tensors):
        places = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise ValueError(f"the tensors of '{name}' are on {places}: put them on one device")
    return first.type


def check_tensor(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor that the runtime cannot move.

    Raises:
        TypeError: its dtype, layout or device is not supported.
    """
    if tensor.layout != torch.strided:
        raise TypeError(
            f"'{name}' is a {str(tensor.layout).removeprefix('torch.')} tensor: use sparse_allreduce_async, "
            "or to_dense() first"
        )
    if tensor.is_complex():
        raise TypeError(
            f"'{name}' has dtype {tensor.dtype}: pass torch.view_as_real(tensor), which has the same bytes"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(
            f"'{name}' is on {tensor.device}, but only tensors on the CPU and on CUDA devices can be "
            "reduced: pass tensor.cpu()"
        )
    dtypes.name_of(tensor.dtype, name)


def check_op(op: Any, tensors: Sequence[torch.Tensor], name: str, size: int) -> None:
    """Refuse an operation that makes no sense for these tensors on `size` ranks.

    Raises:
        TypeError: it is not a reduction.
        ValueError: it is not defined for the dtype.
        NotImplementedError: it is not defined for the number of ranks.
    """
    if not isinstance(op, ReduceOp):
        raise TypeError(f"'{name}': op must be Average, Sum, Adasum, Min, Max or Product, not {op!r}")
    if op == ReduceOp.ADASUM:
        _check_adasum(tensors, name, size)
    if op == ReduceOp.AVERAGE and any(tensor.dtype == torch.bool for tensor in tensors):
        raise ValueError(
            f"'{name}' is of dtype bool, which has no average: use Sum or Max for any, Min for all"
        )


def _check_adasum(tensors: Sequence[torch.Tensor], name: str, size: int) -> None:
    if size & (size - 1):
        raise NotImplementedError(
            f"'{name}': Adasum combines ranks in pairs, so their number must be a power of two, but "
            f"there are {size}: use Average, or a process set of fewer ranks"
        )
    for tensor in tensors:
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(
                f"'{name}' is of dtype {dtype}, which Adasum is not defined for: use Sum or Average"
            )


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of a strided tensor may share memory.

    True for every tensor made by `expand` or by overlapping windows. False means
    that they certainly do not.
    """
    span = 0
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, length in sorted((stride, length) for stride, length in dims if length != 1):
        if length == 0:
            return False
        if stride <= span:
            return True
        span += stride * (length - 1)
    return False


def _tensors(
    arrays: Sequence[Any], name: str, writable: bool
) -> tuple[list[torch.Tensor], list[Restore | None]]:
    tensors, restores = [], []
    for array in arrays:
        tensor, restore = as_tensor(array, name, writable=writable)
        tensors.append(tensor)
        restores.append(restore)
    return tensors, restores


def _check(
    collective: Collective, tensors: Sequence[torch.Tensor], options: Options, name: str, in_place: bool
) -> None:
    for tensor in tensors:
        check_tensor(tensor, name)
        if collective.makes_output and tensor.dim() == 0:
            raise ValueError(
                f"'{name}' is a scalar, but {collective.name} needs a first dimension: use reshape(1)"
            )
        if in_place and overlaps(tensor):
            raise ValueError(
                f"'{name}' has elements that share memory (expand() makes such tensors), so it cannot be "
                "written in place: pass tensor.contiguous() or use the out-of-place form"
            )
    if collective.kind == OpKind.REDUCESCATTER and options.op == ReduceOp.ADASUM:
        raise NotImplementedError(
            f"'{name}': reducescatter cannot do Adasum, which needs whole tensors: use allreduce"
        )
    if options.codec.compressor is not None:
        check_codec(options.codec, collective.kind, options.op, tensors, name)
    if collective.kind in (OpKind.ALLREDUCE, OpKind.REDUCESCATTER):
        check_op(options.op, tensors, name, group_of(options.process_set).topology.size)


def _outputs(collective: Collective, inputs: list[torch.Tensor], in_place: bool) -> list[torch.Tensor | None]:
    if in_place:
        return list(inputs)
    if collective.makes_output:
        return [None] * len(inputs)
    return [torch.empty_like(tensor) for tensor in inputs]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A single element may have any strides and still be contiguous; as bytes it needs the plain ones."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.numel() == 1 else tensor


def _splits(tensor: torch.Tensor, splits: Any, name: str, size: int) -> list[int]:
    """How many rows go to each of `size` ranks, checked."""
    rows = len(tensor)
    if splits is None:
        if rows % size:
            raise ValueError(
                f"'{name}' has {rows} rows, which {size} ranks cannot share equally: pass splits"
            )
        return [rows // size] * size
    given = torch.as_tensor(splits)
    if given.is_floating_point() or given.dtype == torch.bool or given.dim() != 1 or len(given) != size:
        raise ValueError(f"'{name}': splits must be {size} integers, one for each rank")
    counts: list[int] = given.tolist()
    if min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"'{name}': splits {counts} must be at least 0 and add up to at most {rows}, the tensor's rows"
        )
    return counts


def _unpack(restores: list[Restore | None], arrays: Sequence[Any] | None, grouped: bool) -> Unpack | None:
    """How a handle turns outputs into what the caller gets; `arrays` are returned as they are."""
    if arrays is not None:
        kept = list(arrays) if grouped else arrays[0]
        return lambda _: kept
    if not grouped and restores[0] is None:
        return None

    def unpack(outputs: list[Any]) -> Any:
        results = [
            output if restore is None else restore(output)
            for output, restore in zip(outputs, restores, strict=False)
        ]
        return results if grouped else results[0]

    return unpack


def _unpack_alltoall(restore: Restore | None, splits: Any) -> Unpack:
    """Rows, and how many came from each rank in the dtype in which the splits were given."""
    dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32

    def unpack(outputs: list[Any]) -> Any:
        rows, received = outputs[0], outputs[1].to(dtype)
        return (rows, received) if restore is None else (restore(rows), restore(received))

    return unpack
