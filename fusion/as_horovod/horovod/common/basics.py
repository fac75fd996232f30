"""The object through which Horovod's modules reach its core."""

from typing import Any

import fusion.torch
from fusion.torch.process_sets import get_process_set_ids_and_ranks


class HorovodBasics:
    """Has every function of `fusion.torch` as a method."""

    def __init__(self, *extension: Any) -> None:
        """Args:
        extension: where Horovod's compiled part would be; not looked at.
        """

    def __getattr__(self, name: str) -> Any:
        return getattr(fusion.torch, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """The ranks of each process set, by its number."""
        return get_process_set_ids_and_ranks()
