"""docs/frontier.md and the models' cards say what the committed studies found."""

from __future__ import annotations

import json

import pytest

import frontier
import limpet
from examples import ROOT
from limpet.experiments import Results, below
from limpet.paper.studies import forms, interleave, pareto, samplers
from limpet.samplers import parse

PAGE = frontier.PAGE.read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())


@pytest.fixture(scope="module")
def field() -> Results:
    return frontier.committed("samplers")


def test_the_generated_blocks_are_those_of_the_committed_reports():
    blocks = frontier.blocks()
    assert len(blocks) == 5
    for (page, name), text in blocks.items():
        assert f"<!-- {name} -->\n{text}<!-- end -->" in page.read_text(encoding="utf-8"), (page, name)


def test_the_rows_of_the_head_that_interleaved_steps_need():
    words = limpet.load("exact:words")
    native = limpet.Native(nfe=16)
    interleaved = native.replace(interleave=True, grid="quadratic")
    rows = [limpet.sample(words, sampler, n=8).head_rows for sampler in (interleaved, native)]
    assert f"needs {rows[0]:.0%} of the head's rows where a native one needs {rows[1]:.0%}" in TEXT


def test_interleaved_steps_beside_the_released_sampler():
    results = frontier.committed("interleave")
    texts = interleave.SAMPLERS[interleave.FAMILY]
    committing, plain = texts[0], texts[-1]

    def delta(role: str, nfe: int):
        return pareto.delta(results, frontier.SIZE, role, interleave.FINAL_STEP, nfe, texts)

    outcomes = {("base", 16): "holds", ("base", 12): "open", ("distilled", 16): "open"}
    assert {key: below("", delta(*key)).outcome for key in outcomes} == outcomes
    cells = (f"16/{committing}", f"16/{plain}", pareto.released_cell(frontier.SIZE, interleave.FINAL_STEP))
    kept, none, released = (
        tuple(f"{results(f'base/{cell}', measure).mean:.3f}" for measure in ("nll", "entropy")) for cell in cells
    )
    assert f"`{plain}`, which commits nothing, has with 16 calls an NLL of {none[0]} at an entropy of {none[1]}" in TEXT
    assert f"where the released sampler has {released[0]} at {released[1]} with 64" in TEXT
    assert f"with committed tokens it is {kept[0]} at {kept[1]}" in TEXT


def test_mend_is_below_the_curve_everywhere_interleaved_or_not(field):
    results = frontier.committed("interleave")
    deltas = [
        interleave.mend_against_top_p(results, frontier.SIZE, role, text)
        for role in frontier.SIZE.captions
        for text in interleave.SAMPLERS["mend"]
    ]
    deltas += [samplers.delta(field, at, "mend") for at in samplers.places(frontier.SIZE)]
    assert {below("", delta).outcome for delta in deltas} == {"holds"}
    assert "`mend` is below the best top-p curve at equal entropy on both models" in TEXT


def test_crs_as_in_the_paper_wins_where_the_pages_say(field):
    outcomes = {at: below(at, samplers.delta(field, at, "crs")).outcome for at in samplers.places(frontier.SIZE)}
    assert {at for at, outcome in outcomes.items() if outcome == "holds"} == {"base/8", "base/16"}
    assert "beats the best top-p curve at 8 and 16 calls on `mini`, and nowhere else" in TEXT
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "CRS as in the paper beats the best top-p baseline at 8 and 16 calls on `mini`, and nowhere else" in readme


def test_the_recommended_parameters_are_the_tuners():
    found = json.loads(frontier.TUNED.read_text())
    best = frontier.tuned()
    assert set(best) == set(frontier.SIZE.nfes)
    for nfe, text in best.items():
        assert f"`{text}`" in PAGE
        config = found[str(nfe)]["config"]
        assert (config["model"], config["nfe"], config["n"]) == ("mini", nfe, 64)
    assert parse(found["16"]["winner"])[1].nfe == 16


def test_tuning_on_two_cores_chooses_the_same_in_the_time_that_its_page_says():
    cold = json.loads((ROOT / "benchmarks/results/tuning.json").read_text())
    assert (cold["command"], cold["cores"]) == ("limpet tune mini --nfe 16", 2)
    page = " ".join((ROOT / "docs/tune.md").read_text().split())
    assert f"took {cold['minutes']:.0f} minutes on two cores" in page
    assert cold["winner"] == json.loads(frontier.TUNED.read_text())["16"]["winner"]


@pytest.mark.parametrize("role", ["base", "distilled"])
def test_the_tuners_choice_is_near_the_best_form(role):
    """Its NLL against what mixtures of the other forms reach at its entropy, on seeds that neither choice used."""
    tried = frontier.committed("forms")
    for nfe, text in frontier.tuned().items():
        families = forms.forms_at(frontier.SIZE, nfe)
        others = [one for family in families.values() for one in family if one != text]
        delta = samplers.delta_to_mixtures(tried, f"{role}/{nfe}", text, others).mean
        assert delta <= (0.03 if (role, nfe) == ("base", 16) else 0.06)


def test_what_the_page_says_of_the_other_samplers(field):
    """Of the first sampler of each family, by the rule of the studies."""
    places = samplers.places(frontier.SIZE)
    found = {
        family: {at: below(at, samplers.delta(field, at, texts[0])) for at in places}
        for family, texts in samplers.RIVALS.items()
    }

    def outcomes(family: str, *calls: int) -> set[str]:
        return {one.outcome for at, one in found[family].items() if not calls or int(at.partition("/")[2]) in calls}

    for family in ("Psi", "DDIM"):
        assert max(abs(one.estimate.mean) for one in found[family].values()) <= 0.04
    assert outcomes("Gibbs") == {"fails"}
    assert outcomes("informed Gibbs", 8, 16) == {"fails"}
    late = [one.estimate.mean for at, one in found["informed Gibbs"].items() if int(at.partition("/")[2]) >= 32]
    assert -0.13 <= min(late) <= max(late) <= -0.02
    for family in ("temperature", "top-k", "GIDD correction"):
        assert outcomes(family, 16, 32, 64) == {"fails"}
    assert "holds" not in outcomes("GIDD adaptive")
    assert [found["min-p"][f"base/{nfe}"].outcome for nfe in (8, 16)] == ["holds", "holds"]
    assert outcomes("trapezoidal") == outcomes("entropy bound") == {"open"}
    for at in places:
        leap, native = f"{at}/trapezoidal", f"{at}/native"
        assert field(leap, "entropy").mean > field(native, "entropy").mean
        assert field(leap, "nll").mean > field(native, "nll").mean
        assert field(f"{at}/entropy-bound", "entropy").mean < 0.5


def test_the_page_counts_the_samplers():
    texts = {text for family in samplers.FAMILIES.values() for text in family}
    assert f"{len(texts)} samplers of {len(samplers.FAMILIES)} families" in TEXT
