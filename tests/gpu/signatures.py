"""Holds calls of a double against the signatures of the real module.

Functions of extension modules have no `inspect.signature`; the first line of
their documentation has it. Where CuPy is not installed, its calls are not held
against anything. NCCL is large, so what its documentation says in CuPy 14.2 is
written down here, and compared with the real one where that is installed.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from typing import Any

_COMM = "cupy.cuda.nccl.NcclCommunicator"
WRITTEN_DOWN = {
    _COMM: "(ndev, commId, rank, config=None)",
    f"{_COMM}.allReduce": "(sendbuf, recvbuf, count, datatype, op, stream)",
    f"{_COMM}.reduceScatter": "(sendbuf, recvbuf, recvcount, datatype, op, stream)",
    f"{_COMM}.reduce": "(sendbuf, recvbuf, count, datatype, op, root, stream)",
    f"{_COMM}.allGather": "(sendbuf, recvbuf, count, datatype, stream)",
    f"{_COMM}.broadcast": "(sendbuff, recvbuff, count, datatype, root, stream)",
    f"{_COMM}.send": "(sendbuf, count, datatype, peer, stream)",
    f"{_COMM}.recv": "(recvbuf, count, datatype, peer, stream)",
    f"{_COMM}.check_async_error": "()",
    f"{_COMM}.destroy": "()",
    f"{_COMM}.abort": "()",
    "cupy.cuda.nccl.get_version": "()",
    "cupy.cuda.nccl.get_unique_id": "()",
    "cupy.cuda.nccl.groupStart": "()",
    "cupy.cuda.nccl.groupEnd": "()",
}


def nccl_is_there() -> bool:
    """Whether CuPy has an NCCL to call."""
    try:
        from cupy.cuda import nccl
    except ImportError:
        return False
    return bool(nccl.available)


@cache
def real(path: str) -> Any:
    """The object at a dotted path, such as "cupy.cuda.Stream.use"; None if its package is not installed."""
    parts = path.split(".")
    try:
        found: Any = importlib.import_module(parts[0])
    except ImportError:
        return None
    for at, part in enumerate(parts[1:], start=1):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(parts[: at + 1]))
    return found


@cache
def signature(path: str) -> inspect.Signature | None:
    """How the real object may be called, without `self`; None if it is not installed."""
    if path in WRITTEN_DOWN and not nccl_is_there():
        return _parsed(WRITTEN_DOWN[path])
    found = real(path)
    if found is None:
        return None
    try:
        parsed = inspect.signature(found)
    except ValueError:
        parsed = _documented(found, path)
    parameters = [p for p in parsed.parameters.values() if p.name != "self"]
    return inspect.Signature(parameters)


def check(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError if the real object could not be called like this."""
    found = signature(path)
    if found is not None:
        try:
            found.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{path}{found} was called with {args} and {kwargs}: {error}") from None


def _documented(found: Any, path: str) -> inspect.Signature:
    lines = (found.__doc__ or "").splitlines()
    match = next((m for line in lines[:3] if (m := re.match(r"\s*[\w.]+(\(.*?\))", line))), None)
    if match is None:
        raise ValueError(f"{path} does not say how it is called: {lines[:3]}")
    return _parsed(match[1])


def _parsed(parameters_text: str) -> inspect.Signature:
    """A signature as people write it, types before names included."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for text in filter(None, (part.strip() for part in parameters_text[1:-1].split(","))):
        if text in ("*", "\\*"):
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        if text.startswith("*"):
            any_kind = inspect.Parameter.VAR_KEYWORD if text[1] == "*" else inspect.Parameter.VAR_POSITIONAL
            parameters.append(inspect.Parameter(text.lstrip("*"), any_kind))
            continue
        name, _, default = text.partition("=")
        given = {"default": default} if default else {}
        parameters.append(inspect.Parameter(name.split()[-1], kind, **given))
    return inspect.Signature(parameters)
