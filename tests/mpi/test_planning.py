"""The costs that ranks measure are those of the runtime they run."""

from __future__ import annotations

import msgspec
import pytest

from fusion.planning.measure import Options, measure
from fusion.planning.prediction import buffer_bytes
from fusion.planning.ranks import Spec, answer
from tests.ranks import ranks

INIT = None

QUICK = Options(experiment_s=0.001, longest_s=0.05)


@pytest.fixture
def comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@ranks(2)
def test_ranks_measure_the_same_costs(comm):
    costs = measure(comm, QUICK)
    assert comm.allgather(costs) == [costs] * 2
    assert costs.ranks == 2
    for curve in (costs.dynamic, costs.static):
        assert float(curve.response(1 << 24, 1)) > float(curve.response(1 << 10, 1)) >= 0
        assert min(curve.compute_stretch, curve.latency_stretch, curve.transfer_stretch) >= 1
        assert min(msgspec.structs.astuple(curve)[:4]) >= 0


@ranks(2)
@pytest.mark.parametrize("settings", [{}, {"hierarchy": "off", "chunk_kb": 512}], ids=["node", "ring"])
@pytest.mark.parametrize("threshold", [1.0, 16.0])
def test_predicted_buffers_are_those_the_runtime_makes(comm, settings, threshold):
    import fusion.torch as hvd
    from fusion import runtime
    from fusion.planning.costs import Costs, Curve

    hvd.init(fusion_threshold_mb=threshold, **settings)
    current = runtime.current()
    nodes = tuple(len(node) for node in current.topology.nodes)
    config, made = current.config, hvd.memory_report()
    hvd.shutdown()
    curve = Curve(0.0, 0.0, 0.0, 0.0, (1e-9,) * 4)
    predicted = buffer_bytes(Costs(nodes, config.hierarchy, config.chunk_kb * 1024, curve, curve), threshold)
    assert predicted == pytest.approx(made.buffers, abs=3 * 4096)


@ranks(2)
def test_an_error_on_one_rank_is_the_answer_of_all(comm, monkeypatch):
    from fusion.planning import models

    load = models.load

    def loads_on_rank_0_only(path):
        return load("json:dumps" if comm.rank else "scripts.benchmarks.plan_models:tiny1000")

    monkeypatch.setattr(models, "load", loads_on_rank_0_only)
    found = answer(comm, Spec(model="any:thing", experiment_s=0.001))
    assert found.error is not None
    assert "rank 1: json:dumps" in found.error
