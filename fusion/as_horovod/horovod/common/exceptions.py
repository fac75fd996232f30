"""Errors that scripts catch."""

from coordinator.errors import FusionError as HorovodInternalError


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - the name is Horovod's
    """Horovod raises it where hosts come or go. Here the hosts of a job stay, so nothing does."""


class HorovodVersionMismatchError(ImportError):
    """Horovod raises it where it was compiled for another torch. Here nothing is compiled."""


__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
