"""`limpet infill LEFT RIGHT`: draw what stands between two texts."""

import tyro

from limpet.cli.common import (
    DEFAULT_LOADING,
    DEFAULT_MODEL,
    Loading,
    Model,
    SamplerText,
    Sharpness,
    captioned_sampler,
    progress,
)
from limpet.cli.sample import print_texts
from limpet.cli.streams import print_json
from limpet.generation import SEED, infill
from limpet.samplers.recommended import NFE


def run(
    left: tyro.conf.Positional[str],
    right: tyro.conf.Positional[str],
    /,
    *,
    gap: int = 16,
    model: Model = DEFAULT_MODEL,
    sampler: SamplerText = None,
    nfe: int = NFE,
    sharpness: Sharpness = None,
    n: int = 4,
    seed: int = SEED,
    batch_size: int | None = None,
    loading: Loading = DEFAULT_LOADING,
    json: bool = False,
) -> None:
    """Draw what stands between two texts. `limpet sample --fix` fixes words at any position.

    $ limpet infill "The sea" " and went home." --gap 12
    $ limpet infill "Once upon a time" " happily ever after." --gap 40 --n 2 --json

    Args:
        left: the text before the gap
        right: the text after it; a new word begins with a space
        gap: tokens between the two
        nfe: network calls for each sample, where the sampler does not set its own
        n: how many samples
        seed: the same seed gives the same samples, whatever the batch size, up to a network's rounding
        batch_size: samples computed at once
        json: print JSON lines, one for each sample, instead of texts
    """
    captioned_sampler(sampler, nfe, sharpness)  # before the model is loaded
    denoiser = loading.load(model)
    caption, chosen = captioned_sampler(sampler, nfe, sharpness, denoiser)
    with progress(f"{denoiser.name}, {caption}", n * chosen.nfe) as update:
        report = lambda done, total: update(completed=done)  # noqa: E731
        samples = infill(denoiser, left, right, gap, chosen, n, seed, batch_size, report)
    if json:
        print_json(samples.lines())
    else:
        print_texts(denoiser, samples)
