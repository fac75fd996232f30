"""The runtime inside a rank's pytest: one for each module.

A module may set `INIT`, the arguments of `hvd.init`; `INIT = None` leaves the
runtime alone, for tests of parts below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.ranks import inside


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
