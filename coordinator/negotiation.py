"""Which requests are ready on every rank: the protocol, with no I/O, clock or thread.

Each cycle every rank composes a few 64-bit words, one bitwise-AND all-reduce
combines them, and every rank absorbs the same result. The words are

====================  =========================================================
flags                 complement of this rank's flags, so AND gives "nobody"
digest, ~digest       of the first m requests that have no slot yet; the ranks
                      agree exactly when ``AND(d) == ~AND(~d)``
count                 a thermometer of how many requests have no slot yet; AND
                      gives the minimum, which is m of the next cycle
ready                 one bit for each slot of the registry
====================  =========================================================

So when all ranks run the same program, requests are registered without any rank
collecting anything, however the cycles of different ranks cut the stream. If
the digests differ, or a rank raises a flag, all ranks exchange `Report`s in one
tree reduction and resolve what they find.

Cost: one all-reduce of ``8 * (7 + slots / 64)`` bytes a cycle; registration adds
two cycles, or one exchange of about 100 bytes a request when orders differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntFlag

import msgspec
import numpy as np

from coordinator.messages import OpKind, Request
from coordinator.registry import Registry, Slots
from coordinator.reports import Report, Resolution, resolve
from coordinator.wire import Words

_COUNT_WORDS = 4
MOST_AT_ONCE = 64 * _COUNT_WORDS
"""Most requests that one cycle can register without an exchange."""
_HEAD = 3 + _COUNT_WORDS
_ALL = (1 << 64) - 1

FIRST_PROBE_S = 0.05
LONGEST_PROBE_S = 5.0


class Flag(IntFlag):
    """What a rank may ask of all others; one rank raising it is enough."""

    LEAVE = 1
    """This rank shuts down: no further cycle will complete."""
    PROBE = 2
    """A name is in use under several forms: look whether the ranks disagree."""
    STALL = 4
    """Something has waited too long: find out who lacks it."""
    JOIN = 8
    """This rank has no more data; it will take part with neutral values."""
    TUNE = 16
    """This rank has settings for all; see `coordinator.tuning`."""


class Outcome(msgspec.Struct, frozen=True):
    """What one cycle decided, the same on every rank."""

    ready: tuple[int, ...]
    """Slots that are ready on every rank, ascending."""
    exchange: bool
    """All ranks exchange reports next."""
    leaving: bool
    """Some rank leaves: the exchange that follows is the last."""


def _neutral(flags: Flag, width: int) -> Words:
    """The words of a joined rank: whatever the others agree on, it agrees to."""
    words = np.full(_HEAD + width, _ALL, dtype=np.uint64)
    words[0] = ~int(flags) & _ALL
    return words


class Negotiator:
    """One rank's side of the protocol.

    Args:
        rank: this rank.
        size: number of ranks.
        capacity: of the registry, the same on all ranks.
        ranks: what messages call the ranks; default their numbers.
    """

    def __init__(self, rank: int, size: int, capacity: int, ranks: Sequence[int] | None = None) -> None:
        self.rank = rank
        self.size = size
        self._ranks = ranks
        self.registry = Registry(capacity)
        self._unregistered: dict[str, Request] = {}
        self._waiting = np.zeros(64, dtype=np.bool_)
        self._waiting_count = 0
        self._proposed = 0
        self._probes: dict[str, tuple[float, float]] = {}
        self._poisoned: dict[str, str] = {}
        self._wants_to_join = False
        self.joined = 0
        """Bit mask of the ranks that have joined, the same on every rank."""

    @property
    def pending(self) -> int:
        """Requests of this rank that are not ready everywhere yet."""
        return len(self._unregistered) + self._waiting_count

    def submit_all(self, requests: Sequence[Request], now: float) -> dict[str, str]:
        """Take part in requests from the next cycle on, as `submit` does; the reasons by name."""
        slots: Slots | None = None
        refused: dict[str, str] = {}
        if not self._poisoned and not self.registry.ambiguous:
            slots = self.registry.slots(requests)
        if slots is not None:
            self._wait_for(slots)
            return refused
        for request in requests:
            reason = self.submit(request, now)
            if reason is not None:
                refused[request.name] = reason
        return refused

    def submit(self, request: Request, now: float) -> str | None:
        """Take part in a request from the next cycle on.

        Returns the reason if the other ranks have failed this name already, while
        this rank had not submitted it; the request is then not taken.
        """
        if request.kind == OpKind.JOIN:
            self.join()
            return None
        reason = self._poisoned.pop(request.name, None)
        if reason is not None:
            return reason
        slot = self.registry.slot(request)
        variants = self.registry.variants(request.name)
        if slot is None:
            self._unregistered[request.name] = request
        else:
            self._wait_for(np.array([slot]))
        if variants > (slot is not None):
            self._probes[request.name] = (now + FIRST_PROBE_S, FIRST_PROBE_S)
        return None

    def compose(self, flags: Flag, now: float) -> Words:
        """This rank's words for the next cycle."""
        if self._probe_due(now):
            flags |= Flag.PROBE
        if self._joins_now:
            flags |= Flag.JOIN
        width = -(-self.registry.width // 64)
        if self.joined >> self.rank & 1:
            return _neutral(flags, width)
        self._reserve(64 * width)
        words = np.empty(_HEAD + width, dtype=np.uint64)
        words[0] = ~int(flags) & _ALL
        digest = self._digest()
        words[1] = digest
        words[2] = ~digest & _ALL
        count = min(len(self._unregistered), MOST_AT_ONCE)
        thermometer = (1 << count) - 1
        for index in range(_COUNT_WORDS):
            words[3 + index] = (thermometer >> (64 * index)) & _ALL
        if width:
            words[_HEAD:] = np.packbits(self._waiting[: 64 * width], bitorder="little").view(np.uint64)
        return words

    def absorb(self, words: Words) -> Outcome:
        """Act on the combined words; every rank does the same."""
        flags = Flag(~int(words[0]) & _ALL)
        agreed = int(words[1]) == ~int(words[2]) & _ALL
        count = sum(int(word).bit_count() for word in words[3:_HEAD])
        ready = self._take_ready(words[_HEAD:])
        if self._proposed and agreed:
            self._register_first(self._proposed)
            count -= self._proposed
        differ = self._proposed > 0 and not agreed
        if self.joined and count:
            differ = True  # A joined rank cannot know what the others digested.
        self._proposed = 0 if differ else count
        return Outcome(
            ready=ready,
            exchange=differ or bool(flags),
            leaving=bool(flags & Flag.LEAVE),
        )

    def executed(self, slots: Slots) -> None:
        """Note that agreed slots have run, and evict beyond the capacity."""
        self.registry.executed(slots)
        for slot, request in self.registry.evict():
            if self._stop_waiting(slot):  # Submitted again since: it starts afresh.
                self._unregistered[request.name] = request

    def report(self, ages: dict[str, float], leaving: str | None) -> Report:
        """All that this rank is waiting for, for an exchange.

        Args:
            ages: seconds since submission, by name.
            leaving: why this rank leaves, if it does.
        """
        pending = self._pending_requests()
        return Report(
            ranks=dict.fromkeys(pending, 1 << self.rank),
            ages={request.name: ages.get(request.name, 0.0) for request in pending},
            leaving={self.rank: leaving} if leaving is not None else {},
            joining=1 << self.rank if self._joins_now else 0,
        )

    def resolve(self, merged: Report) -> Resolution:
        """Act on the merged reports; every rank does the same.

        Afterwards every request in them has a slot, but for the names about which
        ranks disagree: those are failed on the ranks that submitted them, and will
        fail at once on the others when they do.
        """
        resolution = resolve(merged, self.size, self.joined, self._ranks)
        self._proposed = 0
        self._update_joined(merged.joining, resolution.all_joined)
        for name, mismatch in resolution.mismatches.items():
            for slot, _ in self.registry.discard(name):
                self._stop_waiting(slot)
            self._unregistered.pop(name, None)
            self._probes.pop(name, None)
            if not (mismatch.ranks | self.joined) >> self.rank & 1:
                self._poisoned[name] = mismatch.reason
        for request in resolution.agreed:
            slot = self.registry.add(request)
            if self._unregistered.get(request.name) == request:
                del self._unregistered[request.name]
                self._wait_for(np.array([slot]))
        return resolution

    def join(self) -> None:
        """Join as soon as nothing of this rank is pending."""
        self._wants_to_join = True

    def forget_all(self) -> None:
        """Drop everything pending, when this rank leaves."""
        self._unregistered.clear()
        self._probes.clear()
        self._waiting[:] = False
        self._waiting_count = 0

    @property
    def _joins_now(self) -> bool:
        return self._wants_to_join and not self.pending

    def _update_joined(self, joining: int, all_joined: bool) -> None:
        self.joined = 0 if all_joined else self.joined | joining
        if joining >> self.rank & 1:
            self._wants_to_join = False

    def _pending_requests(self) -> list[Request]:
        waiting = np.flatnonzero(self._waiting).tolist()
        return [*(self.registry.request(slot) for slot in waiting), *self._unregistered.values()]

    def _reserve(self, slots: int) -> None:
        if slots > len(self._waiting):
            more = max(slots, 2 * len(self._waiting)) - len(self._waiting)
            self._waiting = np.concatenate([self._waiting, np.zeros(-(-more // 64) * 64, dtype=np.bool_)])

    def _wait_for(self, slots: Slots) -> None:
        self._reserve(int(slots.max(initial=-1)) + 1)
        self._waiting[slots] = True
        self._waiting_count += len(slots)

    def _stop_waiting(self, slot: int) -> bool:
        was_waiting = slot < len(self._waiting) and bool(self._waiting[slot])
        if was_waiting:
            self._waiting[slot] = False
            self._waiting_count -= 1
        return was_waiting

    def _take_ready(self, bits: Words) -> tuple[int, ...]:
        if not bits.any():
            return ()
        slots = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        self._reserve(64 * len(bits))
        self._waiting_count -= int(np.count_nonzero(self._waiting[slots]))  # None, if this rank has joined.
        self._waiting[slots] = False
        ready = tuple(slots.tolist())
        if self._probes:
            for slot in ready:
                self._probes.pop(self.registry.request(slot).name, None)
        return ready

    def _register_first(self, count: int) -> None:
        for request in list(self._unregistered.values())[:count]:
            del self._unregistered[request.name]
            self._wait_for(np.array([self.registry.add(request)]))

    def _digest(self) -> int:
        if not self._proposed:
            return 0
        digest = hashlib.blake2b(digest_size=8)
        for request in list(self._unregistered.values())[: self._proposed]:
            digest.update(request.encode())
        return int.from_bytes(digest.digest(), "little")

    def _probe_due(self, now: float) -> bool:
        due = False
        for name, (at, interval) in self._probes.items():
            if now >= at:
                due = True
                longer = min(2 * interval, LONGEST_PROBE_S)
                self._probes[name] = (now + longer, longer)
        return due
