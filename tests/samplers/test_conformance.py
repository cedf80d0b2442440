"""Every built-in sampler is what it says it is, and keeps what every sampler promises.

TABLE has one line for each. Three kinds: an *exact* method nears the data distribution as its calls grow, an *invariant* one
also leaves the distribution of a noisy state as it is when it corrects, a *heuristic* is a rule; and all are token for token
what `samplers_plain.py` writes out. A sampler that is registered and has no line, or has the wrong one, fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from test_field_samplers import trapezoidal_law
from torch import Tensor

import limpet
import samplers_plain as written
from backends import BACKENDS, DEVICE, Posterior
from limpet import Gibbs, GIDDAdaptive, LimpetError, Mend, Psi, Sampler, Trapezoidal
from limpet.conformance import sampler_rows
from limpet.diffusion import process, transitions
from limpet.models import Denoiser
from limpet.models.exact import Mixture
from limpet.paper.theory.output_distribution import corrected_distribution, output_distribution
from limpet.paper.theory.problems import chain, product, sequences, total_variation, truth
from limpet.samplers import find, gibbs, native, parse
from limpet.samplers.base import BUILTIN
from limpet.samplers.committed_values import Choice

SEED, NFE = 8200, 8


class Entry(NamedTuple):
    """What a sampler is to be held to. Arms are parameters as a command line has them, after the sampler's name."""

    kind: str
    written: Callable[..., list[int]]  # the transcription
    arms: tuple[str, ...] = ("",)  # parameters to try it with
    families: tuple[str, ...] = ("",)  # parameters that are exact; {2/N} stands for itself, N the number of calls
    rate: float = 0.6  # what is left of the distance to the data distribution, at most, with twice the calls
    calls: tuple[int, ...] = (16, 32, 64)  # from one to the next about twice as many
    probs: Callable[..., Tensor] = (
        output_distribution  # a source and a sampler -> (V**L,) the distribution of its outputs
    )
    limits: tuple[tuple[str, str], ...] = ()  # parameters, and the arm that it then is bit for bit
    least: int = 2  # the fewest calls that it takes


def of_the_trapezoidal_rule(source: Denoiser, sampler: Sampler) -> Tensor:
    """By the enumeration of its leaps, which holds for the Markov source alone."""
    assert isinstance(sampler, Trapezoidal)
    return trapezoidal_law(sampler.nfe, sampler.theta)


LAST = "final_step=sample grid=uniform"
TABLE = {
    "native": Entry(
        "exact", written.by_two_coins(written.ancestral),
        ("", "top_p=.8", "top_k=3 final_step=sample", "min_p=.3 late_top_p=.9", "temperature=.7 grid=uniform",
         "interleave=true top_p=.9", "interleave=true grid=quadratic final_step=sample"),
        (LAST, f"{LAST} interleave=true", "final_step=sample grid=quadratic",
         "final_step=sample grid=quadratic interleave=true"),
        limits=(("temperature=1 top_p=1 top_k=7 min_p=0", "native"),),
    ),
    "crs": Entry(
        "heuristic", written.labelled,
        ("", "horizon=2 spacing=1", "final_step=keep", "final_step=sample values=second"),
        limits=(("count=0", "native"), ("count=0 top_p=.8 final_step=sample", "native top_p=.8 final_step=sample")),
    ),
    "mend": Entry(
        "heuristic", written.labelled,
        ("", "mend=5 apart=0 spacing=0 turns=2", "final_step=sample horizon=3 budget=.4 late_top_p=none mend=3",
         "final_step=argmax write=both values=second mend=9 apart=1 turns=1", "interleave=true grid=quadratic budget=.3"),
        limits=(("mend=0 late_top_p=none budget=.5 spacing=4", "crs final_step=keep"),
                ("count=0 final_step=sample", "native late_top_p=.8 final_step=sample")),
    ),
    "psi": Entry(
        "exact", written.by_two_coins(written.psi),
        ("", "eta=.5", "rule=cap eta=.3", "rule=rescale-remdm eta=.3 top_p=.9", "rule=loop eta=.05 final_step=sample",
         "rule=constant eta=.4", "rule=constant eta=1", "rule=constant eta=.7 start=.3 stop=.8"),
        (f"rule=constant eta={{2/N}} {LAST}",),
        limits=(*((f"rule={rule} eta=0", "native") for rule in ("cap", "rescale", "rescale-remdm", "constant")),
                ("rule=cap eta=1 start=1", "native"), ("rule=constant eta=1", "ddim stay=0")),
    ),
    "ddim": Entry(
        "exact", written.by_two_coins(written.ddim),
        ("", "stay=.5", "stay=0 top_p=.8", "final_step=sample", "interleave=true stay=.7"), (LAST,),
        limits=(("stay=0", "psi rule=constant eta=1"),),
    ),
    "gibbs": Entry(
        "invariant", written.gibbs,
        ("", "predictor=native,top_p=.8,final_step=sample corrections=2 positions=3",
         "choose=margin", "choose=margin positions=12 corrections=2 tau=.5 predictor=native,temperature=.8",
         "predictor=crs,spacing=1,budget=1 positions=4", "predictor=crs,horizon=1 choose=margin positions=30",
         "predictor=psi,eta=.4 corrections=3 positions=2", "predictor=ddim corrections=9"),
        (f"predictor=native,{LAST.replace(' ', ',')}",), 0.45,
        limits=(("corrections=0", "native"), ("corrections=7", "native"),
                ("corrections=0 predictor=crs,budget=.2 choose=margin", "crs budget=.2")),
    ),
    "trapezoidal": Entry(
        "exact", written.by_rule(written.trapezoidal), ("", "final_step=sample", "theta=.3 grid=uniform"), (LAST,),
        0.45, (17, 33, 65), of_the_trapezoidal_rule,
    ),
    "entropy-bound": Entry(
        "heuristic", written.by_rule(written.entropy_bound),
        ("", "bound=4", "bound=2 clock=grid settled=none", "bound=6 hottest=.2 coldest=.05 settled=.2 patience=1"),
    ),
    "block-refinement": Entry(
        "heuristic", written.by_rule(written.block_refinement),
        ("", "threshold=.6 editing=.5", "clock=grid", "temperature=.9 editing=.3 threshold=.8"),
    ),
    "gidd-adaptive": Entry(
        "heuristic", written.by_rule(written.gidd_adaptive), ("", "count=5", "final_step=argmax"),
        limits=(("count=20", "gidd-adaptive count=20 final_step=argmax"),),
    ),
    "gidd-correction": Entry(
        "heuristic", written.by_rule(written.gidd_correction),
        ("", "patience=1 sharpness=.8", "changes=3 patience=none sharpness=1 top_p=.9 final_step=sample"),
        limits=(("corrections=0", "native"), ("corrections=0 final_step=sample", "native final_step=sample")),
    ),
    "guided": Entry(
        "heuristic", written.by_rule(written.guided),
        ("", "weight=2.5 final_step=sample", "without=uniform weight=.5", "interleave=true grid=quadratic"), least=3,
    ),
}  # fmt: skip


def small(phrases: int = 4) -> Mixture:
    """A source with random parameters: no two distributions tie by accident, so every order is decided by more than rounding."""
    generator = torch.Generator().manual_seed(21)
    weights, distributions = (
        torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.01 for shape in ((6,), (6, 5, 7))
    )
    return Mixture(weights, distributions**6, phrases)


MODELS = {"source": small(), "posterior": Posterior(small())}
GIVEN = {3: 2, 4: 6, 17: 0}


def prompts(sampler: Sampler) -> tuple[dict[int, int], ...]:
    """The given tokens that a sampler is tried with: also none, unless it cannot do without."""
    return (GIVEN,) if sampler.needs_given else ({}, GIVEN)


def arm(name: str, params: str, nfe: int = NFE) -> Sampler:
    return parse(f"{name} {params}", nfe=nfe)[1]


# -- what each kind is held to ----------------------------------------------------------------------------------------


def nears_the_data_law(name: str, entry: Entry) -> None:
    """In total variation, on a Markov source of 3 symbols and 5 positions."""
    source = chain(5)
    for family in entry.families:
        samplers = [arm(name, family.replace("{2/N}", f"{2 / nfe}"), nfe) for nfe in entry.calls]
        found = [float(total_variation(entry.probs(source, sampler), truth(source))) for sampler in samplers]
        assert found[0] < 0.1
        assert all(after <= entry.rate * before for before, after in pairwise(found)), (family, found)


def noisy(probs: Tensor, signal: float, vocab_size: int, length: int) -> Tensor:
    """(V**L,): a distribution of clean text after the uniform channel."""
    clean = sequences(vocab_size, length)
    return probs @ product(process.forward_probs(clean, signal, vocab_size))


def leaves_every_level_as_it_is(name: str, entry: Entry) -> None:
    source, sampler = chain(5), arm(name, entry.families[0], 12)
    assert isinstance(sampler, Gibbs)
    seen = 0
    for call in range(sampler.nfe):
        due, correction = sampler.due(call)
        if correction is not None:
            level = source.schedule.level(sampler.inner.times[due])
            probs = noisy(truth(source), level, 3, 5)
            assert float((corrected_distribution(source, sampler, call, probs) - probs).abs().max()) < 1e-12
            seen += 1
    assert seen == 5


def is_as_written(name: str, entry: Entry) -> None:
    for params in entry.arms:
        agrees(arm(name, params), entry.written)
    for nfe in range(entry.least, 6):
        agrees(arm(name, entry.arms[-1], nfe), entry.written)


def agrees(sampler: Sampler, transcription: Callable[..., list[int]], n: int = 2) -> None:
    for model in MODELS.values():
        for fixed in prompts(sampler):
            out = limpet.sample(model, sampler, n=n, seed=SEED, fixed=fixed)
            assert out.nfe == sampler.nfe
            for i in range(n):
                params = SimpleNamespace(**{**sampler.to_dict(), "sampler": None})
                expected = transcription(model, params, written.Uniforms(SEED, i), fixed)
                assert out.tokens[i].tolist() == expected, f"{sampler.caption}, nfe {sampler.nfe}, {model.name}, {i}"


Check = Callable[[str, Entry], None]
KINDS: dict[str, tuple[Check, ...]] = {
    "exact": (nears_the_data_law, is_as_written),
    "invariant": (nears_the_data_law, leaves_every_level_as_it_is, is_as_written),
    "heuristic": (is_as_written,),
}
HELD = [(name, check) for name in BUILTIN if name in TABLE for check in KINDS[TABLE[name].kind]]


def has_an_entry(name: str) -> None:
    assert name in TABLE, f"say in TABLE which kind of sampler {name} is, and write it out in samplers_plain.py"


@pytest.mark.parametrize("name", {**BUILTIN, **TABLE})
def test_every_built_in_sampler_has_an_entry_and_nothing_else_does(name: str) -> None:
    has_an_entry(name)
    assert name in BUILTIN
    assert find(name)(nfe=NFE).name == name


@pytest.mark.parametrize(("name", "check"), HELD, ids=[f"{name}-{check.__name__}" for name, check in HELD])
def test_it_is_of_its_kind(name: str, check: Check) -> None:
    check(name, TABLE[name])


def test_the_page_of_samplers_says_the_same() -> None:
    """docs/samplers.md has a line for each, in this order, and says whether it is exact."""
    page = (Path(__file__).parents[2] / "docs" / "samplers.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    assert {name.strip("`"): kind for name, _, kind, _, _ in lines} == {
        name: "heuristic" if entry.kind == "heuristic" else "exact" for name, entry in TABLE.items()
    }
    assert [name.strip("`") for name, *_ in lines] == list(BUILTIN)


# -- what all promise -------------------------------------------------------------------------------------------------

ARMS = [(name, params) for name, entry in TABLE.items() for params in entry.arms]
LIMITS = [(name, *limit) for name, entry in TABLE.items() for limit in entry.limits]


@pytest.mark.parametrize(("name", "parameters"), ARMS)
def test_it_keeps_the_contract(name: str, params: str) -> None:
    """Parameters, calls, state, memory and marks; given tokens hold; a sample does not depend on its batch; being watched
    changes nothing; and what it says it shares it does."""
    for row in sampler_rows(MODELS["source"], arm(name, params)):
        assert row.ok, f"{row.what}: {row.found}"


@pytest.mark.parametrize("name", TABLE)
def test_counted_calls_are_nfe(name: str) -> None:
    for params in TABLE[name].arms:
        for nfe in (TABLE[name].least, 6, 7, 13):
            sampler = arm(name, params, nfe)
            assert limpet.sample(MODELS["source"], sampler, n=1, fixed=prompts(sampler)[0]).nfe == nfe


@pytest.mark.parametrize(("name", "parameters"), ARMS)
def test_a_prefix_holds_and_the_rest_is_free(name: str, params: str) -> None:
    out = limpet.sample(MODELS["source"], arm(name, params), n=3, seed=SEED, prefix=[1, 2, 3, 4])
    assert (out.tokens[:, :4] == torch.tensor([1, 2, 3, 4])).all()
    assert len({tuple(row) for row in out.tokens.tolist()}) > 1


@pytest.mark.parametrize(("name", "parameters"), ARMS)
def test_every_backend_draws_the_same_tokens(name: str, params: str) -> None:
    """The fused one by Triton's interpreter, which is slow: of a sampler's arms the first and the last, since what a
    transition may ask is held by its own tests. Exact sources stay on the CPU."""
    ends = params in (TABLE[name].arms[0], TABLE[name].arms[-1])
    here = [backend for each, backend in BACKENDS.items() if each != "fused" or (DEVICE == "cpu" and ends)]
    sampler, model, given = arm(name, params, 4), small(phrases=2), {3: 2, 4: 6}
    tokens = [limpet.sample(model, sampler, n=1, seed=SEED, fixed=given, backend=backend).tokens for backend in here]
    assert all(torch.equal(tokens[0], other) for other in tokens[1:])


@pytest.mark.parametrize(("name", "parameters", "other"), LIMITS)
@pytest.mark.parametrize("nfe", [3, NFE])
def test_a_limit_is_bit_equal(name: str, params: str, other: str, nfe: int) -> None:
    one, same = (limpet.sample(MODELS["source"], arm(*both, nfe), n=6, seed=SEED, fixed=GIVEN).tokens
                 for both in ((name, params), (other, "")))  # fmt: skip
    assert torch.equal(one, same)


@pytest.mark.parametrize(
    "predictor", ["trapezoidal", "entropy-bound", "gibbs", "no such thing", "native,nfe=3", "native,interleave=true"]
)
def test_what_cannot_be_corrected_is_one_sentence(predictor: str) -> None:
    with pytest.raises(LimpetError) as caught:
        Gibbs(nfe=NFE, predictor=predictor)
    assert "\n" not in str(caught.value)


def test_a_leap_of_every_other_position_is_refused() -> None:
    with pytest.raises(LimpetError, match="interleave True; it takes False"):
        Trapezoidal(nfe=NFE, interleave=True)


# -- and one of each kind that is wrong on purpose is found out -------------------------------------------------------


def test_a_sampler_without_an_entry_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN, "another", "limpet.samplers.native:Native")
    *known, new = BUILTIN
    assert {has_an_entry(name) for name in known} == {None}
    with pytest.raises(AssertionError, match="which kind of sampler another is"):
        has_an_entry(new)


def test_a_sampler_without_an_entry_of_its_kind_is_found_out() -> None:
    """A heuristic does not pass for exact, nor a corrector that is none for an invariant one."""
    with pytest.raises(AssertionError):
        nears_the_data_law("native", TABLE["native"]._replace(families=(f"{LAST} top_p=.9",)))
    with pytest.raises(AssertionError):
        leaves_every_level_as_it_is(
            "gibbs", TABLE["gibbs"]._replace(families=(f"{TABLE['gibbs'].families[0]} positions=2",))
        )


def test_a_wrong_coin_does_not_near_the_data_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native steps that take the leave-one-out distribution for the posterior: coin two is not tossed for draws."""

    def wrong(a: float, b: float) -> transitions.Coins:
        right = transitions.ancestral(a, b)
        return transitions.nested(a, 0.0, right.uniform - right.draw, fresh=right.draw)

    monkeypatch.setattr(native, "sample", wrong)
    with pytest.raises(AssertionError):
        nears_the_data_law("native", TABLE["native"])


def test_a_wrong_coin_leaves_no_law_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrections at a level that is a hair too clean."""
    monkeypatch.setattr(gibbs, "redraw", lambda signal: transitions.redraw(signal + 1e-6 * (1 - signal)))
    with pytest.raises(AssertionError):
        leaves_every_level_as_it_is("gibbs", TABLE["gibbs"])


def test_several_or_preferred_positions_leave_no_law_as_it_is() -> None:
    """What is known of them: the defects of two at once, and of one by margin at signal .9."""
    source = chain(5)
    for params, defect in (("positions=2", 0.03), ("choose=margin", 0.16)):
        sampler = arm("gibbs", f"corrections=1 predictor=native,grid=uniform {params}", 21)
        call = next(r for r in range(21) if sampler.due(r) == (9, 8))
        level = source.schedule.level(sampler.inner.times[9])
        assert level == pytest.approx(0.9, abs=1e-3)
        probs = noisy(truth(source), level, 3, 5)
        found = float(total_variation(corrected_distribution(source, sampler, call, probs), probs))
        assert found == pytest.approx(defect, rel=0.1)


@dataclass(frozen=True)
class Careless(Psi):
    """Psi that draws a uniform token where it should draw from the distribution, once in fifty times."""

    def coins(self, signal_t: float, signal_s: float, call: int) -> transitions.Coins:
        right = super().coins(signal_t, signal_s, call)
        return right._replace(draw=right.draw * 0.98)


@dataclass(frozen=True)
class Blind(Mend):
    """Mend that does not keep mended labels apart."""

    def relabel(self, choice: Choice) -> Tensor:
        return super(Blind, self.replace(apart=0)).relabel(choice)


@dataclass(frozen=True)
class Timid(GIDDAdaptive):
    """GIDD's adaptive rule that sets one position fewer than it should."""

    def counts(self, path: limpet.Path) -> Tensor:
        return super().counts(path) - 1


WRONG = {"psi": Careless(nfe=NFE), "mend": Blind(nfe=NFE, mend=9, spacing=0), "gidd-adaptive": Timid(nfe=NFE)}


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_is_another_is_not_as_written(name: str) -> None:
    with pytest.raises(AssertionError, match=type(WRONG[name]).__name__):
        agrees(WRONG[name], TABLE[name].written, 8)
