"""Puts the output of MPICH's ranks back into whole lines.

MPICH's mpirun writes its prefix in front of whatever one read returned. A rank that
writes a line in pieces (`PYTHONUNBUFFERED` makes Python do so) gets prefixes in the
middle of it, and pieces of two ranks share a line. `fusion run` therefore asks for
the prefix `MARK` and sorts the pieces by it. Open MPI needs none of this.

`Lines` has no input or output of its own; `relay` runs on one thread a stream.
"""

from __future__ import annotations

import os
import re
from typing import IO

MARK = "[fusion.rank %r] "
_MARK = re.compile(rb"\[fusion\.rank (\d+)\] ")
_PART_OF_MARK = re.compile(rb"\[(f[fusion.rank ]*\d*\]?)?\Z")
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class Lines:
    """Turns marked pieces into lines, each behind the number of its rank.

    A carriage return ends a line too, so that progress bars move.
    """

    def __init__(self) -> None:
        self._rank: bytes | None = None
        self._begun: dict[bytes, bytes] = {}
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes; text that no rank wrote passes at once."""
        data = self._held + data
        # A mark may be cut in two by the read; its beginning waits for the rest.
        cut = _PART_OF_MARK.search(data)
        self._held = data[cut.start() :] if cut else b""
        first, *marked = _MARK.split(data[: cut.start()] if cut else data)
        written = [self._add(first)]
        for rank, text in zip(marked[::2], marked[1::2], strict=True):
            self._rank = rank
            written.append(self._add(text))
        return b"".join(written)

    def finish(self) -> bytes:
        """What was begun and never ended."""
        rest = self._add(self._held)
        begun = [b"[%s] %s\n" % item for item in sorted(self._begun.items()) if item[1]]
        return rest + b"".join(begun)

    def _add(self, text: bytes) -> bytes:
        written = []
        for piece in _LINE.findall(text):
            if self._rank is None:
                written.append(piece)
                continue
            line = self._begun.pop(self._rank, b"") + piece
            if not piece.endswith((b"\r", b"\n")):
                self._begun[self._rank] = line
                continue
            written.append(b"[%s] %s" % (self._rank, line))
            # Each line of a rank begins with a mark, so one without it is mpirun's own.
            self._rank = None if piece.endswith(b"\n") else self._rank
        return b"".join(written)


def relay(source: IO[bytes], target: int) -> None:
    """Copy `source` to the file descriptor `target` line by line, to its end."""
    lines = Lines()
    try:
        while data := os.read(source.fileno(), 1 << 16):
            _write(target, lines.feed(data))
        _write(target, lines.finish())
    except OSError:
        source.close()  # Nobody reads us any more; mpirun finds out by SIGPIPE, as without us.


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]
