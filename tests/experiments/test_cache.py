"""What docs/cache.md says of `refresh` is what benchmarks/cache.py found, and its rules follow an exact trajectory."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from limpet.models.duo import Duo
from model_cases import TINY, random_network

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cache() -> dict:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return runpy.run_path(str(ROOT / "benchmarks/cache.py"))
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_the_page_has_what_was_found(cache) -> None:
    page = (ROOT / "docs/cache.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks/results/cache.json").read_text(encoding="utf-8"))
    assert f"<!-- quality -->\n{cache['page'](cache['groups'](found))}\n<!-- end -->" in page
    assert f"<!-- policies -->\n{cache['policy_table'](found)}\n<!-- end -->" in page


def test_rules_are_compared_on_an_exact_trajectory(cache) -> None:
    model = Duo(random_network(replace(TINY, length=8)))
    found = cache["policies"](model, "mend", 2, 1)["rules"]
    rows = [found[f"every {calls}"]["rows"] for calls in (2, 4, 8, 16, 64)]
    assert rows == sorted(rows, reverse=True)
    assert all(0 < one["rows"] < 1 and one["drawn"] > 0 for one in found.values())
    waiting, fresh = found["every 8, inspections in turns of 4"], found["every 8"]
    assert waiting["rows"] < fresh["rows"]
    assert waiting["inspected"] > fresh["inspected"]
