"""The audit of labels that change, against loops over its own calls and the denoiser called directly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from audit_cases import audited, smoke
from limpet.evaluation.statistics import mean_se
from limpet.experiments import Results, report
from limpet.models.exact import Markov, Mixture, forward_path
from limpet.models.loading import load
from limpet.paper import studies
from limpet.paper.studies import mending
from limpet.paper.studies.audits import one, with_error
from limpet.paper.studies.mending import ARMS, SAMPLED, Settings, Step, against_the_truth, agreement, followed, opened
from limpet.paper.studies.trajectories import clean_texts, forward_states, tops
from limpet.samplers import Mend

WORDS = load("exact:words")
STILL = Mend(nfe=10, mend=0)
LABELS = ("wrong when stored", "wrong at the end")


@pytest.fixture(scope="module")
def forward():
    """Texts, their states at every call, and what the labels of each arm do along them."""
    clean = WORDS.draw(6, 3)
    path = opened(WORDS, clean, 3)
    states = forward_states(clean, STILL.times[::-1], WORDS, 3)[::-1]
    return clean, states, followed(STILL, path, states)


def test_states_are_the_texts_own_forward_states():
    clean = WORDS.draw(4, 1)
    signals = [float(WORDS.schedule.signal(t)) for t in STILL.times[::-1]]
    wanted = forward_path(clean, signals, WORDS.vocab_size, 9)[::-1]
    found = forward_states(clean, STILL.times[::-1], WORDS, 9)[::-1]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    agree = [float((state == clean).double().mean()) for state in found]
    assert agree[0] < 0.1
    assert agree[-1] > 0.99


def test_calls_see_the_state_with_labels_over_it(forward):
    """And every arm does with the argmax there what it is named for."""
    _, states, arms = forward
    turn = torch.arange(WORDS.length)
    for arm, along in arms.items():
        for call, (step, state) in enumerate(zip(along, states, strict=True)):
            top, _ = tops(WORDS, torch.where(step.visible, step.was, state), step.t)
            assert torch.equal(step.top, top)
            changed, last = step.visible & (step.now != step.was), call == STILL.nfe - 1
            against = step.visible & (top != step.was)
            assert torch.equal(step.now[changed | step.chosen], top[changed | step.chosen])
            if arm == "stored":
                assert not changed.any()
            elif arm == "mended":
                assert changed.sum(-1).max() <= 5
                assert (changed.any(-1) == against.any(-1)).all()
            else:
                due = (turn + call) % 2 == 0 if arm == "refreshed-in-turn" else turn >= 0
                assert torch.equal(changed, against & due & (not last))


def test_all_arms_have_labels_where_the_first_has_them(forward):
    *_, arms = forward
    for along in arms.values():
        for step, first in zip(along, arms["stored"], strict=True):
            assert torch.equal(step.visible, first.visible)
            assert torch.equal(step.chosen, first.chosen)


@pytest.mark.parametrize("arm", ARMS)
def test_shares_by_loops(forward, arm):
    clean, _, arms = forward
    along = arms[arm]
    found = {(quantity, *at.values()): (hits, of) for quantity, at, hits, of in against_the_truth(along, clean, (0.3,))}
    counts = dict.fromkeys(found, (0, 0))

    def count(quantity, hit, *at):
        hits, of = counts[quantity, *at]
        counts[quantity, *at] = (hits + hit, of + 1)

    late = next(call for call, step in enumerate(along) if step.t <= 0.3)
    for sample in range(len(clean)):
        for place in range(WORDS.length):
            truth, stored = int(clean[sample, place]), None
            for call, step in enumerate(along):
                top, was, now = (int(part[sample, place]) for part in (step.top, step.was, step.now))
                if step.chosen[sample, place]:
                    stored = now
                if not step.visible[sample, place]:
                    continue
                count("contradicted", top != was)
                if top != was:
                    count("wrong where contradicted", was != truth)
                    count("right instead", top == truth)
                if was != truth:
                    count("mended in a call", now == truth)
                    count("another wrong one in a call", now not in (truth, was))
                else:
                    count("spoilt in a call", now != truth)
                if call == late:
                    count("wrong among the visible", was != truth, 0.3)
            if stored is not None:
                count("wrong when stored", stored != truth)
                count("wrong at the end", now != truth)
                if stored != truth:
                    count("mended in all", now == truth)
                    count("another wrong one in all", now not in (truth, stored))
                else:
                    count("spoilt in all", now != truth)
    assert found == counts
    assert (found["mended in all",][0] == 0) == (arm == "stored")


def test_agreement_by_hand():
    """Two labels that change places in every call, and a third that does so once and is let be."""
    yes, no = torch.tensor([[True] * 3]), torch.tensor([[False] * 3])

    def step(top, was, now):
        return Step(0.5, yes, no, *(torch.tensor([tokens]) for tokens in (top, was, now)))

    along = [step([1, 0, 5], [0, 1, 4], [1, 0, 5]), step([0, 1, 5], [1, 0, 5], [0, 1, 5]),
             step([1, 0, 5], [0, 1, 5], [0, 1, 5])]  # fmt: skip
    assert list(agreement(along)) == [(SAMPLED[0], {}, 7, 9), (SAMPLED[1], {}, 4, 5), (SAMPLED[2], {}, 2, 3)]


def test_sampled_paths_are_the_samplers_own():
    path = opened(WORDS, WORDS.draw(3, 2), 2)
    along = followed(STILL, path)["stored"]
    state = STILL.begin(path)
    for step in along:
        assert torch.equal(step.was, state.memory.labels)
        state, info = STILL.step(path, state)
        assert torch.equal(step.visible, info.marks["visible"])


def test_an_exact_source_of_sure_words_has_nothing_to_mend():
    """One word alone: every label is right when it is stored, and stays."""
    one = Mixture(torch.ones(1), torch.eye(4, dtype=torch.float64)[None, [0, 1, 2, 3, 2, 1]], name="one word")
    result = audited(mending, [one], Settings(paths=3, nfe=8), (1, 2))
    for quantity in (*LABELS, "contradicted", "spoilt in all", SAMPLED[2]):
        assert {row.estimate.mean for row in result.of(quantity)} == {0.0}


def test_two_sites_that_must_agree_change_places_when_refreshed():
    """The smallest example of docs/theory.md, as an audit. All at once, the next call contradicts every change. Mend
    changes one of the two; but a label may be mended beside one that the same call stores, and then once more."""
    pairs = Markov(torch.ones(2), torch.tensor([[0.99, 0.01], [0.01, 0.99]]), 2, name="pairs")
    result = audited(mending, [pairs], Settings(paths=400, nfe=8, spacing=0, count=2), (1, 2))
    again = {arm: result.of(SAMPLED[1], values=arm)[0].estimate.mean for arm in ("refreshed", "mended")}
    assert again == {"refreshed": 100, "mended": 50}


def test_the_truth_is_held_out_text_for_a_checkpoint():
    """Cut between two end tokens, which are given, and so never labels."""
    model, settings = load("mini"), Settings(paths=2, length=40)
    clean = clean_texts(model, settings, 0, (1,))
    path = opened(model, clean, 1)
    assert path.free[:, 1:-1].all()
    assert torch.equal(path.fixed[:, [0, -1]], clean[:, [0, -1]])


def test_a_figure_shows_every_model():
    result = smoke(mending, WORDS)
    (figure,) = result.study.build_report(result).figures
    assert [panel.title for panel in figure.panels] == ["exact:words"]
    assert [line.name for line in figure.panels[0].series] == list(ARMS)


FORWARD = (
    *LABELS, "mended in a call", "another wrong one in a call", "spoilt in a call",
    "mended in all", "another wrong one in all", "spoilt in all",
)  # fmt: skip
DOCS = Path(__file__).parents[2] / "docs"


def page() -> str:
    """What the page on audits says, wherever its lines break."""
    return " ".join((DOCS / "audits.md").read_text().split())


def committed(folder: str) -> Results:
    document = report.stored(DOCS / "reports" / folder)
    return Results.from_dict(studies.study("mending", mending.PRESETS[document["preset"]]), document)


@pytest.mark.parametrize(
    ("folder", "models"),
    [("mini/mending-mini", ("mini", "mini-distilled")), ("mending/exact-16", ("exact:words", "exact:chain"))],
)
def test_the_docs_hold_what_the_reports_do(folder, models):
    results = committed(folder)
    assert f"(reports/{folder}/report.md)" in page()
    for model in models:
        for i, arm in enumerate(ARMS):
            for quantities in (FORWARD, SAMPLED):
                found = [with_error(one(results, quantity, model, values=arm)) for quantity in quantities]
                assert " | ".join([f"| {model}" if i == 0 else "|", arm, *found]) + " |" in page()


def test_the_docs_hold_what_64_calls_do():
    results = committed("mending/exact-64")
    assert results.provenance["settings"][0]["nfe"] == 64
    for model in ("exact:words", "exact:chain"):
        for arm, quantity in (("stored", SAMPLED[2]), ("mended", SAMPLED[1]), ("refreshed", SAMPLED[1])):
            assert f"{with_error(one(results, quantity, model, values=arm))}%" in page()
    assert f"{with_error(one(results, SAMPLED[2], 'exact:words', values='mended'))}% and none" in page()
    assert one(results, SAMPLED[2], "exact:chain", values="mended").mean == 0
    wrong = {arm: one(results, "wrong at the end", "exact:words", values=arm) for arm in ARMS}
    assert f"{with_error(wrong['stored'])}% of stored labels are wrong" in page()
    assert f"{with_error(wrong['mended'])}% or more" in page()
    assert min(wrong[arm].mean for arm in list(ARMS)[1:]) == pytest.approx(wrong["mended"].mean, abs=0.05)


@pytest.mark.parametrize(
    ("folder", "model", "said"),
    [
        ("mini/mending-mini", "mini", "On `mini` they are fewer by {}"),
        ("mini/mending-mini", "mini-distilled", "on `mini-distilled` more by {}"),
        ("mending/exact-16", "exact:words", "On exact:words they are more by {}"),
        ("mending/exact-16", "exact:chain", "fewer than stored ones by {} points on exact:chain"),
    ],
)
def test_the_docs_hold_how_far_mend_is_from_stored(folder, model, said):
    """Paired by shard."""
    results = committed(folder)
    mended, stored = (one(results, "wrong at the end", model, values=arm).values for arm in ("mended", "stored"))
    apart = mean_se(mended - stored if "more" in said else stored - mended)
    assert apart.mean > 0
    assert said.format(with_error(apart)) in page()
