"""The documents keep up with the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import fusion.federated as fed
import fusion.torch as hvd

ROOT = Path(__file__).resolve().parents[2]


API = (ROOT / "docs" / "api.md").read_text()
CALLABLES = [name for name in hvd.__all__ if inspect.isfunction(getattr(hvd, name))]


@pytest.mark.parametrize("name", [*hvd.__all__, *fed.__all__])
def test_every_public_name_is_documented(name: str) -> None:
    assert re.search(rf"(?<![\w.]){name}(?!\w)", API) or f"`.{name}`" in API


@pytest.mark.parametrize("name", [*CALLABLES, "SyncBatchNorm", "ProcessSet"])
def test_every_function_is_documented_with_its_parameters(name: str) -> None:
    parameters = set(inspect.signature(getattr(hvd, name)).parameters)
    shown = re.findall(rf"(?<![\w.]){name}\(([^)]*)\)", API)
    assert any(parameters <= set(re.findall(r"\w+", each)) for each in shown), (
        f"{parameters} of {name}: {shown}"
    )


FEDERATED = [name for name in fed.__all__ if not issubclass(type(getattr(fed, name)), type)] + [
    "AsyncFederation",
    "Client",
    "DiLoCo",
    "FederatedAveraging",
    "LocalSGD",
    "LocalTraining",
]


@pytest.mark.parametrize("name", FEDERATED)
def test_what_is_called_of_federated_training_is_documented_with_its_parameters(name: str) -> None:
    parameters = set(inspect.signature(getattr(fed, name)).parameters)
    shown = re.findall(rf"(?<![\w.]){name}\(([^)]*\)?[^)]*)\)", API)
    assert any(parameters <= set(re.findall(r"\w+", each)) for each in shown), f"{parameters}: {shown}"


def test_links_between_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
