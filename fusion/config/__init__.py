"""Typed settings: `Config` is what they are, `load` where they come from.

Reading settings imports neither torch nor MPI.
"""

from __future__ import annotations

from fusion.config.schema import FIELDS, Config, Field
from fusion.config.sources import Loaded, Origin, load

__all__ = ["FIELDS", "Config", "Field", "Loaded", "Origin", "load"]
