"""What the theory leaves out: a sampler that inserts its own argmax, measured where the data distribution is known.

The theorems take context as given from outside. Here the sampler writes it itself, from its own guesses, on sources
with latent modes: is its output likelier, does it mix modes less, and which modes does it come down on?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import torch
from torch import Tensor

from limpet.evaluation import statistics
from limpet.experiments.contents import Panel, series
from limpet.generation import sample
from limpet.models.exact import Mixture, codebook
from limpet.models.exact_sources import words
from limpet.paper.theory.sides import Sides, line, measured
from limpet.samplers import CRS, Native

SEQUENCES = 256
NFE = 16
NAMES = {
    "nll": "true NLL, nats per token",
    "agreement": "mode agreement",
    "hybrid": "hybrid rate",
    "favoured": "share of the favoured mode",
}


def measure(source: Mixture, tokens: Tensor) -> dict[str, Tensor]:
    """What is measured on each sequence of a mixture, (n,) each; but for the first, means over its phrases."""
    size = source.distributions.shape[1]
    phrases = tokens.reshape(-1, size)
    evidence = source.distributions[:, torch.arange(size), phrases].log()  # (K, P, S)
    prior = source.weights.log()[:, None]
    modes = (evidence.sum(-1) + prior).softmax(0)  # (K, P)
    first, second = ((half.sum(-1) + prior).argmax(0) for half in evidence.tensor_split([size // 2], -1))
    by_phrase = {
        # the share of tokens that the phrase's likeliest mode would write
        "agreement": (phrases == source.distributions.argmax(-1)[modes.argmax(0)]).double().mean(-1),
        # whether its two halves come from different modes, each by its own likelihood
        "hybrid": (first != second).double(),
        # the posterior probability of the mode with the largest prior: for data its mean is that prior
        "favoured": modes[source.weights.argmax()],
    }
    by_sequence = {name: values.view(len(tokens), -1).mean(-1) for name, values in by_phrase.items()}
    return {"nll": -source.log_prob(tokens) / tokens.shape[1], **by_sequence}


def phrasebook() -> Mixture:
    """Eight phrases of 16 tokens, 4 symbols, each from one of four modes that overlap: half a phrase often errs on
    its mode, a whole one seldom."""
    modes = torch.randint(4, (4, 16), generator=torch.Generator().manual_seed(5))
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    return codebook(modes, 4, weights, "phrasebook", slip=0.4, phrases=8)


def run(source: Mixture, sampler: Native, n: int) -> dict[str, Tensor]:
    """Samplers under one seed share their randomness, so that differences between them are paired."""
    return measure(source, sample(source, sampler, n, seed=90, batch_size=n).tokens)


def contrasts(source: Mixture, arms: dict[str, Native], n: int, keys: Iterable[str] = tuple(NAMES)) -> list[Sides]:
    """Each measure of some arms against the native sampler's; no claim is made, the verdict says what was found."""
    made = []
    for name, arm in arms.items():
        native = Native(nfe=arm.nfe, warmup=arm.warmup, final_step=arm.final_step)  # the warmup places the grid
        ours, theirs, where = run(source, arm, n), run(source, native, n), f"{source.name}, {arm.final_step}"
        made += [measured(f"{NAMES[key]}: {name} ~ native", where, ours[key], "~", theirs[key]) for key in keys]
    return made


def sides() -> list[Sides]:
    crs = CRS(nfe=NFE)
    arms = {"top-p 0.9": Native(nfe=NFE, top_p=0.9), "CRS": crs, "CRS, horizon 1": crs.replace(horizon=1)}
    harsh = {"CRS, no warmup": crs.replace(warmup=0.0), "CRS, budget 0.1": crs.replace(budget=0.1)}
    ancestral: dict[str, Native] = {"CRS": crs.replace(final_step="sample")}
    found = contrasts(phrasebook(), arms | harsh, SEQUENCES) + contrasts(phrasebook(), ancestral, SEQUENCES)
    # The halves of a four-letter word do not tell which word it is, so of hybrids nothing is said there.
    n, keys = SEQUENCES // 4, ("nll", "agreement")
    return found + contrasts(words(), arms, n, keys) + contrasts(words(), ancestral, n, keys)


def panels() -> Iterator[Panel]:
    source, crs, n = phrasebook(), CRS(nfe=NFE), SEQUENCES // 2
    native = run(source, Native(nfe=NFE), n)
    sweeps: dict[str, tuple[float, ...]] = {
        "warmup": (0.0, 0.1, 0.2, 0.33, 0.5, 0.67, 0.83),
        "budget": (0.05, 0.1, 0.15, 0.2, 0.3, 0.5),
        "horizon": (1, 2, 3, 4, 6, 8, 10),
    }
    found = {
        param: [run(source, crs.replace(**{param: value}), n) for value in sweep] for param, sweep in sweeps.items()
    }

    for key, (param, sweep) in product(("nll", "hybrid", "favoured"), sweeps.items()):
        over, ends = [statistics.mean_se(measures[key]) for measures in found[param]], (sweep[0], sweep[-1])
        lines = [series("CRS", sweep, over, style="o-"), line("native", ends, [float(native[key].mean())] * 2, "k--")]
        data = [line("data", ends, [float(source.weights.max())] * 2, "g:")]
        yield Panel("", param, NAMES[key], lines + data if key == "favoured" else lines)
