"""Forked paths: every arm of a group comes out, bit for bit, as if it had walked alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from lab_cases import BASE, nothing
from limpet.denoisers.sources import source
from limpet.lab import Bench, Cell, Store, Study, run
from limpet.lab.places.local import local
from limpet.lab.study import Prompts
from limpet.policy import Policy
from limpet.sampler import NEVER
from limpet.samples import Counted, Selection, sample
from limpet.studies import preset, study

WORDS = source("exact:words")


class Watched(Bench):
    """A bench whose only model counts the calls of its body."""

    def __init__(self):
        super().__init__()
        self.counted = Counted(WORDS)

    def model(self, name):
        class Model(type(WORDS)):
            def body(_, tokens, t):
                return self.counted.body(tokens, t)

        made = Model.__new__(Model)
        made.__dict__.update(WORDS.__dict__)
        return made


def run_all(cells, path, seeds=(5,)):
    bench = Watched()
    made = Study("paths", "paths", tuple(cells), seeds, nothing)
    store = Store(path)
    summary = run(made, store, local(bench=bench), bench)
    assert not summary.failed
    plan = store.read_plan("paths")
    return {cell["name"]: [store.read(key) for key in cell["keys"]] for cell in plan["cells"]}, bench.counted.calls


def alone(cell, seed, recorded=None, prefix=None):
    return sample(WORDS, cell.policy, cell.n, seed, cell.length, prefix, replay=recorded)


def assert_same(found, expected):
    assert torch.equal(found.tensors["tokens"].long(), expected.tokens)
    assert found.rows["columns"]["selected"] == expected.selected.tolist()
    assert found.rows["nfe"] == expected.nfe == expected.policy.nfe
    if expected.selected.any():
        at = expected.selection.selected_at
        assert torch.equal(found.tensors["selected_at"].long(), torch.where(at == NEVER, -1, at))
        assert torch.equal(found.tensors["labels"].long(), expected.selection.labels)


POLICIES = st.builds(
    Policy,
    nfe=st.just(5),
    warmup=st.sampled_from([0.3, 0.6]),
    horizon=st.sampled_from([None, 0, 1, 2]),
    budget=st.sampled_from([0.1, 0.5]),
    top_p=st.sampled_from([1.0, 0.9]),
    late_top_p=st.sampled_from([None, 0.8, 1.0]),
    endpoint=st.sampled_from(["argmax", "ancestral"]),
    boundary=st.sampled_from(["released", "paper"]),
    values=st.sampled_from(["argmax", "second", "nucleus", "refreshed"]),
    write=st.sampled_from(["input", "output", "both"]),
)


@given(policies=st.lists(POLICIES, min_size=2, max_size=5, unique=True))
@settings(max_examples=25, deadline=None)
def test_forked_arms_equal_arms_alone(tmp_path_factory, policies):
    cells = [Cell(str(i), "exact:words", policy, 2) for i, policy in enumerate(policies)]
    found, calls = run_all(cells, tmp_path_factory.mktemp("store"))
    for cell in cells:
        assert_same(found[cell.name][0], alone(cell, 5))
    assert calls <= 5 * len(cells)


def test_replays_follow_their_source(tmp_path):
    crs = Cell("CRS", "exact:words", BASE, 3)
    replays = [
        Cell("second", "exact:words", BASE.but(values="second"), 3, replay="CRS"),
        Cell("refreshed", "exact:words", BASE.but(values="refreshed"), 3, replay="CRS"),
        Cell("final-only", "exact:words", BASE.but(values="recorded", write="output"), 3, replay="CRS"),
    ]
    found, calls = run_all([*replays, crs], tmp_path, seeds=(5, 6))
    for shard, seed in enumerate((5, 6)):
        source_run = alone(crs, seed)
        recorded = Selection(source_run.selection.selected_at, source_run.selection.labels)
        assert_same(found["CRS"][shard], source_run)
        for cell in replays:
            assert_same(found[cell.name][shard], alone(cell, seed, recorded))
    warmup = limpet.process.warmup_steps(BASE.nfe, BASE.warmup)
    assert calls == 2 * (warmup + 4 * (BASE.nfe - warmup))


def test_both_endpoints_of_a_path_cost_one_call_more(tmp_path):
    native = BASE.but(horizon=0)
    ends = [Cell(end, "exact:words", native.but(endpoint=end), 2) for end in ("argmax", "ancestral")]
    found, calls = run_all(ends, tmp_path)
    assert calls == BASE.nfe + 1
    for cell in ends:
        assert_same(found[cell.name][0], alone(cell, 5))


def test_prompts_are_kept_and_prefixes_are_not_measured(tmp_path):
    cell = Cell("CRS", "exact:words", BASE, 4, prompts=Prompts("source", tokens=80, each=2))
    found, _ = run_all([cell], tmp_path)
    drawn = WORDS.draw(2, 5)[:, :80].repeat_interleave(2, 0)
    assert_same(found["CRS"][0], alone(cell, 5, prefix=drawn))
    tokens, columns = found["CRS"][0].tensors["tokens"].long(), found["CRS"][0].rows["columns"]
    assert torch.equal(tokens[:, :80], drawn)
    own = (WORDS.log_prob(drawn) - WORDS.log_prob(tokens)).tolist()
    assert columns["nll:0"] == pytest.approx(own)
    assert columns["tokens:0"] == [80.0] * 4
    assert columns["entropy"] == pytest.approx(limpet.metrics.entropy(tokens[:, 80:]).tolist())


def test_the_visible_labels_are_counted_as_the_paper_counts_them(tmp_path):
    cell = Cell("CRS", "exact:words", BASE, 2)
    found, _ = run_all([cell], tmp_path)
    at = found["CRS"][0].tensors["selected_at"].long()
    warmup = limpet.process.warmup_steps(BASE.nfe, BASE.warmup)
    steps = range(warmup, BASE.nfe - 1)
    expected = torch.stack([((at >= 0) & (at < r)).sum(-1) for r in steps]).double().mean(0)
    assert found["CRS"][0].rows["columns"]["visible"] == pytest.approx(expected.tolist())


def test_the_factorial_costs_at_most_three_quarters(tmp_path):
    """The twelve cells as the paper has them, 64 calls, warmup .33: counted on the denoiser, not reckoned."""
    twelve = [Cell(cell.name, "exact:words", cell.policy, 1) for cell in study("factorial", preset("paper")).cells]
    assert len(twelve) == 12
    _, calls = run_all(twelve, tmp_path)
    one_by_one = sum(cell.policy.nfe for cell in twelve)
    assert calls / one_by_one <= 0.75
    assert calls == 21 + 12 * 43
