"""The program of a rank that measures for a plan; rank 0 prints what was found.

Started by `fusion plan` under mpirun as `python -m fusion.planning.ranks SPEC`, SPEC
being the JSON of a `Spec`. The answer is one line, `MARK` and the JSON of a `Found`, on
standard output, which mpirun brings home from whatever host rank 0 is on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from coordinator.errors import FusionError
from fusion import mpi_settings
from fusion.planning.costs import Costs
from fusion.planning.workload import PlanError, Workload

if TYPE_CHECKING:
    from mpi4py import MPI

    from fusion.planning import models

MARK = "fusion.plan="


class Spec(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        model: `package.module:factory`, if that is where the tensors come from.
        forward_s, backward_s: what the user said, in place of measuring.
        experiment_s: see `fusion.planning.measure.Options`.
    """

    model: str | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    experiment_s: float = 0.2


class Found(msgspec.Struct, frozen=True):
    """The answer: an error in words, or costs, and the workload if there is a model."""

    error: str | None = None
    costs: Costs | None = None
    workload: Workload | None = None


def main(text: str) -> None:
    """Measure on this rank, in step with the others."""
    mpi_settings.ask()
    spec = msgspec.json.decode(text, type=Spec)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    found = answer(comm, spec)
    if comm.rank == 0:
        print(MARK + msgspec.json.encode(found).decode(), flush=True)  # noqa: T201 - the parent reads it.
    comm.Free()


def answer(comm: MPI.Intracomm, spec: Spec) -> Found:
    """What the ranks find. Collective; the same on every rank but for `workload`, which rank 0 has."""
    from fusion.planning.measure import Options, measure

    if comm.size < 2:
        return Found(error="one rank has nobody to reduce with: plan for two ranks or more (-np 2)")
    try:
        workload, unit = _workload(comm, spec) if spec.model is not None else (None, None)
        costs = measure(comm, Options(experiment_s=spec.experiment_s), unit)
    except FusionError as error:
        return Found(error=str(error))
    return Found(costs=costs, workload=workload)


def _workload(comm: MPI.Intracomm, spec: Spec) -> tuple[Workload, Callable[[], object] | None]:
    """The model's step, each gradient as late as on the last rank; and its backward pass, if it can run.

    Raises:
        PlanError: some rank, maybe another one, has no model; alike on all.
    """
    from fusion.planning import models

    model = profiled = None
    error = None
    try:
        model = models.load(spec.model or "")
    except PlanError as found:
        error = str(found)
    _agree(comm, error)
    assert model is not None
    if model.inputs is not None:
        comm.Barrier()
        try:
            profiled = models.profile(model)
        except PlanError as found:
            error = str(found)
        _agree(comm, error)
    workload = None
    try:
        slowest = _slowest(comm, profiled) if profiled is not None else None
        workload = models.workload(model, slowest, forward_s=spec.forward_s, backward_s=spec.backward_s)
    except PlanError as found:
        error = str(found)
    _agree(comm, error)
    assert workload is not None
    return workload, models.backward_only(model) if profiled is not None and not model.on_meta else None


def _slowest(comm: MPI.Intracomm, mine: models.Profile) -> models.Profile:
    everyone = comm.allgather(mine)
    names = set(mine.ready_s)
    if any(set(other.ready_s) != names for other in everyone):
        raise PlanError(
            "the ranks made models with different parameters: the factory must be the same on all"
        )
    return type(mine)(
        max(other.forward_s for other in everyone),
        max(other.backward_s for other in everyone),
        {name: max(other.ready_s[name] for other in everyone) for name in mine.ready_s},
    )


def _agree(comm: MPI.Intracomm, error: str | None) -> None:
    """Raise the error of the lowest rank that has one, on all ranks."""
    errors = comm.allgather(error)
    for rank, text in enumerate(errors):
        if text is not None:
            raise PlanError(text if rank == 0 else f"rank {rank}: {text}")


if __name__ == "__main__":
    main(sys.argv[1])
