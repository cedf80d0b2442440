"""Branching: every sampler of a group gives, bit for bit, what it gives alone."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet.diffusion.process import warmup_steps
from limpet.errors import LimpetError
from limpet.experiments import Cell, ModelCache, Store, Study, collect, run, units
from limpet.experiments.executors import local
from limpet.experiments.study import Prompts
from limpet.generation import sample, steps
from limpet.models.exact_sources import source
from limpet.paper.studies import preset, study
from limpet.samplers import CRS, Native, State, available, param, params
from study_cases import BASE, NATIVE, no_report
from thinned import thinned

WORDS = source("exact:words")


class CountingCache(ModelCache):
    """Loads one model, which counts its network calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def model(self, name):
        cache = self

        class Model(type(WORDS)):
            def backbone(self, inputs):
                cache.calls += 1
                return super().backbone(inputs)

        model = Model.__new__(Model)
        model.__dict__.update(WORDS.__dict__)
        return model


def run_all(cells, path, seeds=(5,)):
    models = CountingCache()
    study = Study("branches", "branches", tuple(cells), seeds, no_report)
    store = Store(path)
    summary = run(study, store, local(models=models), models)
    assert not summary.failed
    plan = store.read_plan(units.plan_name(study))
    return {cell["name"]: [store.read(key) for key in cell["keys"]] for cell in plan["cells"]}, models.calls


def alone(cell, seed, recorded=None, prompt=None):
    return sample(WORDS, cell.sampler, cell.n, seed, cell.length, prompt, replay=recorded)


def assert_same(found, expected):
    assert torch.equal(found.tensors["tokens"].long(), expected.tokens)
    assert found.rows["columns"]["committed"] == expected.committed.tolist()
    assert found.rows["nfe"] == expected.nfe == expected.sampler.nfe
    names = getattr(expected.memory, "_fields", ())
    assert set(found.tensors) == {"tokens", *names}
    for name in names:
        part = getattr(expected.memory, name)
        assert torch.equal(found.tensors[name].to(part.dtype), part)


NATIVES = {
    "nfe": st.just(5),
    "warmup": st.sampled_from([0.3, 0.6]),
    "top_p": st.sampled_from([1.0, 0.9]),
    "late_top_p": st.sampled_from([None, 0.8, 1.0]),
    "final_step": st.sampled_from(["argmax", "sample"]),
    "boundary": st.sampled_from(["released", "paper"]),
}
SAMPLERS = st.builds(Native, **NATIVES) | st.builds(
    CRS,
    **NATIVES,
    horizon=st.sampled_from([None, 1, 2]),
    budget=st.sampled_from([0.1, 0.5]),
    values=st.sampled_from(["argmax", "second", "nucleus", "refreshed"]),
    write=st.sampled_from(["input", "output", "both"]),
)


@given(samplers=st.lists(SAMPLERS, min_size=2, max_size=5, unique=True), replayed=st.booleans())
@settings(max_examples=25, deadline=None)
def test_samplers_that_share_calls_give_what_they_give_alone(tmp_path_factory, samplers, replayed):
    """So do the replays of each that commits tokens."""
    cells = [Cell(str(i), "exact:words", sampler, 2) for i, sampler in enumerate(samplers)]
    found, calls = run_all(cells, tmp_path_factory.mktemp("store"))
    assert calls <= 5 * len(cells)
    replays = [replace(cell, name=f"replay of {cell.name}", replay=cell.name) for cell in cells
               if replayed and isinstance(cell.sampler, CRS)]  # fmt: skip
    found, _ = run_all([*replays, *cells], tmp_path_factory.mktemp("store"))
    expected = {cell.name: alone(cell, 5) for cell in cells}
    for cell in cells:
        assert_same(found[cell.name][0], expected[cell.name])
    for cell in replays:
        assert_same(found[cell.name][0], alone(cell, 5, expected[cell.replay].memory))


def other_value(param):
    """A value that is not the default of a parameter."""
    if param.choices:
        return next(choice for choice in param.choices if choice not in (param.default, "recorded"))
    if param.kind is bool:
        return not param.default
    if param.kind is str:
        return {"predictor": "native,top_p=.8"}[param.name]
    return next(value for value in (2, 1, 0.7, 0.3, 4) if value != param.default and param.accepts(value))


FIXED = [
    ("trapezoidal", "interleave"),
    ("forward-backward", "interleave"),
]  # inherited parameters of which a sampler takes the default alone


@pytest.mark.parametrize(("kind", "name"), FIXED)
def test_a_parameter_that_takes_one_value_says_so(kind, name):
    with pytest.raises(LimpetError, match=f"{kind} has {name}"):
        available()[kind](nfe=5, **{name: other_value(params(available()[kind])[name])})


@pytest.mark.parametrize(
    ("kind", "name"),
    thinned(
        (kind, name)
        for kind in available()
        for name in params(available()[kind])
        if (kind, name) not in FIXED and name != "refresh"  # which a source takes at 1 alone
    ),
)
def test_a_sampler_that_differs_in_one_parameter_gives_what_it_gives_alone(tmp_path, kind, name):
    """Of every parameter of every sampler, also beside the sampler with its defaults."""
    base = available()[kind](nfe=5)
    changed = base.replace(**{name: other_value(params(type(base))[name])})
    prompts, prompt = None, None
    if base.needs_fixed:
        prompts, prompt = Prompts("source", tokens=80, each=2), WORDS.draw(1, 5)[:, :80].repeat_interleave(2, 0)
    samplers = {"default": base, "changed": changed}
    cells = [Cell(name, "exact:words", sampler, 2, prompts=prompts) for name, sampler in samplers.items()]
    found, _ = run_all(cells, tmp_path)
    assert found["default"][0].rows["key"] != found["changed"][0].rows["key"]
    for cell in cells:
        assert_same(found[cell.name][0], alone(cell, 5, prompt=prompt))


@dataclass(frozen=True)
class Sharper(CRS):
    """CRS that differs before warmup, without a parameter."""

    def transition(self, ctx, state, revise, inspect):
        return replace(super().transition(ctx, state, revise, inspect), temperature=0.5)


def test_a_subclass_that_differs_before_warmup_does_not_share(tmp_path):
    cells = [Cell("CRS", "exact:words", BASE, 3), Cell("sharper", "exact:words", Sharper(nfe=6), 3),
             Cell("native", "exact:words", NATIVE, 3)]  # fmt: skip
    found, calls = run_all(cells, tmp_path)
    assert calls == BASE.nfe + (BASE.nfe - BASE.warmup_calls) + BASE.nfe
    for cell in cells:
        assert_same(found[cell.name][0], alone(cell, 5))


class Kept(NamedTuple):
    zeta: torch.Tensor  # what came of the first call
    alpha: torch.Tensor  # how long that stood


@dataclass(frozen=True)
class Keeper(Native):
    """A sampler with a memory of its own, masks of some calls, and a replay that starts from the memory."""

    plain: bool = param(False, "Whether its memory is a plain tuple.")

    def init(self, ctx):
        return super().init(ctx)._replace(memory=self.kept(ctx.noise() * 0, ctx.no_positions))

    def step(self, ctx, state):
        zeta, alpha = state.memory
        after, info = super().step(ctx, state)
        zeta = after.tokens if state.call == 0 else zeta
        same = after.tokens == zeta
        masks = {"kept": same} if state.call in (1, 2, 4) else {}
        return after._replace(memory=self.kept(zeta, alpha | same)), info._replace(masks=masks)

    def replay(self, ctx, recorded):
        zeta, alpha = recorded
        assert alpha.dtype == torch.bool
        return State(0, torch.where(alpha, zeta, ctx.noise()), self.kept(zeta, alpha))

    def kept(self, *memory):
        return memory if self.plain else Kept(*memory)


@pytest.mark.parametrize("plain", [False, True])
def test_a_sampler_of_another_kind_is_published_and_replayed(tmp_path, plain):
    """Its memory by its own names and in its own order; its masks summed over the calls before the final step. A replay
    that starts elsewhere shares nothing."""
    keeper = Keeper(nfe=5, plain=plain)
    cells = [Cell("again", "exact:words", keeper, 3, replay="keeper"), Cell("keeper", "exact:words", keeper, 3)]
    found, calls = run_all([*cells, Cell("native", "exact:words", Native(nfe=5), 3)], tmp_path)
    assert calls == 15  # it shares no call
    first, second = (found[name][0] for name in ("keeper", "again"))
    assert set(first.tensors) == {"tokens", *(("memory0", "memory1") if plain else ("zeta", "alpha"))}
    expected = alone(cells[1], 5)
    assert torch.equal(first.tensors["tokens"].long(), expected.tokens)
    assert torch.equal(second.tensors["tokens"].long(), alone(cells[0], 5, expected.memory).tokens)
    counted = [step.masks for step in steps(WORDS, keeper, 3, 5)]
    assert first.rows["columns"]["kept"] == (counted[1]["kept"].sum(-1) + counted[2]["kept"].sum(-1)).tolist()
    assert first.rows["columns"]["committed"] == first.rows["columns"]["visible"] == [0] * 3
    assert "kept" not in found["native"][0].rows["columns"]


def test_replays_follow_their_source(tmp_path):
    crs = Cell("CRS", "exact:words", BASE, 3)
    replays = [
        Cell("second", "exact:words", BASE.replace(values="second"), 3, replay="CRS"),
        Cell("refreshed", "exact:words", BASE.replace(values="refreshed"), 3, replay="CRS"),
        Cell("final-only", "exact:words", BASE.replace(values="recorded", write="output"), 3, replay="CRS"),
    ]
    found, calls = run_all([*replays, crs], tmp_path, seeds=(5, 6))
    for index, seed in enumerate((5, 6)):
        source_run = alone(crs, seed)
        assert_same(found["CRS"][index], source_run)
        for cell in replays:
            assert_same(found[cell.name][index], alone(cell, seed, source_run.memory))
    warmup = warmup_steps(BASE.nfe, BASE.warmup)
    assert calls == 2 * (warmup + 4 * (BASE.nfe - warmup))


def test_prompts_are_kept_and_not_measured(tmp_path):
    cell = Cell("CRS", "exact:words", BASE, 4, prompts=Prompts("source", tokens=80, each=2))
    found, _ = run_all([cell], tmp_path)
    drawn = WORDS.draw(2, 5)[:, :80].repeat_interleave(2, 0)
    assert_same(found["CRS"][0], alone(cell, 5, prompt=drawn))
    tokens, columns = found["CRS"][0].tensors["tokens"].long(), found["CRS"][0].rows["columns"]
    assert torch.equal(tokens[:, :80], drawn)
    own = (WORDS.log_prob(drawn) - WORDS.log_prob(tokens)).tolist()
    assert columns["nll:0"] == pytest.approx(own)
    assert columns["tokens:0"] == [80.0] * 4
    assert columns["entropy"] == pytest.approx(limpet.evaluation.metrics.entropy(tokens[:, 80:]).tolist())


def test_visible_tokens_are_counted_as_the_paper_counts_them(tmp_path):
    cell = Cell("CRS", "exact:words", BASE, 2)
    found, _ = run_all([cell], tmp_path)
    at = found["CRS"][0].tensors["committed_at"].long()
    warmup = warmup_steps(BASE.nfe, BASE.warmup)
    steps = range(warmup, BASE.nfe - 1)
    expected = torch.stack([(at < r).sum(-1) for r in steps]).double()
    assert found["CRS"][0].rows["columns"]["visible"] == expected.sum(0).tolist()
    results = collect(Study("branches", "branches", (cell,), (5,), no_report), Store(tmp_path))
    assert results("CRS", "visible").mean == pytest.approx(float(expected.mean(0).mean()))


def test_the_factorial_costs_at_most_three_quarters(tmp_path):
    """The paper's twelve cells, 64 calls, warmup .33: network calls are counted."""
    twelve = [Cell(cell.name, "exact:words", cell.sampler, 1) for cell in study("factorial", preset("paper")).cells]
    assert len(twelve) == 12
    _, calls = run_all(twelve, tmp_path)
    one_by_one = sum(cell.sampler.nfe for cell in twelve)
    assert calls / one_by_one <= 0.75
    assert calls == 21 + 12 * 43
