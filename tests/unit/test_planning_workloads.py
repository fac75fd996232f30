"""Workloads: from sets, lists, timelines and modules; and what is said about bad ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from coordinator.timeline import Timeline
from fusion.planning import models, sets, traces
from fusion.planning.workload import PlanError, Tensor, make, spread

LIST = [
    {"name": "late", "shape": [8, 4], "dtype": "float32", "ready_ms": 5.0},
    {"name": "early", "shape": [16], "dtype": "bfloat16", "ready_ms": 1.0},
]


def written(folder: Path, content: object) -> str:
    path = folder / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_set_is_ready_at_once_last_parameter_first() -> None:
    work = sets.workload("resnet50")
    assert len(work.tensors) == 161
    assert work.nbytes == sets.total_bytes(sets.SETS["resnet50"]())
    assert work.tensors[0].count == 1000
    assert work.backward_s == 0


@pytest.mark.parametrize(
    ("name", "elements", "tensors", "itemsize"),
    [
        ("bert-large", 335_141_888, 391, 4),
        ("layer-7b", 202_383_360, 9, 4),
        ("layer-7b-bf16", 202_383_360, 9, 2),
        ("tiny10000", 160_000, 10_000, 4),
    ],
)
def test_a_set_has_the_parameters_of_its_model(name: str, elements: int, tensors: int, itemsize: int) -> None:
    work = sets.workload(name)
    assert sum(tensor.count for tensor in work.tensors) == elements
    assert work.nbytes == elements * itemsize
    assert len(work.tensors) == tensors


def test_spreading_gives_time_in_proportion_to_elements() -> None:
    work = spread(make("w", [Tensor("a", 1, "float32"), Tensor("b", 3, "float32")]), 0.4)
    assert [tensor.ready_s for tensor in work.tensors] == pytest.approx([0.1, 0.4])


def test_a_list_is_put_into_the_order_in_which_tensors_are_ready(tmp_path: Path) -> None:
    work = traces.read(written(tmp_path, LIST))
    assert [(tensor.name, tensor.nbytes) for tensor in work.tensors] == [("early", 32), ("late", 128)]
    assert work.backward_s == 5e-3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "no tensors"),
        ([{**LIST[0], "dtype": "float31"}], r"'late'.*'float31'.*bfloat16"),
        ([LIST[0], LIST[0]], "two tensors named 'late'"),
        ([{"name": "x"}], "shape"),
        ([{**LIST[0], "shape": [-1]}], r"shape\[0\]|>= 0"),
        ([{**LIST[0], "ready_ms": -1}], "ready_ms"),
        ([{**LIST[0], "when": 1}], "when"),
        ({"tensors": []}, "list of objects"),
        ("[1,", ":1: this is not JSON"),
    ],
)
def test_a_bad_list_is_named_with_what_is_wrong(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        traces.read(written(tmp_path, content))
    assert "trace.json" in str(raised.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(PlanError, match=r"/no/such\.json: the trace cannot be read"):
        traces.read("/no/such.json")


def test_times_that_are_none() -> None:
    with pytest.raises(PlanError, match="later than the end"):
        make("w", [Tensor("t", 1, "float32", 1.0)], backward_s=0.5)
    with pytest.raises(PlanError, match="forward pass"):
        make("w", [Tensor("t", 1, "float32")], forward_s=float("nan"))


def recorded(path: Path, steps: int) -> str:
    """A timeline of steps of three gradients, the first of them slow, after one broadcast."""
    timeline = Timeline(path, 0)
    timeline.span("queued", ["broadcast.model"], 0.0, 0.1, 400)
    for step in range(steps):
        begin = 1.0 + step
        for index, name in enumerate(["c", "b", "a"]):
            at = begin + index * (0.1 if step == 0 else 0.01)
            timeline.span("queued", [name], at, at + 0.001, 4 * (index + 1))
            timeline.span("reduce", [name], at + 0.001, at + 0.002, 4)
    timeline.close()
    return str(path)


def test_a_timeline_is_the_median_step_after_the_first(tmp_path: Path) -> None:
    work = traces.read(recorded(tmp_path / "timeline.json", steps=4))
    assert [tensor.name for tensor in work.tensors] == ["c", "b", "a"]
    assert [tensor.count for tensor in work.tensors] == [1, 2, 3]
    assert [tensor.ready_s for tensor in work.tensors] == pytest.approx([0.0, 0.01, 0.02], abs=1e-6)


def test_a_timeline_of_one_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="two steps or more"):
        traces.read(recorded(tmp_path / "timeline.json", steps=1))


def test_a_trace_is_shifted_to_the_end_of_a_longer_pass(tmp_path: Path) -> None:
    work = traces.read(written(tmp_path, LIST))
    assert [t.ready_s for t in traces.stretched(work, 0.02).tensors] == pytest.approx([0.016, 0.02])
    with pytest.raises(PlanError, match="longer than the backward pass"):
        traces.stretched(work, 0.001)


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module `made` to put factories into."""
    module = ModuleType("made")
    monkeypatch.setitem(sys.modules, "made", module)
    return module


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def test_gradients_of_a_run_model_come_in_the_order_of_its_backward_pass(factories: ModuleType) -> None:
    factories.make = lambda: (chain(), torch.ones(3, 4))
    model = models.load("made:make")
    work = models.workload(model, models.profile(model, 0.01))
    assert {tensor.name for tensor in work.tensors[:2]} == {"2.weight", "2.bias"}
    assert {tensor.name for tensor in work.tensors} == {name for name, _ in model.module.named_parameters()}
    assert 0 < work.tensors[0].ready_s <= work.tensors[-1].ready_s <= work.backward_s
    assert work.forward_s > 0


def test_given_times_replace_measured_ones(factories: ModuleType) -> None:
    factories.make = lambda: (chain(), torch.ones(3, 4))
    model = models.load("made:make")
    work = models.workload(model, models.profile(model, 0.01), forward_s=0.5, backward_s=2.0)
    assert (work.forward_s, work.backward_s) == (0.5, 2.0)
    assert 0 < work.tensors[0].ready_s < work.tensors[-1].ready_s <= 2.0


def test_a_model_without_input_is_spread_over_the_pass(factories: ModuleType) -> None:
    factories.make = chain
    work = models.workload(models.load("made:make"), None, backward_s=3.0)
    assert [tensor.name for tensor in work.tensors] == ["2.bias", "2.weight", "0.bias", "0.weight"]
    assert [tensor.ready_s for tensor in work.tensors] == pytest.approx([3 * n / 30 for n in (2, 10, 14, 30)])


def test_on_meta_operations_divide_the_pass(factories: ModuleType) -> None:
    """Two products a layer, but one for the first, whose input needs no gradient."""

    def make_meta():
        with torch.device("meta"):
            return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)]), torch.ones(8, 64)

    factories.make = make_meta
    model = models.load("made:make")
    work = models.workload(model, models.profile(model), backward_s=1.0)
    assert [tensor.name for tensor in work.tensors] == ["2.weight", "1.weight", "0.weight"]
    shares = [tensor.ready_s for tensor in work.tensors]
    assert shares[-1] == pytest.approx(1.0)
    assert shares[0] == pytest.approx(0.4)
    with pytest.raises(PlanError, match="--backward-ms"):
        models.workload(model, models.profile(model))


def test_a_parameter_without_gradient_is_reduced_at_the_end(factories: ModuleType) -> None:
    module = chain()
    module.register_parameter("unused", nn.Parameter(torch.ones(3)))
    factories.make = lambda: (module, torch.ones(3, 4))
    model = models.load("made:make")
    work = models.workload(model, models.profile(model, 0.01))
    assert work.tensors[-1].name == "unused"


def test_a_loss_function_and_keyword_input_are_used(factories: ModuleType) -> None:
    seen = []
    factories.make = lambda: (chain(), {"input": torch.ones(1, 4)}, lambda out: seen.append(out) or out.sum())
    models.profile(models.load("made:make"), 0.0)
    assert seen


def test_the_backward_pass_alone_leaves_no_gradient(factories: ModuleType) -> None:
    factories.make = lambda: (chain(), torch.ones(3, 4))
    model = models.load("made:make")
    again = models.backward_only(model)
    again()
    again()
    assert all(parameter.grad is None for parameter in model.module.parameters())


def test_complex_parameters_count_twice(factories: ModuleType) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    factories.make = lambda: module
    (tensor,) = models.workload(models.load("made:make"), None).tensors
    assert (tensor.count, tensor.dtype) == (6, "float32")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: 7, "must return a torch.nn.Module.*returned int"),
        (lambda: (), "returned tuple"),
        (nn.ReLU, "no trainable parameters"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (3, "no function 'make'"),
    ],
)
def test_a_factory_that_makes_no_model_is_refused(
    factories: ModuleType, factory: object, message: str
) -> None:
    factories.make = factory
    with pytest.raises(PlanError, match=message):
        models.load("made:make")


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(PlanError, match="'no_such_module' cannot be imported"):
        models.load("no_such_module:make")


@pytest.mark.parametrize(
    ("inputs", "message"), [(torch.ones(1, 5), "example input failed"), ("abc", "example input failed")]
)
def test_an_input_that_does_not_fit(factories: ModuleType, inputs: object, message: str) -> None:
    factories.make = lambda: (chain(), inputs)
    with pytest.raises(PlanError, match=message):
        models.profile(models.load("made:make"))
