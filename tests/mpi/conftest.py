"""The runtime inside a rank's pytest: one for each module.

A module may set `INIT`, the arguments of `hvd.init`; `INIT = None` leaves the
runtime alone, for tests of parts below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.ranks import count_of, inside


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of the data plane run on devices at some numbers of ranks only."""
    left_out = [item for item in items if _left_out(item)]
    if left_out and not inside():
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _left_out(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    arrangement = None if callspec is None else callspec.params.get("plane")
    if not isinstance(arrangement, str):
        return False
    from tests.mpi.plane import DEVICE_RANKS  # It starts MPI.

    counts = DEVICE_RANKS.get(arrangement)
    return counts is not None and count_of(item) not in counts


@pytest.fixture(scope="module", autouse=True)
def runtime(request: pytest.FixtureRequest) -> Iterator[ModuleType | None]:
    arguments = getattr(request.module, "INIT", {})
    if not inside() or arguments is None:
        yield None
        return
    import fusion.torch as hvd

    hvd.init(**arguments)
    yield hvd
    hvd.shutdown()


@pytest.fixture
def hvd(runtime: ModuleType | None) -> ModuleType:
    """`fusion.torch`, initialised; the same module that `import fusion.torch as hvd` gives."""
    assert runtime is not None, "the test needs @ranks, and a module without INIT = None"
    return runtime
