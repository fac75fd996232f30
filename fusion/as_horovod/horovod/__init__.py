"""`horovod`, as the ranks of `fusion run --as-horovod` import it: this runtime under Horovod's names.

The folder above is put on PYTHONPATH, in front, for those processes only; it is no
part of any installed package path. Modules here re-export what `fusion.torch` has.
"""

from horovod.runner import run

__version__ = "0.28.1"
"""The release of Horovod whose PyTorch interface is meant."""

__all__ = ["__version__", "run"]
