"""What an MPI is asked for, and how long segments may be."""

from __future__ import annotations

import pytest

from fusion import mpi_settings
from fusion.mpi_settings import LONGEST_SEGMENT_KB, WANTED, ask, segment_kb, wanted

EAGER = "OMPI_MCA_btl_tcp_eager_limit"


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {EAGER: "4096"}
    monkeypatch.setattr(mpi_settings.os, "environ", environ)
    assert "btl_tcp_eager_limit" not in wanted(environ) and len(wanted(environ)) == len(WANTED) - 1
    ask()
    assert environ[EAGER] == "4096" and not wanted(environ)


@pytest.mark.parametrize(
    ("environ", "open_mpi", "kb"),
    [
        ({EAGER: WANTED["btl_tcp_eager_limit"]}, True, LONGEST_SEGMENT_KB),
        ({EAGER: str(1 << 30)}, True, LONGEST_SEGMENT_KB),
        ({}, True, 60),
        ({EAGER: "64k"}, True, 60),
        ({EAGER: "100"}, True, 1),
        ({}, False, 60),
        ({EAGER: str(1 << 30)}, False, 60),
    ],
)
def test_a_segment_is_sent_without_asking(environ: dict[str, str], open_mpi: bool, kb: int) -> None:
    assert segment_kb(environ, open_mpi=open_mpi) == kb
    if kb > 1 and environ.get(EAGER, "").isdigit():
        assert kb * 1024 < int(environ[EAGER])
