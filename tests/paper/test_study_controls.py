"""Controls in a study: measured as its samples are, rows of its report, and absent from reports that measured none."""

from __future__ import annotations

import numpy as np
import pytest

from limpet.evaluation.controls import COPIES, NGRAMS, SHIFTS
from limpet.experiments import Cell, ModelCache, Probe, ReportContent, Store, Study, collect, local, run
from limpet.models.exact_sources import source
from limpet.paper.studies import TEXTS, preset, study
from limpet.paper.studies.controls import control_table, controls
from limpet.paper.studies.published import PaperResults
from limpet.samplers import Native

SIZE = preset("exact")


def finished(folder, *cells: Cell | Probe) -> PaperResults:
    """The results of a study of two seeds."""
    one = Study(
        "small", "", (Cell("native", "exact:words", Native(nfe=2), 2), *cells), (1, 2), lambda _: ReportContent()
    )
    store, models = Store(folder), ModelCache("cpu")
    assert not run(one, store, local("cpu", models), models).failed
    return PaperResults(**vars(collect(one, store)), preset=SIZE, study_texts=TEXTS["samplers"])


@pytest.mark.parametrize(("name", "models"), [("samplers", {"exact:words"}), ("truth", {"exact:grammar"})])
def test_quality_studies_have_controls(name, models):
    found = [cell for cell in study(name, SIZE).cells if isinstance(cell, Probe)]
    assert {model for cell in found for model in cell.models} == models


def test_a_report_has_a_row_for_each_control(tmp_path):
    results = finished(tmp_path, controls("exact:words", 4), controls("exact:grammar", 4, metrics=("entropy",)))
    (table,) = control_table(results)
    rows = {(row[0].text, row[1].text): row[2:] for row in table.groups[0]}
    models = ("exact:words", "exact:grammar")
    assert [*rows] == [(source(model).name, name) for model in models for name in (NGRAMS, SHIFTS, COPIES)]
    (copies,) = results.find("nll", model=source("exact:words").name, control=COPIES)
    (other,) = results.find("nll", model=source("exact:words").name, control=NGRAMS)
    assert len(copies.estimate.values) == 2
    assert (copies.estimate.values < other.estimate.values).all()
    (right,) = results.find("grammatical", control=COPIES)
    assert np.array_equal(right.estimate.values, [1, 1])


def test_a_study_without_controls_has_no_such_table(tmp_path):
    assert [*control_table(finished(tmp_path))] == []
