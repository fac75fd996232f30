"""`fusion run --as-horovod`: scripts for Horovod run on this runtime, unchanged, in their ranks only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from tests.cli.support import fusion, needs_launcher

MODULES = (
    "horovod",
    "horovod.common",
    "horovod.common.basics",
    "horovod.common.elastic",
    "horovod.common.exceptions",
    "horovod.common.process_sets",
    "horovod.common.util",
    "horovod.runner",
    "horovod.runner.util.threads",
    "horovod.torch",
    "horovod.torch.compression",
    "horovod.torch.elastic",
    "horovod.torch.elastic.sampler",
    "horovod.torch.elastic.state",
    "horovod.torch.functions",
    "horovod.torch.mpi_ops",
    "horovod.torch.optimizer",
    "horovod.torch.sync_batch_norm",
)
IMPORTS = f"""
import importlib
for name in {MODULES!r}:
    importlib.import_module(name)
"""
TRAINS = """
import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import num_rank_is_power_2, split_list
from horovod.torch.elastic.state import ObjectState, TorchState
from horovod.torch.mpi_ops import Sum, _basics, gpu_available, synchronize
from horovod.torch.optimizer import _DistributedOptimizer

import fusion.torch

hvd.init()
assert _basics.rank() == hvd.rank() and horovod.__version__
assert num_rank_is_power_2(hvd.size()) and split_list([1, 2, 3], 2) == [[1, 2], [3]]
assert HorovodInternalError is fusion.torch.FusionError

weight = torch.nn.Parameter(torch.full((3,), 4.0 + hvd.rank()))
hvd.broadcast_parameters([("weight", weight)], root_rank=1)
plain = torch.optim.SGD([weight], lr=0.5)
optimizer = hvd.DistributedOptimizer(plain, named_parameters=[("weight", weight)], op=hvd.Average)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
assert isinstance(optimizer, torch.optim.SGD)
assert isinstance(optimizer, _DistributedOptimizer)
assert "horovod" in str(type(optimizer))
(weight * (2 * hvd.rank() + 1)).sum().backward()
optimizer.step()
assert weight.tolist() == [4.0] * 3, weight
assert synchronize(hvd.allreduce_async(torch.ones(1), op=Sum)).item() == 2
try:
    horovod.run(print, np=2)
except NotImplementedError as error:
    assert "fusion run --as-horovod" in str(error)
else:
    raise AssertionError("horovod.run did not refuse")
print("trained as", horovod.__file__)
"""


@needs_launcher
def test_a_script_for_horovod_trains_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    done = fusion("run", "--as-horovod", "-np", 2, "--no-prefix", script)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("trained as")]
    assert len(lines) == 2 and all("as_horovod" in line for line in lines)


@needs_launcher
def test_every_module_that_scripts_import_is_there(tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    script.write_text(IMPORTS)
    done = fusion("run", "--as-horovod", "-np", 1, script)
    assert done.returncode == 0, done.stderr


@needs_launcher
def test_without_the_option_there_is_no_horovod(tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    script.write_text("import horovod")
    done = fusion("run", "-np", 1, script)
    assert done.returncode != 0
    assert "No module named 'horovod'" in done.stderr


def test_nothing_named_horovod_is_installed() -> None:
    assert importlib.util.find_spec("horovod") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("horovod")
    ours = importlib.metadata.distribution("tensor-fusion-runtime")
    tops = {Path(str(file)).parts[0].lower() for file in ours.files or ()}
    assert not any(top.startswith("horovod") for top in tops)
