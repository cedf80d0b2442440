"""The study `truth`: its cells, how the baseline is chosen and compared with, and the bound on what can be new."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.evaluation.statistics import Estimate
from limpet.experiments import Results, Store, collect, local, report, run
from limpet.experiments.model_cache import ModelCache
from limpet.experiments.report import content_of
from limpet.models.exact_sources import source
from limpet.paper.studies import PRESETS, preset, study, truth
from limpet.paper.studies.presets import WorldSize
from limpet.samplers.builtin import BUILTIN

SIZE = preset("mini-gpu")
ALL = [text for texts in truth.BASELINES.values() for text in texts]


def invented(values, size=SIZE, world="boards", nfe=16):
    """Results at one place; values: sampler -> the quality of each seed."""
    name = truth.WORLDS[world].quality
    cells = {f"{world}/{nfe}/{text}": {name: Estimate(np.array(own, dtype=float))} for text, own in values.items()}
    return Results(study("truth", size), {"judges": []}, cells)


# Cells


@pytest.mark.parametrize("size", [preset(name) for name in PRESETS], ids=lambda size: size.name)
def test_every_world_has_every_baseline_and_what_is_compared(size):
    found = study("truth", size)
    assert not found.judges
    names = {cell.name for cell in found.sample_cells}
    for world in size.truth:
        for nfe in size.truth[world].nfes:
            for text in (*ALL, *(text for (text,) in truth.COMPARED.values())):
                assert f"{world}/{nfe}/{text}" in names
    for cell in found.sample_cells:
        assert cell.sampler.nfe == int(cell.name.split("/")[1])


def test_the_full_size_is_that_of_the_page():
    size = preset("mini-gpu")
    assert {world: one.n for world, one in size.truth.items()} == {
        "molecules": 1024, "boards": 256, "puzzles": 256, "boards-6x6": 256, "puzzles-6x6": 256, "grammar": 1024
    }  # fmt: skip
    assert {(one.nfes, one.rival_nfes) for one in size.truth.values()} == {((4, 8, 16, 32, 64), (4, 8, 16, 32, 64))}
    assert len(size.seeds) == 4


def test_every_sampler_of_the_registry_is_compared():
    """`guided` needs something that guides, which these worlds do not have."""
    names = {text.split()[0] for texts in truth.FAMILIES.values() for text in texts}
    assert names == set(BUILTIN) - {"guided"}


def test_puzzles_have_their_clues_as_prompts():
    found = study("truth", SIZE)
    assert {cell.prompts.texts for cell in found.sample_cells if cell.prompts} == {
        f"{truth.WORLDS[world].model} {clues}"
        for world in ("puzzles", "puzzles-6x6")
        for clues in truth.clue_counts(SIZE, world)
    }


# The best baseline


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 8), min_size=4, max_size=4), min_size=len(ALL), max_size=len(ALL)))
def test_no_seed_reports_on_a_baseline_that_it_chose(rows):
    values = dict(zip(ALL, rows, strict=True))
    found = truth.best_baseline(invented(values), "boards/16")
    for seed in range(4):
        others = {text: sum(own[:seed] + own[seed + 1 :]) for text, own in values.items()}
        assert found.texts[seed] == max(others, key=others.get)  # the first of equals
    changed = {text: [*own[:3], 100 * i] for i, (text, own) in enumerate(values.items())}
    assert truth.best_baseline(invented(changed), "boards/16").texts[3] == found.texts[3]
    assert found.text == Counter(found.texts).most_common(1)[0][0]


@pytest.mark.parametrize(("gain", "verdict"), [(0.1, "better"), (-0.1, "worse"), (0.0, "open")])
def test_verdicts_are_about_the_difference_from_the_best_baseline(gain, verdict):
    noise = np.array([0.01, -0.01, 0.02, -0.02])
    values = {text: np.full(4, 0.2) for text in ALL} | {ALL[3]: 0.5 + noise}
    values |= {text: 0.5 + gain + 2 * noise[::-1] for (text,) in truth.COMPARED.values()}
    results = invented(values)
    found = truth.against_baseline(results, "boards/16", "mend")
    assert truth.best_baseline(results, "boards/16").texts == (ALL[3],) * 4
    assert found.estimate.mean == pytest.approx(gain)
    rows = list(truth.verdict_rows(results, SIZE, "boards", [16]))
    assert {row[2].text.rpartition(", ")[2] for row in rows if row[0].text in truth.COMPARED} == {verdict}


def test_of_a_distance_less_is_better():
    cells = {f"molecules/16/{text}": {"valid": 0.9, "atoms distance": 0.3, "rings distance": 0.1} for text in ALL}
    cells["molecules/16/mend"] = {"valid": 0.95, "atoms distance": 0.1, "rings distance": 0.1}
    estimates = {
        cell: {name: Estimate(np.full(4, value)) for name, value in own.items()} for cell, own in cells.items()
    }
    results = Results(study("truth", SIZE), {}, estimates)
    assert truth.measure(results, "molecules/16/mend", truth.DISTANCE).mean == pytest.approx(0.1)
    found = truth.against_native(results, "molecules/16", "mend", truth.DISTANCE)
    assert (found.estimate.mean, found.outcome) == (pytest.approx(0.1), "holds")


def test_the_calls_that_a_quality_needs():
    shares = {4: 0.1, 8: 0.5, 16: 0.7, 32: 0.6, 64: 0.9}
    cells = {f"boards/{nfe}/mend": {"valid": Estimate(np.full(4, share))} for nfe, share in shares.items()}
    for native, expected in ((0.7, 16), (0.65, 16), (0.8, 64), (0.95, None)):
        cells["boards/64/native"] = {"valid": Estimate(np.full(4, native))}
        assert truth.calls_needed(Results(study("truth", SIZE), {}, cells), SIZE, "boards", "mend") == expected


# What can be new


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-6, 1), min_size=2, max_size=20), st.integers(1, 20))
def test_known_mass_is_never_more_than_the_mass(weights, count):
    probs = np.array(weights) / sum(weights)
    known = probs[: min(count, len(probs))]
    assert truth.known_mass(len(known), float(-np.log(known).mean())) <= known.sum() * (1 + 1e-12)


def test_known_mass_is_exact_for_equal_probabilities():
    """All balanced strings are equally likely, so a set of some has exactly that mass."""
    model = source("exact:grammar")
    tokens = model.draw(50, 1).unique(dim=0)
    nats = -model.log_prob(tokens).mean().item()
    assert truth.known_mass(len(tokens), nats) == pytest.approx(
        len(tokens) * math.exp(float(model.log_prob(tokens)[0]))
    )


# The report


def test_a_run_is_reported_from_its_numbers(tmp_path):
    size = replace(preset("smoke"), truth={"grammar": WorldSize(2, (4,))})
    one, models = study("truth", size), ModelCache("cpu")
    store = Store(tmp_path / "store")
    assert not run(one, store, local("cpu", models), models).failed
    results = collect(one, store)
    content = content_of(results)
    names = {table.name.partition("-")[0] for table in content.tables}
    assert names == {"truth", "costs", "samplers", "controls"}
    page = report.write_report(results, tmp_path / "report")
    again = report.read_report(one, page.parent)
    assert report.markdown(again, content_of(again)) == (page.parent / "report.md").read_text()
    (scatter,) = content.scatters
    assert len(scatter.panels) == 1
