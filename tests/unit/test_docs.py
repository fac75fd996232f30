"""The documents keep up with the code."""

from __future__ import annotations

from pathlib import Path

import pytest

import fusion.torch as hvd

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", hvd.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    documented = (
        name,
        name.removesuffix("_").removesuffix("_async").removeprefix("grouped_"),  # Forms are described once.
    )
    assert any(f"`{found}" in text or f".{found}`" in text for found in documented)


def test_links_between_documents_lead_somewhere() -> None:
    import re

    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
