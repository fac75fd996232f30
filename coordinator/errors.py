"""Every error the runtime raises on purpose; all derive from `FusionError`.

A message names the tensor and the ranks it is about, and ends with what to do.
"""

from __future__ import annotations


class FusionError(RuntimeError):
    """Base of all errors of this runtime."""


class NotInitializedError(FusionError):
    """The API was used before `init()` or after `shutdown()`."""


class ConfigError(FusionError, ValueError):
    """A setting has an unknown name or a value that cannot be used."""


class DuplicateNameError(FusionError, ValueError):
    """A tensor of this name is still in flight on this rank."""


class MismatchError(FusionError, ValueError):
    """Ranks submitted different things under one name."""


class StallError(FusionError, TimeoutError):
    """A tensor waited longer than `stall_shutdown_s` for other ranks."""


class RankLeftError(FusionError):
    """Another rank shut down, exited or raised, so this operation cannot complete."""


class ShutdownError(FusionError):
    """This rank shut the runtime down while the operation was pending."""


class RuntimeBrokenError(FusionError):
    """The cycle thread failed; the original exception is the cause of this one."""


class ClientError(FusionError):
    """A client of federated training raised, diverged or does not answer; names it and its rank."""
