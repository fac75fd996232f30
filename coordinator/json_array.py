"""A JSON array in a file that is valid JSON at every instant, a `kill -9` included.

The file is always ``[``, the records so far, spaces, ``]``. A record is written
over the spaces, and never across the end of a page: the kernel copies a write
page by page and gives up between two pages when the process is killed, so a
write inside one page happens wholly or not at all. When the spaces run out, a
copy with twice the room is built beside the file and renamed over it.

Not thread-safe: the owner brings a lock.
Cost: one system call for as many records as fit a page; copies of at most twice
the final size in all.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import BinaryIO

PAGE = 4096
FIRST_BYTES = 256 * 1024
_BLOCK = 1 << 20


class JsonArray:
    """A growing array of records, each given as JSON text.

    Args:
        path: the file to replace; its folder is made if it is missing.
        first: the record the array begins with.
        max_bytes: the size at which `append` stops accepting records.

    Raises:
        OSError: the file cannot be made.
        ValueError: there is something else than a file at `path`.
    """

    def __init__(self, path: str, first: str, max_bytes: int) -> None:
        self._path = os.path.realpath(path)
        if os.path.exists(self._path) and not stat.S_ISREG(os.stat(self._path).st_mode):
            raise ValueError(f"'{path}' is not a regular file")
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._max_bytes = max(max_bytes, 2 * PAGE)
        self._file: BinaryIO | None = None
        self._end = 0
        self._size = 0
        self._replace(b"[\n" + _encode(first), min(FIRST_BYTES, self._max_bytes))

    @property
    def closed(self) -> bool:
        return self._file is None

    def append(self, records: Sequence[str]) -> bool:
        """Add the records; False if the file became full before the last of them.

        Raises:
            OSError: the disk is full or gone.
            ValueError: a record is longer than a page.
        """
        run = bytearray()
        for record in records:
            data = b",\n" + _encode(record)
            start = self._end + len(run)
            if len(data) > _room(start):
                self._write(run)
                run.clear()
                start += _room(start)
            if not self._fits(start + len(data)):
                self._write(run)
                return False
            if not run:
                self._end = start
            run += data
        self._write(run)
        return True

    def close(self, last: str | None = None) -> None:
        """Add one last record, which may exceed `max_bytes`, and drop the spaces."""
        if self._file is None:
            return
        self._replace(b"" if last is None else b",\n" + _encode(last), 0)
        self.abandon()

    def abandon(self) -> None:
        """Leave the file as it is, which is valid, spaces included."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _fits(self, end: int) -> bool:
        """Whether records may reach byte `end`; makes room up to `max_bytes`."""
        while end + 2 > self._size:
            if self._size >= self._max_bytes:
                return False
            self._replace(b"", min(2 * self._size, self._max_bytes))
        return True

    def _write(self, data: bytes | bytearray) -> None:
        if data:
            assert self._file is not None
            os.pwrite(self._file.fileno(), data, self._end)
            self._end += len(data)

    def _replace(self, tail: bytes, size: int) -> None:
        """Put a file of at least `size` bytes in place, with `tail` added to the records."""
        building = f"{self._path}.{os.getpid()}.tmp"
        fresh = open(building, "w+b")  # noqa: SIM115 - kept open as the file in use
        try:
            self._copy_to(fresh)
            fresh.write(tail)
            end = self._end + len(tail)
            fresh.write(b" " * (size - end - 2) + b"\n]")
            fresh.flush()
            os.rename(building, self._path)
        except BaseException:
            fresh.close()
            os.unlink(building)
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._end, self._size = fresh, end, max(size, end + 2)

    def _copy_to(self, fresh: BinaryIO) -> None:
        for at in range(0, self._end, _BLOCK):
            assert self._file is not None
            fresh.write(os.pread(self._file.fileno(), min(_BLOCK, self._end - at), at))


def _room(at: int) -> int:
    """Bytes from `at` to the end of its page."""
    return PAGE - at % PAGE


def _encode(record: str) -> bytes:
    data = record.encode("ascii")
    if len(data) + 2 > PAGE:
        raise ValueError(f"a record of {len(data)} bytes does not fit a page of {PAGE}")
    return data
