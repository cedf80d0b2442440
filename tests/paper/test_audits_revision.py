"""The audit of revised tokens, against loops over its own calls and the denoiser called directly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from audit_cases import run_audit
from limpet.evaluation.statistics import mean_se
from limpet.experiments import Results, report
from limpet.generation import rollout
from limpet.models.exact import Markov
from limpet.models.loading import load
from limpet.paper import studies
from limpet.paper.studies import revision
from limpet.paper.studies.audits import estimate_of, with_error
from limpet.paper.studies.revision import (
    SAMPLED,
    SAMPLERS,
    RevisionSettings,
    TokenRecord,
    agreement,
    compare_with_truth,
    record_all,
    revision_inputs,
)
from limpet.paper.studies.trajectories import clean_texts, forward_states, predictions
from limpet.samplers import Mend

WORDS = load("exact:words")
STORING = Mend(nfe=10, revise=0)


@pytest.fixture(scope="module")
def forward():
    """Texts, their states at every call, and the committed tokens of each sampler along them."""
    clean = WORDS.draw(6, 3)
    states = forward_states(clean, STORING.times[::-1], WORDS, 3)[::-1]
    return clean, states, record_all(STORING, WORDS, revision_inputs(WORDS, clean, 3), states)


def test_calls_see_the_state_with_committed_tokens_written_in(forward):
    """And every sampler does with the argmax there what it is named for."""
    _, states, samplers = forward
    position = torch.arange(WORDS.length)
    for name, records in samplers.items():
        for call, (one, state) in enumerate(zip(records, states, strict=True)):
            top, _ = predictions(WORDS, torch.where(one.visible, one.before, state), one.t)
            assert torch.equal(one.top, top)
            changed, last = one.visible & (one.after != one.before), call == STORING.nfe - 1
            contradicted = one.visible & (top != one.before)
            assert torch.equal(one.after[changed | one.chosen], top[changed | one.chosen])
            if name == "stored":
                assert not changed.any()
            elif name == "revised":
                assert changed.sum(-1).max() <= 5
                assert (changed.any(-1) == contradicted.any(-1)).all()
            else:
                due = (position + call) % 2 == 0 if name == "refreshed-interleaved" else position >= 0
                assert torch.equal(changed, contradicted & due & (not last))


def test_all_samplers_commit_where_the_first_does(forward):
    *_, samplers = forward
    for records in samplers.values():
        for one, first in zip(records, samplers["stored"], strict=True):
            assert torch.equal(one.visible, first.visible)
            assert torch.equal(one.chosen, first.chosen)


@pytest.mark.parametrize("name", SAMPLERS)
def test_shares_by_loops(forward, name):
    clean, _, samplers = forward
    records = samplers[name]
    found = {
        (quantity, *at.values()): (hits, of) for quantity, at, hits, of in compare_with_truth(records, clean, (0.3,))
    }
    counts = dict.fromkeys(found, (0, 0))

    def count(quantity, hit, *at):
        hits, of = counts[quantity, *at]
        counts[quantity, *at] = (hits + hit, of + 1)

    late = next(call for call, one in enumerate(records) if one.t <= 0.3)
    for sample in range(len(clean)):
        for place in range(WORDS.length):
            truth, stored = int(clean[sample, place]), None
            for call, one in enumerate(records):
                top, before, after = (int(part[sample, place]) for part in (one.top, one.before, one.after))
                if one.chosen[sample, place]:
                    stored = after
                if not one.visible[sample, place]:
                    continue
                count("contradicted", top != before)
                if top != before:
                    count("wrong where contradicted", before != truth)
                    count("right instead", top == truth)
                if before != truth:
                    count("corrected in a call", after == truth)
                    count("still wrong in a call", after not in (truth, before))
                else:
                    count("spoiled in a call", after != truth)
                if call == late:
                    count("wrong among the visible", before != truth, 0.3)
            if stored is not None:
                count("wrong when stored", stored != truth)
                count("wrong at the end", after != truth)
                if stored != truth:
                    count("corrected overall", after == truth)
                    count("still wrong overall", after not in (truth, stored))
                else:
                    count("spoiled overall", after != truth)
    assert found == counts
    assert (found["corrected overall",][0] == 0) == (name == "stored")


def test_agreement_by_hand():
    """Two tokens that change places in every call, and a third that does so once and then stays."""
    yes, no = torch.tensor([[True] * 3]), torch.tensor([[False] * 3])

    def call(top, before, after):
        return TokenRecord(0.5, yes, no, *(torch.tensor([tokens]) for tokens in (top, before, after)))

    records = [
        call([1, 0, 5], [0, 1, 4], [1, 0, 5]),
        call([0, 1, 5], [1, 0, 5], [0, 1, 5]),
        call([1, 0, 5], [0, 1, 5], [0, 1, 5]),
    ]
    assert list(agreement(records)) == [(SAMPLED[0], {}, 7, 9), (SAMPLED[1], {}, 4, 5), (SAMPLED[2], {}, 2, 3)]


def test_sampled_trajectories_are_the_samplers_own():
    inputs = revision_inputs(WORDS, WORDS.draw(3, 2), 2)
    records = record_all(STORING, WORDS, inputs)["stored"]
    for one, step in zip(records, rollout(WORDS, STORING, inputs), strict=True):
        assert torch.equal(one.visible, step.visible)
        assert torch.equal(one.after, step.state.memory.committed_values)


def test_two_positions_that_must_agree_change_places_when_refreshed():
    """The smallest example of docs/theory.md, as an audit. All at once, the next call contradicts every change. Mend
    changes one of the two; it may revise a token beside one that the same call commits, and then once more."""
    pairs = Markov(torch.ones(2), torch.tensor([[0.99, 0.01], [0.01, 0.99]]), 2, name="pairs")
    result = run_audit(revision, [pairs], RevisionSettings(n=400, nfe=8, spacing=0, count=2), (1, 2))
    again = {name: result.find(SAMPLED[1], values=name)[0].estimate.mean for name in ("refreshed", "revised")}
    assert again == {"refreshed": 100, "revised": 50}


def test_the_truth_is_held_out_text_for_a_checkpoint():
    """Cut between two end tokens, which are fixed, and so never committed."""
    model = load("mini")
    clean = clean_texts(model, RevisionSettings(n=2, length=40), 0, (1,))
    fixed = revision_inputs(model, clean, 1).fixed
    assert (fixed[:, 1:-1] < 0).all()
    assert torch.equal(fixed[:, [0, -1]], clean[:, [0, -1]])


# What the page on audits says of the committed reports

DOCS = Path(__file__).parents[2] / "docs"


def page() -> str:
    """The text of the page, wherever its lines break."""
    return " ".join((DOCS / "audits.md").read_text().split())


def committed(folder: str) -> Results:
    numbers = report.load_numbers(DOCS / "reports" / folder)
    return Results.from_dict(studies.study("revision", revision.PRESETS[numbers["preset"]]), numbers)


def test_the_page_holds_what_64_calls_show():
    results = committed("revision/exact-64")
    assert results.provenance["settings"][0]["nfe"] == 64
    for model in ("exact:words", "exact:chain"):
        for name, quantity in (("stored", SAMPLED[2]), ("revised", SAMPLED[1]), ("refreshed", SAMPLED[1])):
            assert f"{with_error(estimate_of(results, quantity, model, values=name))}%" in page()
    assert f"{with_error(estimate_of(results, SAMPLED[2], 'exact:words', values='revised'))}% and none" in page()
    assert estimate_of(results, SAMPLED[2], "exact:chain", values="revised").mean == 0
    wrong = {name: estimate_of(results, "wrong at the end", "exact:words", values=name) for name in SAMPLERS}
    assert f"{with_error(wrong['stored'])}% of stored tokens are wrong" in page()
    assert f"{with_error(wrong['revised'])}% or more" in page()
    assert min(wrong[name].mean for name in list(SAMPLERS)[1:]) == pytest.approx(wrong["revised"].mean, abs=0.05)


@pytest.mark.parametrize(
    ("folder", "model", "sentence"),
    [
        ("mini/revision-mini", "mini", "on `mini` {} points fewer"),
        ("mini/revision-mini", "mini-distilled", "on `mini-distilled` {} points more"),
        ("revision/exact-16", "exact:words", "On exact:words they are {} points more"),
        ("revision/exact-16", "exact:chain", "on exact:chain are {} points fewer"),
    ],
)
def test_the_page_holds_how_far_mend_is_from_stored(folder, model, sentence):
    """Paired by seed."""
    results = committed(folder)
    wrong = [estimate_of(results, "wrong at the end", model, values=name).values for name in ("revised", "stored")]
    difference = mean_se(wrong[0] - wrong[1] if "more" in sentence else wrong[1] - wrong[0])
    assert difference.mean > 0
    assert sentence.format(with_error(difference)) in page()
