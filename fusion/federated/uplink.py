"""How the changes of parameters travel from clients: whole, or compressed with error feedback.

Every client has a memory of its own of what its payloads have left out, which is added
to its next change, so that nothing is lost, only late. An update is settled when it is
known whether it was used: if it was not, the memory stays as it was before, and the
change itself, which is then out of date, is forgotten. Used by one thread at a time for
each client; see `fusion.compression.feedback` for the method and its papers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusion.compression import BucketInfo, Compressor, Key, Ledger, Memories, parse
from fusion.federated.sampling import seed_of
from fusion.federated.vector import Layout


class Uplink:
    """Encodes changes of this rank's clients, and decodes those of all.

    Args:
        layout: of the model; its parameters are one bucket.
        compression: a compressor, or its specification such as "topk:0.01"; None sends values whole.
        seed: of the compressor's random numbers.

    Raises:
        ValueError: there is no such compressor, or a setting cannot be used.
        TypeError: `compression` is neither a compressor nor a string.
    """

    def __init__(self, layout: Layout, compression: Compressor | str | None, seed: int) -> None:
        self._compressor = compressor_of(compression)
        self._info = BucketInfo.of((piece.name, piece.shape) for piece in layout.parameters)
        self._dtype = layout.torch_dtype
        self._seed = seed
        self._memories: dict[int, Memories] = {}
        self._ledgers: dict[int, Ledger] = {}
        self._sent: dict[int, int] = {}

    def add_client(self, client: int) -> None:
        """Make room for a client of this rank, before it encodes."""
        self._sent[client] = 0
        if self._compressor is not None:
            self._memories[client] = Memories()
            self._open(client, self._compressor)

    def _open(self, client: int, compressor: Compressor) -> None:
        feedback = getattr(compressor, "feedback", False)
        self._ledgers[client] = self._memories[client].open(self._info, feedback=feedback)

    def encode(self, client: int, change: Tensor) -> Tensor:
        """The payload of a client's change, to be settled before its next one.

        Args:
            change: flat, one value for each element of the parameters; only read.

        Raises:
            OverflowError: the compressor's type cannot hold a value.
        """
        if self._compressor is None:
            return change
        key = Key(seed_of(self._seed, client, self._sent[client]))
        self._sent[client] += 1
        ledger = self._ledgers[client]
        bucket = ledger.buffer().copy_(change)
        ledger.add_to(bucket)
        payload = self._compressor.encode(bucket, self._info, key, ledger.memories)
        self._compressor.add(payload, self._info, bucket, sign=-1)
        if not torch.isfinite(bucket).all():
            raise OverflowError(
                f"{self._compressor.spec} cannot hold its largest value, {float(change.abs().max()):g}; use "
                "another compressor or a smaller learning rate"
            )
        ledger.stage(bucket)
        return payload

    def settle(self, client: int, *, used: bool) -> None:
        """Say whether the client's last update was used; nothing if it is settled or of another rank."""
        ledger = self._ledgers.get(client)
        if ledger is None:
            return
        if used:
            ledger.commit()
        else:
            ledger.rollback()

    def decode(self, payload: Tensor) -> Tensor:
        """The change that a payload stands for, flat, of the layout's dtype."""
        if self._compressor is None:
            return payload
        return self._compressor.decode(payload, self._info).to(self._dtype)

    def state_dict(self) -> dict[int, Any]:
        """What has been left out so far, by client of this rank; copies."""
        return {
            client: {"sent": self._sent[client], "memory": memory.state_dict()}
            for client, memory in self._memories.items()
        }

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Go on from `state_dict`; clients that this rank does not host are passed over.

        Raises:
            ValueError: it is of another model.
        """
        shapes = {piece.name: piece.shape for piece in self._info.pieces}
        for client, kept in state.items():
            if self._compressor is not None and client in self._memories:
                self._memories[client].load_state_dict(kept["memory"], shapes)
                self._open(client, self._compressor)
                self._sent[client] = kept["sent"]


def compressor_of(compression: Compressor | str | None) -> Compressor | None:
    """The compressor that is meant; None if values travel whole."""
    if compression is None or compression == "none":
        return None
    if isinstance(compression, str):
        return parse(compression)
    if not isinstance(compression, Compressor):
        raise TypeError(
            f"compression must be a compressor of fusion.compression or a string such as 'topk:0.01', "
            f"not {compression!r}"
        )
    return compression
