"""Two hosts on one machine: network namespaces joined by a virtual cable.

Each host has a name of its own (MPI takes equal host names for one node), one
interface `fusion0`, and sees the other only through it, so what ranks of
different hosts say to each other crosses a real TCP link. Needs root, iproute2
and util-linux. `scripts/two_hosts` runs any program on them by hand:

    scripts/two_hosts -np 4 scripts/train_digits.py
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.launch import ROOT, environment, mpirun

INTERFACE = "fusion0"
NETWORK = "10.77.0"
CABLE_S = 10.0
GIGABIT = ("tbf", "rate", "1gbit", "burst", "256k", "latency", "20ms")

_PREFIX = "fusion-host-"
_numbers = itertools.count(1)

# Called in place of ssh: after the options (MPICH's) comes the host, the rest is the command to run there.
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$1
shift
case $address in
{cases}
*) echo "no such host: $address" >&2; exit 1 ;;
esac
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$1"; shift; exec sh -c "$*"' sh "$host" "$@"
"""


class TwoHosts:
    """Makes the hosts, and always takes them away again.

    Also a `tests.launch.Launcher`: the first half of the ranks runs on the first
    host.

    Args:
        gigabit: limit the cable to 1 Gbit/s.
    """

    def __init__(self, *, gigabit: bool = False) -> None:
        self._gigabit = gigabit
        self.names = [f"{_PREFIX}{os.getpid()}-{next(_numbers)}" for _ in range(2)]
        self.addresses = [f"{NETWORK}.{number}" for number in (1, 2)]
        self._agent: Path | None = None

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Delete the hosts; their ends of the cable go with them."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        if self._agent is not None:
            self._agent.unlink(missing_ok=True)

    def command(self, np: int) -> list[str]:
        """What to put before a program so that it runs as `np` ranks, half of them on each host."""
        program, open_mpi = mpirun()
        here, there = self.addresses
        slots = ",".join([f"{here}:{np - np // 2}", *([f"{there}:{np // 2}"] if np > 1 else [])])
        ranks = ["--host", slots, *_SHARED_CORES] if open_mpi else ["-hosts", slots]
        return [*self.on(0), program, *self.options(), *ranks, "-np", str(np)]

    def options(self) -> list[str]:
        """What mpirun needs to reach the hosts, and to send what ranks say to each other over the cable."""
        assert self._agent is not None, "the hosts exist inside `with` only"
        _, open_mpi = mpirun()
        return (_open_mpi if open_mpi else _mpich)(str(self._agent))

    def on(self, host: int) -> list[str]:
        """What to put before a command so that it runs on host 0 or 1."""
        name = self.names[host]
        rename = f'hostname {shlex.quote(name)}; exec "$@"'
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", rename, "sh"]

    def _make(self) -> None:
        _delete_forgotten()
        first, second = self.names
        for name in self.names:
            _ip("netns", "add", name)
        _ip("-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", device, "up")
            if self._gigabit:
                _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *GIGABIT)
        for host in (0, 1):
            self._wait_for_cable(host)
        self._agent = self._write_agent()

    def _wait_for_cable(self, host: int) -> None:
        """The kernel says a little later that the cable is plugged in; MPICH uses no interface before."""
        state = f"/sys/class/net/{INTERFACE}/operstate"
        deadline = time.monotonic() + CABLE_S
        while _run(*self.on(host), "cat", state).strip() != "up":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{INTERFACE} of {self.names[host]} is not up after {CABLE_S} s")
            time.sleep(0.05)

    def _write_agent(self) -> Path:
        cases = "\n".join(
            f"{address}) host={name} ;;" for name, address in zip(self.names, self.addresses, strict=True)
        )
        handle, path = tempfile.mkstemp(prefix="fusion-agent-")
        with os.fdopen(handle, "w") as file:
            file.write(_AGENT.format(cases=cases))
        agent = Path(path)
        agent.chmod(0o755)
        return agent


_SHARED_CORES = ("--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1")


def _open_mpi(agent: str) -> list[str]:
    return [
        *("--prtemca", "plm_ssh_agent", agent),
        *("--prtemca", "prte_if_include", INTERFACE),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", INTERFACE),
    ]


def _mpich(agent: str) -> list[str]:
    return [
        *("-launcher", "ssh", "-launcher-exec", agent),
        *("-iface", INTERFACE),
        *("-genv", "UCX_TLS", "tcp,self", "-genv", "UCX_NET_DEVICES", INTERFACE),
    ]


def _delete_forgotten() -> None:
    """Delete the hosts of a process that was killed before it could."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        owner = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and owner.isdigit() and not Path("/proc", owner).exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@cache
def why_not() -> str | None:
    """Why two hosts cannot be made here, or None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc", "unshare", "hostname") if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux)"
    try:
        mpirun()
        with TwoHosts():
            return None
    except FileNotFoundError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a Python program on two hosts; the exit status is mpirun's."""
    parser = argparse.ArgumentParser(prog="two_hosts", description=main.__doc__)
    parser.add_argument("-np", type=int, default=4, help="number of ranks, half of them on each host")
    parser.add_argument("--gigabit", action="store_true", help="limit the cable to 1 Gbit/s")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a Python script and its arguments")
    options = parser.parse_args(arguments)
    if not options.program:
        parser.error("no program given")
    reason = why_not()
    if reason is not None:
        print(f"two_hosts: {reason}", file=sys.stderr)
        return 1
    with TwoHosts(gigabit=options.gigabit) as hosts:
        command = [*hosts.command(options.np), sys.executable, *options.program]
        return subprocess.run(command, check=False, cwd=ROOT, env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
