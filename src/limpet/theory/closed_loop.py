"""What the theory leaves out: a sampler that inserts its own argmax, measured where the data law is known.

The theorems take context as given from outside. Here the sampler writes it itself, from its own guesses, on sources
with latent modes: is its output likelier, does it mix modes less, and which modes does it come down on?"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limpet.denoisers.exact import Mixture
from limpet.denoisers.sources import words as source_words
from limpet.policy import Policy
from limpet.samples import sample
from limpet.theory.figures import panels
from limpet.theory.rows import Row, estimate
from limpet.theory.sources import slipping

SEQUENCES = 256
NFE = 16


class Measures(NamedTuple):
    """What is measured on each sequence of a mixture, (n,) each; means over its phrases."""

    nll: Tensor  # nats per token under the data law
    agreement: Tensor  # share of tokens that the phrase's likeliest mode would write
    hybrid: Tensor  # share of phrases whose two halves come from different modes, each by its own likelihood
    favoured: Tensor  # posterior probability of the mode with the largest prior: for data its mean is that prior


NAMES = {
    "nll": "true NLL, nats per token",
    "agreement": "mode agreement",
    "hybrid": "hybrid rate",
    "favoured": "share of the favoured mode",
}


def measure(source: Mixture, tokens: Tensor) -> Measures:
    size = source.laws.shape[1]
    phrases = tokens.reshape(-1, size)
    evidence = source.laws[:, torch.arange(size), phrases].log()  # (K, P, S)
    prior = source.weights.log()[:, None]
    modes = (evidence.sum(-1) + prior).softmax(0)  # (K, P)
    likeliest = modes.argmax(0)
    agreement = (phrases == source.laws.argmax(-1)[likeliest]).double().mean(-1)
    first, second = ((half.sum(-1) + prior).argmax(0) for half in evidence.tensor_split([size // 2], -1))
    per_sequence = [agreement, (first != second).double(), modes[source.weights.argmax()]]
    return Measures(
        -source.log_prob(tokens) / tokens.shape[1],
        *(values.view(len(tokens), -1).mean(-1) for values in per_sequence),
    )


def phrasebook() -> Mixture:
    """Eight phrases of 16 tokens, 4 symbols, each from one of four modes that overlap: half a phrase often errs on
    its mode, a whole one seldom."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(4, (4, 16), generator=generator)
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    return slipping(words, 4, 0.4, weights, name="phrasebook", phrases=8)


def run(source: Mixture, policy: Policy, n: int) -> Measures:
    """Policies under one seed share their randomness, so that differences between them are paired."""
    return measure(source, sample(source, policy, n, seed=90, batch_size=n).tokens)


def contrasts(source: Mixture, arms: dict[str, Policy], n: int, keys: Iterable[str] = tuple(NAMES)) -> list[Row]:
    """Each measure of some policies against the native sampler's; no claim is made, the verdict says what was found."""
    made = []
    natives: dict[Policy, Measures] = {}  # the warmup places the grid, so each arm's native sampler has the arm's own
    for name, policy in arms.items():
        base = Policy(nfe=policy.nfe, warmup=policy.warmup, endpoint=policy.endpoint, horizon=0)
        if base not in natives:
            natives[base] = run(source, base, n)
        native, found = natives[base], run(source, policy, n)
        for key in keys:
            theirs, ours = getattr(native, key), getattr(found, key)
            (left, _), (right, _), (_, error) = estimate(ours), estimate(theirs), estimate(theirs - ours)
            where = f"{source.name}, {policy.endpoint}"
            made.append(Row(f"{NAMES[key]}: {name} ~ native", where, left, "~", right, error))
    return made


def rows() -> list[Row]:
    crs = Policy(nfe=NFE)
    arms = {
        "top-p 0.9": crs.but(horizon=0, top_p=0.9),
        "CRS": crs,
        "CRS, horizon 1": crs.but(horizon=1),
    }
    ancestral = {"CRS": crs.but(endpoint="ancestral")}
    harsh = {"CRS, no warmup": crs.but(warmup=0.0), "CRS, budget 0.1": crs.but(budget=0.1)}
    found = contrasts(phrasebook(), arms | harsh, SEQUENCES) + contrasts(phrasebook(), ancestral, SEQUENCES)
    # The halves of a four-letter word do not tell which word it is, so of hybrids nothing is said there.
    words = partial(contrasts, source_words(), n=SEQUENCES // 4, keys=("nll", "agreement"))
    return found + words(arms) + words(ancestral)


def figure() -> Any:
    source, crs = phrasebook(), Policy(nfe=NFE)
    n = SEQUENCES // 2
    native = run(source, crs.but(horizon=0), n)
    keys = ("nll", "hybrid", "favoured")
    sweeps: dict[str, list[tuple[float, Policy]]] = {
        "warmup": [(w, crs.but(warmup=w)) for w in (0.0, 0.1, 0.2, 0.33, 0.5, 0.67, 0.83)],
        "budget": [(b, crs.but(budget=b)) for b in (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)],
        "horizon": [(h, crs.but(horizon=h)) for h in (1, 2, 3, 4, 6, 8, 10)],
    }
    title = f"A sampler that inserts its own argmax: {source.name}, {NFE} calls, argmax endpoint, one standard error"
    drawing, axes = panels(title, len(sweeps), len(keys))
    for column, (knob, sweep) in enumerate(sweeps.items()):
        found = [(x, run(source, policy, n)) for x, policy in sweep]
        for row, key in enumerate(keys):
            panel = axes[row * len(sweeps) + column]
            means, errors = zip(*(estimate(getattr(measures, key)) for _, measures in found), strict=True)
            panel.errorbar([x for x, _ in found], means, errors, marker="o", capsize=2, label="CRS")
            panel.axhline(float(getattr(native, key).mean()), color="k", linestyle="--", label="native")
            if key == "favoured":
                panel.axhline(float(source.weights.max()), color="g", linestyle=":", label="data")
            panel.set_xlabel(knob)
            panel.set_ylabel(NAMES[key])
        axes[(len(keys) - 1) * len(sweeps) + column].legend()
    return drawing
