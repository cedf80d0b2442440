"""A sampler that commits its own argmax, measured on samples from sources whose distribution is known.

The theorems take context as given from outside. CRS writes its own context, from its own predictions. Is its output
likelier, does it mix modes less, and which modes does it prefer?"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from limpet.evaluation import mean_se
from limpet.experiments import Panel, estimate_series
from limpet.generation import sample
from limpet.models.exact import Mixture, codebook
from limpet.models.exact_sources import words
from limpet.paper.theory.checks import Check, compare_means, line
from limpet.samplers import CRS, Native

SEQUENCES = 256
NFE = 16
TITLES = {
    "nll": "true NLL, nats per token",
    "agreement": "mode agreement",
    "hybrid": "hybrid rate",
    "favoured": "share of the favoured mode",
}


def measure(source: Mixture, tokens: Tensor) -> dict[str, Tensor]:
    """The measures of each sequence of a mixture, (n,) each. All but the NLL are means over its phrases."""
    size = source.distributions.shape[1]
    phrases = tokens.reshape(-1, size)
    evidence = source.distributions[:, torch.arange(size), phrases].log()  # (K, P, S)
    prior = source.weights.log()[:, None]
    modes = (evidence.sum(-1) + prior).softmax(0)  # (K, P)
    first, second = ((half.sum(-1) + prior).argmax(0) for half in evidence.tensor_split([size // 2], -1))
    by_phrase = {
        # the share of tokens that are the argmax of the phrase's likeliest mode
        "agreement": (phrases == source.distributions.argmax(-1)[modes.argmax(0)]).double().mean(-1),
        # whether the two halves, each by its own likelihood, come from different modes
        "hybrid": (first != second).double(),
        # the posterior probability of the mode with the largest prior; its mean over data is that prior
        "favoured": modes[source.weights.argmax()],
    }
    by_sequence = {name: values.view(len(tokens), -1).mean(-1) for name, values in by_phrase.items()}
    return {"nll": -source.log_prob(tokens) / tokens.shape[1], **by_sequence}


def phrasebook() -> Mixture:
    """Eight phrases of 16 tokens over 4 symbols, each from one of four modes that overlap.

    Half a phrase often looks like another mode, a whole phrase seldom does."""
    modes = torch.randint(4, (4, 16), generator=torch.Generator().manual_seed(5))
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    return codebook(modes, 4, weights, "phrasebook", slip=0.4, phrases=8)


def run(source: Mixture, sampler: Native, n: int) -> dict[str, Tensor]:
    """The measures of n samples. Samplers share their randomness, so differences between them are paired."""
    return measure(source, sample(source, sampler, n, seed=90, batch_size=n).tokens)


def contrasts(source: Mixture, samplers: dict[str, Native], n: int, *keys: str) -> list[Check]:
    """Each measure of some samplers beside the native sampler's. Nothing is claimed."""
    rows = []
    for name, sampler in samplers.items():
        # The warmup places the time grid.
        native = Native(nfe=sampler.nfe, warmup=sampler.warmup, final_step=sampler.final_step)
        ours, theirs, where = run(source, sampler, n), run(source, native, n), f"{source.name}, {final(sampler)}"
        rows += [compare_means(f"{TITLES[key]}: {name} ~ native", where, ours[key], "~", theirs[key]) for key in keys]
    return rows


def final(sampler: Native) -> str:
    """The final step of a sampler, as the tables name it."""
    return f"final_step={sampler.final_step}"


def checks() -> list[Check]:
    crs = CRS(nfe=NFE)
    ancestral: dict[str, Native] = {"CRS": crs.replace(final_step="sample")}
    argmax = {
        "top-p 0.9": Native(nfe=NFE, final_step="argmax", top_p=0.9),
        "CRS": crs,
        "CRS, horizon 1": crs.replace(horizon=1),
    }
    extreme = {"CRS, no warmup": crs.replace(warmup=0.0), "CRS, budget 0.1": crs.replace(budget=0.1)}
    rows = contrasts(phrasebook(), argmax | extreme, SEQUENCES, *TITLES)
    rows += contrasts(phrasebook(), ancestral, SEQUENCES, *TITLES)
    # Half of a four-letter word does not decide which word it is, so hybrids are not counted there.
    for samplers in (argmax, ancestral):
        rows += contrasts(words(), samplers, SEQUENCES // 4, "nll", "agreement")
    return rows


def panels() -> Iterator[Panel]:
    source, crs, n = phrasebook(), CRS(nfe=NFE), SEQUENCES // 2
    native = run(source, Native(nfe=NFE, final_step="argmax"), n)
    sweeps: dict[str, tuple[float, ...]] = {
        "warmup": (0.0, 0.1, 0.2, 0.33, 0.5, 0.67, 0.83),
        "budget": (0.05, 0.1, 0.15, 0.2, 0.3, 0.5),
        "horizon": (1, 2, 3, 4, 6, 8, 10),
    }
    runs = {param: [run(source, crs.replace(**{param: x}), n) for x in sweep] for param, sweep in sweeps.items()}
    for key, (param, sweep) in product(("nll", "hybrid", "favoured"), sweeps.items()):
        estimates, ends = [mean_se(measures[key]) for measures in runs[param]], (sweep[0], sweep[-1])
        lines = [
            estimate_series("CRS", sweep, estimates, style="o-"),
            line("native", ends, [native[key].mean()] * 2, "k--"),
        ]
        if key == "favoured":
            lines.append(line("data", ends, [source.weights.max()] * 2, "g:"))
        yield Panel("", param, TITLES[key], lines)
