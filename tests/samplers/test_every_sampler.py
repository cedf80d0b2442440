"""Every built-in sampler against its transcription, its limits, and the contract of all samplers.

TABLE has one entry for each. An *exact* method approaches the data distribution as its calls grow. An *invariant* one
also keeps the distribution of a noisy state when it corrects. A *heuristic* is a rule. All of them draw token for token
what `samplers_plain.py` draws. A registered sampler without an entry, or with a wrong one, fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from test_published_samplers import leaping_distribution, trapezoidal_distribution
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
from limpet.samplers import Context, find, gibbs, native, parse
from limpet.samplers.builtin import BUILTIN
from limpet.samplers.committed_values import Choice

SEED, NFE = 8200, 8


class Entry(NamedTuple):
    """What a sampler is held to. Parameters are written as on a command line, after the sampler's name."""

    kind: str
    written: Callable[..., list[int]]  # the transcription
    variants: tuple[str, ...] = ("",)  # parameters to try
    exact: tuple[str, ...] = ("",)  # parameters for which it is exact; {2/N} stands for itself, N the number of calls
    rate: float = 0.6  # the most that is left of the distance to the data distribution with twice the calls
    near: float = 0.1  # the most that it is away from the data distribution with the fewest calls
    calls: tuple[int, ...] = (16, 32, 64)  # each about twice the one before
    probs: Callable[..., Tensor] = output_distribution  # (V**L,) the output distribution of a source and a sampler
    limits: tuple[tuple[str, str], ...] = ()  # parameters, and the sampler that it then equals bit for bit
    least: int = 2  # the fewest calls that it takes


def of_trapezoidal(source: Denoiser, sampler: Sampler) -> Tensor:
    """By enumeration of its leaps, for the Markov source only."""
    assert isinstance(sampler, Trapezoidal)
    return trapezoidal_distribution(sampler.nfe, sampler.theta)


UNIFORM = "grid=uniform"
ARGMAX = "final_step=argmax"
TABLE = {
    "native": Entry(
        "exact",
        written.by_two_coins(written.ancestral),
        (
            ARGMAX,
            "top_p=.8",
            "top_k=3",
            "min_p=.3 late_top_p=.9",
            f"temperature=.7 {UNIFORM} {ARGMAX}",
            f"interleave=true top_p=.9 {ARGMAX}",
            "interleave=true grid=quadratic",
        ),
        (UNIFORM, f"{UNIFORM} interleave=true", "grid=quadratic", "grid=quadratic interleave=true"),
        limits=(("temperature=1 top_p=1 top_k=7 min_p=0", "native"),),
    ),
    "crs": Entry(
        "heuristic",
        written.committed,
        ("", "horizon=2 spacing=1", "final_step=keep", "final_step=sample values=second"),
        limits=(("count=0", f"native {ARGMAX}"), ("count=0 top_p=.8 final_step=sample", "native top_p=.8")),
    ),
    "mend": Entry(
        "heuristic",
        written.committed,
        (
            "",
            "revise=5 revise_spacing=0 spacing=0 revise_every=2",
            "final_step=sample horizon=3 budget=.4 late_top_p=none revise=3",
            f"{ARGMAX} write=both values=second revise=9 revise_spacing=1 revise_every=1",
            "interleave=true grid=quadratic budget=.3",
            "interleave=true grid=quadratic spacing=1 revise=5 revise_spacing=1 own_turn=true",
        ),
        limits=(
            ("own_turn=true", "mend"),
            ("revise=0 late_top_p=none budget=.5 spacing=4", "crs final_step=keep"),
            ("count=0 final_step=sample", "native late_top_p=.8"),
        ),
    ),
    "psi": Entry(
        "exact",
        written.by_two_coins(written.psi),
        (
            ARGMAX,
            "eta=.5",
            "rule=cap eta=.3",
            "rule=rescale-remdm eta=.3 top_p=.9",
            "rule=loop eta=.05",
            "rule=constant eta=.4",
            f"rule=constant eta=1 {ARGMAX}",
            "rule=constant eta=.7 start=.3 stop=.8",
        ),
        (f"rule=constant eta={{2/N}} {UNIFORM}",),
        limits=(
            *((f"rule={rule} eta=0", "native") for rule in ("cap", "rescale", "rescale-remdm", "constant")),
            ("rule=cap eta=1 start=1", "native"),
            ("rule=constant eta=1", "ddim stay=0"),
        ),
    ),
    "ddim": Entry(
        "exact",
        written.by_two_coins(written.ddim),
        ("", "stay=.5", f"stay=0 top_p=.8 {ARGMAX}", "interleave=true stay=.7"),
        (UNIFORM,),
        limits=(("stay=0", "psi rule=constant eta=1"),),
    ),
    "gibbs": Entry(
        "invariant",
        written.gibbs,
        (
            "",
            f"predictor=native,top_p=.8,{ARGMAX} corrections=2 positions=3",
            "choose=margin",
            "choose=margin positions=12 corrections=2 tau=.5 predictor=native,temperature=.8",
            "predictor=crs,spacing=1,budget=1 positions=4",
            "predictor=crs,horizon=1 choose=margin positions=30",
            "predictor=psi,eta=.4 corrections=3 positions=2",
            "predictor=ddim corrections=9",
        ),
        (f"predictor=native,{UNIFORM}",),
        0.45,
        limits=(
            ("corrections=0", "native"),
            ("corrections=7", "native"),
            ("corrections=0 predictor=crs,budget=.2 choose=margin", "crs budget=.2"),
        ),
    ),
    "trapezoidal": Entry(
        "exact",
        written.by_rule(written.trapezoidal),
        ("", ARGMAX, f"theta=.3 {UNIFORM}"),
        (UNIFORM,),
        0.45,
        calls=(17, 33, 65),
        probs=of_trapezoidal,
    ),
    "tau-leaping": Entry(
        "exact",
        written.by_rule(written.tau_leaping),
        (
            "",
            "rule=euler",
            f"rule=first-jump top_p=.8 {ARGMAX}",
            "interleave=true grid=quadratic late_top_p=.9",
            f"rule=euler interleave=true {ARGMAX}",
        ),
        (
            UNIFORM,
            f"rule=first-jump {UNIFORM}",
            f"rule=euler {UNIFORM}",
            f"rule=euler interleave=true {UNIFORM}",
            f"rule=first-jump interleave=true {UNIFORM}",
            "rule=euler grid=quadratic",
        ),
        near=0.15,
        probs=leaping_distribution,
    ),
    "forward-backward": Entry(
        "exact",
        written.by_rule(written.forward_backward),
        ("", "corrections=3 rule=euler span=.7", f"corrections=2 rule=first-jump {ARGMAX}", "grid=quadratic span=3"),
        (UNIFORM, f"rule=euler {UNIFORM}", f"rule=first-jump span=1 {UNIFORM}"),
        near=0.3,
        probs=leaping_distribution,
        limits=(
            ("corrections=0", "tau-leaping"),
            ("corrections=0 rule=euler grid=quadratic top_p=.9", "tau-leaping rule=euler grid=quadratic top_p=.9"),
            ("corrections=7", "tau-leaping"),
        ),
    ),
    "rdm": Entry(
        "heuristic",
        written.by_rule(written.rdm),
        (
            "",
            "returns=cond schedule=linear",
            "returns=cond temperature=1 noise=2",
            "temperature=.7 noise=5 schedule=linear clock=grid",
            "clock=grid grid=quadratic temperature=.3",
        ),
    ),
    "confidence-threshold": Entry(
        "heuristic",
        written.by_rule(written.confidence_threshold),
        ("", "threshold=.5 repair=true", "threshold=.8 draw=true clock=grid", "threshold=.6 draw=true repair=true"),
        limits=(("threshold=0", "confidence-threshold threshold=0 repair=false clock=grid"),),
    ),
    "entropy-bound": Entry(
        "heuristic",
        written.by_rule(written.entropy_bound),
        (
            "",
            "bound=4",
            "bound=2 clock=grid settled=none",
            "bound=6 first_temperature=.2 last_temperature=.05 settled=.2 patience=1",
        ),
    ),
    "block-refinement": Entry(
        "heuristic",
        written.by_rule(written.block_refinement),
        ("", "threshold=.6 editing=.5", "clock=grid", "temperature=.9 editing=.3 threshold=.8"),
    ),
    "gidd-adaptive": Entry(
        "heuristic",
        written.by_rule(written.gidd_adaptive),
        ("", "count=5", ARGMAX),
        limits=(("count=20", f"gidd-adaptive count=20 {ARGMAX}"),),
    ),
    "gidd-correction": Entry(
        "heuristic",
        written.by_rule(written.gidd_correction),
        ("", f"patience=1 sharpness=.8 {ARGMAX}", "changes=3 patience=none sharpness=1 top_p=.9"),
        limits=(("corrections=0", "native"), (f"corrections=0 {ARGMAX}", f"native {ARGMAX}")),
    ),
    "guided": Entry(
        "heuristic",
        written.by_rule(written.guided),
        (ARGMAX, "weight=2.5", "without=uniform weight=.5", f"interleave=true grid=quadratic {ARGMAX}"),
        least=3,
    ),
}


def small(phrases: int = 4) -> Mixture:
    """A source with random parameters, so that no two probabilities tie by accident."""
    generator = torch.Generator().manual_seed(21)
    weights, probs = (
        torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.01 for shape in ((6,), (6, 5, 7))
    )
    return Mixture(weights, probs**6, phrases)


MODELS = {"source": small(), "posterior": Posterior(small())}
FIXED = {3: 2, 4: 6, 17: 0}
VARIANTS = [
    pytest.param(name, variant, marks=[pytest.mark.more] * (number > 0))
    for name, entry in TABLE.items()
    for number, variant in enumerate(entry.variants)
]
LIMITS = [(name, *limit) for name, entry in TABLE.items() for limit in entry.limits]


def sampler_of(name: str, parameters: str, nfe: int = NFE) -> Sampler:
    return parse(f"{name} {parameters}", nfe=nfe)[1]


# What each kind is held to


def approaches_the_data_distribution(name: str, entry: Entry) -> None:
    """In total variation, on a Markov source of 3 symbols and 5 positions."""
    source = chain(5)
    for family in entry.exact:
        samplers = [sampler_of(name, family.replace("{2/N}", f"{2 / nfe}"), nfe) for nfe in entry.calls]
        found = [float(total_variation(entry.probs(source, sampler), truth(source))) for sampler in samplers]
        assert found[0] < entry.near
        assert all(after <= entry.rate * before for before, after in pairwise(found)), (family, found)


def noisy(probs: Tensor, signal: float, vocab_size: int, length: int) -> Tensor:
    """(V**L,): a distribution of clean text after uniform noise."""
    return probs @ product(process.forward_probs(sequences(vocab_size, length), signal, vocab_size))


def keeps_every_level(name: str, entry: Entry) -> None:
    source, sampler = chain(5), sampler_of(name, entry.exact[0], 12)
    assert isinstance(sampler, Gibbs)
    corrections = 0
    for call in range(sampler.nfe):
        scheduled = sampler.scheduled(call)
        if scheduled.correction is not None:
            level = source.schedule.level(sampler.inner.times[scheduled.call])
            probs = noisy(truth(source), level, 3, 5)
            assert float((corrected_distribution(source, sampler, call, probs) - probs).abs().max()) < 1e-12
            corrections += 1
    assert corrections == 5


def is_as_written(name: str, entry: Entry) -> None:
    for parameters in entry.variants:
        agrees(sampler_of(name, parameters), entry.written)
    for nfe in range(entry.least, 6):
        agrees(sampler_of(name, entry.variants[-1], nfe), entry.written)


def agrees(sampler: Sampler, transcription: Callable[..., list[int]], n: int = 2) -> None:
    """With and without fixed tokens, unless the sampler needs them; on both kinds of model."""
    for model in MODELS.values():
        for fixed in (FIXED,) if sampler.needs_fixed else ({}, FIXED):
            out = limpet.sample(model, sampler, n=n, seed=SEED, fixed=fixed)
            assert out.nfe == sampler.nfe
            for i in range(n):
                parameters = SimpleNamespace(**{**sampler.to_dict(), "sampler": None})
                expected = transcription(model, parameters, written.Uniforms(SEED, i), fixed)
                assert out.tokens[i].tolist() == expected, f"{sampler.caption}, nfe {sampler.nfe}, {model.name}, {i}"


Check = Callable[[str, Entry], None]
KINDS: dict[str, tuple[Check, ...]] = {
    "exact": (approaches_the_data_distribution, is_as_written),
    "invariant": (approaches_the_data_distribution, keeps_every_level, is_as_written),
    "heuristic": (is_as_written,),
}
CHECKS = [(name, check) for name, entry in TABLE.items() for check in KINDS[entry.kind]]


@pytest.mark.parametrize(("name", "check"), CHECKS, ids=[f"{name}-{check.__name__}" for name, check in CHECKS])
def test_it_is_of_its_kind(name: str, check: Check) -> None:
    check(name, TABLE[name])


def test_every_built_in_sampler_has_an_entry() -> None:
    assert set(TABLE) == set(BUILTIN)
    assert all(find(name)(nfe=NFE).name == name for name in TABLE)


def test_the_page_of_samplers_has_the_same_kinds() -> None:
    """docs/samplers.md has a line for each sampler, in the same order, which says whether it is exact."""
    page = (Path(__file__).parents[2] / "docs" / "samplers.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    lines = [line for line in lines if line[2] in ("exact", "heuristic")]  # of the table of samplers
    kinds = {name: "heuristic" if entry.kind == "heuristic" else "exact" for name, entry in TABLE.items()}
    assert {name.strip("`"): kind for name, _, kind, _, _ in lines} == kinds
    assert [name.strip("`") for name, *_ in lines] == list(BUILTIN)


# The contract of all samplers


@pytest.mark.parametrize(("name", "parameters"), VARIANTS)
def test_it_keeps_the_contract(name: str, parameters: str) -> None:
    """Parameters, calls, state, memory, masks, fixed tokens, batches, traces, shared calls; and a prompt of its own."""
    sampler = sampler_of(name, parameters)
    for row in sampler_rows(MODELS["source"], sampler):
        assert row.ok, f"{row.what}: {row.found}"
    out = limpet.sample(MODELS["source"], sampler, n=3, seed=SEED, prompt=[1, 2, 3, 4])
    assert (out.tokens[:, :4] == torch.tensor([1, 2, 3, 4])).all()
    assert len({tuple(row) for row in out.tokens.tolist()}) > 1
    for nfe in (TABLE[name].least, 7, 13):
        assert limpet.sample(MODELS["source"], sampler.replace(nfe=nfe), n=1, fixed=FIXED).nfe == nfe


@pytest.mark.parametrize(("name", "parameters"), VARIANTS)
def test_every_backend_draws_the_same_tokens(name: str, parameters: str) -> None:
    """Triton's interpreter is slow, so the fused backend draws only the first and the last variant of a sampler.
    Exact sources stay on the CPU."""
    is_end = parameters in (TABLE[name].variants[0], TABLE[name].variants[-1])
    used = [backend for each, backend in BACKENDS.items() if each != "fused" or (DEVICE == "cpu" and is_end)]
    sampler, model, fixed = sampler_of(name, parameters, 4), small(phrases=2), {3: 2, 4: 6}
    tokens = [limpet.sample(model, sampler, n=1, seed=SEED, fixed=fixed, backend=backend).tokens for backend in used]
    assert all(torch.equal(tokens[0], other) for other in tokens[1:])


@pytest.mark.parametrize(("name", "parameters", "other"), LIMITS)
def test_a_limit_is_bit_equal(name: str, parameters: str, other: str) -> None:
    for nfe in (3, NFE):
        samplers = sampler_of(name, parameters, nfe), sampler_of(other, "", nfe)
        one, same = (limpet.sample(MODELS["source"], each, n=6, seed=SEED, fixed=FIXED).tokens for each in samplers)
        assert torch.equal(one, same)


@pytest.mark.parametrize(
    "predictor",
    ["trapezoidal", "entropy-bound", "gibbs", "no such thing", "native,nfe=3", "native,interleave=true", "./a.toml"],
)
def test_what_cannot_be_corrected_is_one_sentence(predictor: str) -> None:
    with pytest.raises(LimpetError) as caught:
        Gibbs(nfe=NFE, predictor=predictor)
    assert "\n" not in str(caught.value)


# A wrong sampler of each kind is noticed


def test_a_wrong_kind_is_noticed() -> None:
    """A heuristic is not exact, and an approximate corrector is not invariant."""
    with pytest.raises(AssertionError):
        approaches_the_data_distribution("native", TABLE["native"]._replace(exact=(f"{UNIFORM} top_p=.9",)))
    with pytest.raises(AssertionError):
        keeps_every_level("gibbs", TABLE["gibbs"]._replace(exact=(f"{TABLE['gibbs'].exact[0]} positions=2",)))


def test_a_wrong_coin_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native steps without coin two for draws, and corrections at a level that is slightly too clean."""

    def without_coin_two(signal_t: float, signal_s: float) -> transitions.Coins:
        right = transitions.ancestral(signal_t, signal_s)
        return transitions.nested(signal_t, 0.0, right.uniform - right.draw, fresh=right.draw)

    monkeypatch.setattr(native, "ancestral", without_coin_two)
    with pytest.raises(AssertionError):
        approaches_the_data_distribution("native", TABLE["native"])
    monkeypatch.undo()
    monkeypatch.setattr(gibbs, "redraw", lambda signal: transitions.redraw(signal + 1e-6 * (1 - signal)))
    with pytest.raises(AssertionError):
        keeps_every_level("gibbs", TABLE["gibbs"])


def test_how_far_approximate_corrections_are_off() -> None:
    """Two positions at once, and one position by margin, at signal .9."""
    source = chain(5)
    for parameters, distance in (("positions=2", 0.03), ("choose=margin", 0.16)):
        sampler = sampler_of("gibbs", f"corrections=1 predictor=native,grid=uniform {parameters}", 21)
        call = next(r for r in range(21) if sampler.scheduled(r) == (9, 8))
        level = source.schedule.level(sampler.inner.times[9])
        assert level == pytest.approx(0.9, abs=1e-3)
        probs = noisy(truth(source), level, 3, 5)
        found = float(total_variation(corrected_distribution(source, sampler, call, probs), probs))
        assert found == pytest.approx(distance, rel=0.1)


@dataclass(frozen=True)
class WrongPsi(Psi):
    """Psi that draws a uniform token instead of a predicted one, once in fifty times."""

    def coins(self, signal_t: float, signal_s: float, call: int) -> transitions.Coins:
        right = super().coins(signal_t, signal_s, call)
        return right._replace(draw=right.draw * 0.98)


@dataclass(frozen=True)
class WrongMend(Mend):
    """Mend that revises neighbours."""

    def update_values(self, choice: Choice) -> Tensor:
        return super(WrongMend, self.replace(revise_spacing=0)).update_values(choice)


@dataclass(frozen=True)
class WrongGIDD(GIDDAdaptive):
    """GIDD's adaptive rule with one position fewer per call."""

    def counts(self, ctx: Context) -> Tensor:
        return super().counts(ctx) - 1


WRONG = {"psi": WrongPsi(nfe=NFE), "mend": WrongMend(nfe=NFE, revise=9, spacing=0), "gidd-adaptive": WrongGIDD(nfe=NFE)}


@pytest.mark.parametrize("name", WRONG)
def test_another_rule_is_not_as_written(name: str) -> None:
    with pytest.raises(AssertionError, match=type(WRONG[name]).__name__):
        agrees(WRONG[name], TABLE[name].written, 8)
