"""Pieces of output from several ranks become whole lines, each behind its rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion.cli.output import MARK, Lines


def _mark(rank: int) -> bytes:
    return MARK.replace("%r", str(rank)).encode()


def _all(*reads: bytes) -> bytes:
    lines = Lines()
    return b"".join(map(lines.feed, reads)) + lines.finish()


def test_a_line_in_pieces_is_one_line() -> None:
    pieces = [_mark(0) + piece for piece in (b"hello", b" ", b"2", b"\n")]
    assert _all(*pieces) == b"[0] hello 2\n"


def test_pieces_of_two_ranks_do_not_share_a_line() -> None:
    data = _mark(0) + b"he" + _mark(1) + b"wor" + _mark(0) + b"llo\n" + _mark(1) + b"ld\n"
    assert _all(data) == b"[0] hello\n[1] world\n"


def test_what_mpirun_says_itself_has_no_prefix() -> None:
    data = b"warning\n" + _mark(0) + b"hello\n" + b"BAD TERMINATION\n"
    assert _all(data) == b"warning\n[0] hello\nBAD TERMINATION\n"


def test_a_line_is_written_as_soon_as_it_is_complete() -> None:
    lines = Lines()
    assert lines.feed(_mark(0) + b"one\n" + _mark(0) + b"tw") == b"[0] one\n"
    assert lines.feed(_mark(0) + b"o\n") == b"[0] two\n"


def test_a_progress_bar_moves() -> None:
    lines = Lines()
    assert lines.feed(_mark(0) + b"10 %\r") == b"[0] 10 %\r"
    assert lines.feed(_mark(0) + b"20 %\r") == b"[0] 20 %\r"


def test_a_last_line_without_an_end_gets_one() -> None:
    assert _all(_mark(1) + b"bye", _mark(0) + b"good") == b"[0] good\n[1] bye\n"


def test_text_that_looks_like_the_beginning_of_a_mark_is_kept() -> None:
    assert _all(_mark(0) + b"see [fus") == b"[0] see [fus\n"
    assert _all(_mark(0) + b"x[\n") == b"[0] x[\n"


@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from([b"a", b"[", b"bc d", b"\n", b"[f"])), max_size=30
    ),
    st.integers(1, 40),
)
def test_it_does_not_matter_where_reads_cut_the_stream(pieces: list[tuple[int, bytes]], width: int) -> None:
    stream = b"".join(_mark(rank) + piece for rank, piece in pieces)
    reads = [stream[at : at + width] for at in range(0, len(stream), width)]
    assert _all(*reads) == _all(stream)
    for rank in range(12):
        own = b"".join(piece for writer, piece in pieces if writer == rank)
        written = [line for line in _all(stream).splitlines() if line.startswith(b"[%d] " % rank)]
        assert [line.partition(b" ")[2] for line in written] == own.splitlines()
