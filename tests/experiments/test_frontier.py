"""What README, docs/samplers.md and the cards say of samplers is what the committed studies found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import limpet
from limpet.experiments.claims import below
from limpet.paper.studies import forms, interleave, pareto, samplers
from limpet.paper.studies.published import Beside
from limpet.registry import from_file
from limpet.samplers import parse

ROOT = Path(__file__).parents[2]
frontier = sys.modules[from_file(f"{ROOT / 'tools/frontier.py'}:pages").__module__]


@pytest.fixture(scope="module")
def field() -> Beside:
    return frontier.committed("samplers")


@pytest.fixture(scope="module")
def tried() -> Beside:
    return frontier.committed("forms")


def test_the_tables_stand_as_they_come_out():
    made = frontier.pages()
    assert len(made) == 4
    for page, text in made.items():
        assert f"<!-- frontier -->\n{text}<!-- end -->" in page.read_text(encoding="utf-8"), page


def test_what_is_said_of_turns():
    """The tables, and how many rows of the head a interleaved path needs."""
    page = (ROOT / "docs/samplers.md").read_text(encoding="utf-8")
    assert f"<!-- interleave -->\n{frontier.turns()}<!-- end -->" in page
    assert f"<!-- sharper -->\n{frontier.sharper()}<!-- end -->" in page
    model, ancestral = limpet.load("exact:words"), limpet.Native(nfe=16, final_step="sample")
    interleaved = ancestral.replace(interleave=True, grid="quadratic")
    rows = [limpet.sample(model, sampler, n=8).head_rows for sampler in (interleaved, ancestral)]
    said = " ".join(page.split())
    assert f"needs {rows[0]:.0%} of the head's rows where a native one needs {rows[1]:.0%}" in said


def test_in_how_many_calls_turns_reach_the_released_sampler():
    """README and its arm."""
    found = frontier.committed("interleave")

    def less(role: str, nfe: int):
        return pareto.less(found, frontier.SIZE, role, interleave.FINAL_STEP, nfe, interleave.INTERLEAVED["in turn"])

    assert below("mini", less("base", 16)).outcome == "holds"
    assert below("mini", less("base", 12)).outcome == "open"
    assert below("mini-distilled", less("distilled", 16)).outcome == "open"
    page = " ".join((ROOT / "docs/samplers.md").read_text(encoding="utf-8").split())
    labels, none, there = (
        tuple(f"{found(f'base/{at}', what).mean:.3f}" for what in ("nll", "entropy"))
        for at in (
            f"16/{interleave.INTERLEAVED['in turn'][0]}",
            f"16/{interleave.INTERLEAVED['in turn'][-1]}",
            pareto.released(frontier.SIZE, interleave.FINAL_STEP),
        )
    )
    assert (
        f"`{interleave.INTERLEAVED['in turn'][-1]}`, which has no labels, has with 16 calls an NLL of {none[0]} at an "
        in page
    )
    assert f"entropy of {none[1]}, where the released sampler has {there[0]} at {there[1]} with 64; with labels" in page
    assert f"it is {labels[0]} at {labels[1]}" in page
    mends = [
        interleave.sharper(found, frontier.SIZE, role, arm)
        for role in frontier.SIZE.captions
        for arm in interleave.INTERLEAVED["mend"]
    ]
    assert {below("", one).outcome for one in mends} == {"holds"}
    least, most = (f"{-each:.3f}".lstrip("0") for each in (max(m.mean for m in mends), min(m.mean for m in mends)))
    level = less("distilled", 24)
    assert abs(level.mean) < 2 * level.se
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f'--arm "{interleave.INTERLEAVED["in turn"][0]}"' in said
    assert "On `mini` such arms need 16 calls" in said
    assert "on `mini-distilled` 24 are level with it" in said
    assert f"In turn, too, Mend lies below top-p: by {least} to {most} with 16 calls, on both." in said


def test_the_recommendation_is_what_the_tuner_found():
    """For each number of calls of the study, on seeds of its own, and README's commands are these."""
    found = json.loads(frontier.TUNED.read_text())
    best = frontier.tuned()
    assert set(best) == set(frontier.SIZE.nfes)
    said = " ".join((ROOT / "README.md").read_text().split())
    for nfe, arm in best.items():
        assert f'--arm "{arm}"' in said or f"`--arm {arm}`" in said
        assert found[str(nfe)]["question"]["model"] == "mini"
        assert found[str(nfe)]["question"]["nfe"] == nfe
        assert found[str(nfe)]["question"]["n"] == 64
    assert parse(found["16"]["arm"])[1].nfe == 16


def test_on_two_cores_it_finds_the_same_in_the_time_it_is_said_to_take():
    cold = json.loads((ROOT / "benchmarks/results/tuning.json").read_text())
    assert cold["command"] == "limpet tune mini --nfe 16"
    assert cold["cores"] == 2
    assert cold["minutes"] < 20
    assert f"took {cold['minutes']:.0f} minutes" in (ROOT / "docs/tune.md").read_text()
    assert cold["arm"] == json.loads(frontier.TUNED.read_text())["16"]["arm"]


@pytest.mark.parametrize("role", ["base", "distilled"])
def test_what_the_tuner_found_is_within_03_of_the_best_known(tried, role):
    """Less all that mixtures of the other forms reach at its entropy, on seeds that neither choice has seen."""
    for nfe, arm in frontier.tuned().items():
        others = [one for some in forms.there(frontier.SIZE, nfe).values() for one in some if one != arm]
        less = samplers.less_mixed(tried, f"{role}/{nfe}", arm, others)
        if role == "base" and nfe == 16:  # the model and the calls of the promise
            assert less.mean <= 0.03
        assert less.mean <= 0.06


def test_what_is_said_of_the_others_holds(field):
    """The sentences of docs/samplers.md on first arms, by the rule of the lab."""
    outcomes = {
        family: {at: below(at, samplers.less(field, at, arms[0])) for at in samplers.places(frontier.SIZE)}
        for family, arms in samplers.RIVALS.items()
    }

    def said(family: str, *calls: int) -> list[str]:
        return [one.outcome for at, one in outcomes[family].items() if not calls or int(at.partition("/")[2]) in calls]

    for family in ("Psi", "DDIM"):
        assert max(abs(one.estimate.mean) for one in outcomes[family].values()) <= 0.04
    assert set(said("Gibbs")) == {"fails"}
    assert set(said("informed Gibbs", 8, 16)) == {"fails"}
    late = [one.estimate.mean for at, one in outcomes["informed Gibbs"].items() if int(at.partition("/")[2]) >= 32]
    assert -0.13 <= min(late) <= max(late) <= -0.02
    for family in ("temperature", "top-k", "GIDD correction"):
        assert set(said(family, 16, 32, 64)) == {"fails"}
    assert "holds" not in said("GIDD adaptive")
    assert [outcomes["min-p"][f"base/{nfe}"].outcome for nfe in (8, 16)] == ["holds", "holds"]
    assert set(said("trapezoidal")) == set(said("entropy bound")) == {"open"}
    for at in samplers.places(frontier.SIZE):
        leap, native = f"{at}/trapezoidal final_step=sample", f"{at}/native final_step=sample"
        assert field(leap, "entropy").mean > field(native, "entropy").mean
        assert field(leap, "nll").mean > field(native, "nll").mean
        assert field(f"{at}/entropy-bound", "entropy").mean < 0.5


def test_the_pages_count_the_arms():
    arms = {arm for some in samplers.FAMILIES.values() for arm in some}
    assert f"all {len(arms)} arms" in (ROOT / "README.md").read_text()
    assert f"{len(arms)} arms of {len(samplers.FAMILIES)} families" in (ROOT / "docs/samplers.md").read_text()


def test_crs_as_in_the_paper_wins_where_readme_says(field):
    """At few calls on mini, against the best top-p curve; Mend everywhere."""
    found = {at: below(at, samplers.less(field, at, "crs")).outcome for at in samplers.places(frontier.SIZE)}
    assert {at for at, outcome in found.items() if outcome == "holds"} == {"base/8", "base/16"}
    assert {below(at, samplers.less(field, at, "mend")).outcome for at in found} == {"holds"}
