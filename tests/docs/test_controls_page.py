"""The table of controls in docs/metrics.md is the committed measurement, and says what each metric lets pass."""

from __future__ import annotations

import json

import controls

PAGE = controls.PAGE.read_text(encoding="utf-8")
FOUND = json.loads(controls.RESULTS.read_text(encoding="utf-8"))


def test_the_table_is_that_of_the_committed_results():
    assert f"<!-- controls -->\n{controls.table(FOUND).strip()}\n<!-- end -->" in PAGE


def test_what_the_page_says_of_the_controls():
    rows = {line.split("|")[1].strip().partition(",")[0].strip("`"): line for line in PAGE.splitlines() if "|" in line}
    nonsense = {name: rows[name].split("|")[3:5] for name in ("GenPPL", "mauve", "rep-4")}
    assert "Repetition alone lets both kinds of nonsense pass" in " ".join(PAGE.split())
    assert all("above 3 of 3" in cell for cell in nonsense["rep-4"])
    assert not any("above" in cell for name in ("GenPPL", "mauve") for cell in nonsense[name])
    assert "above" not in rows["novelty-8"].split("|")[5]
