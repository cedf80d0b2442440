"""`limpet watch`: a sample takes shape in the terminal."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tyro
from rich.live import Live

from limpet.cli.common import (
    DEFAULT_LOADING,
    DEFAULT_MODEL,
    Length,
    Loading,
    Model,
    SamplerTexts,
    Sharpness,
    captioned_sampler,
    out,
)
from limpet.errors import LimpetError
from limpet.generation import SEED
from limpet.recording import terminal
from limpet.recording.trajectory import Trajectory, follow
from limpet.samplers import named_samplers
from limpet.samplers.recommended import check_not_both


def run(
    files: tyro.conf.Positional[tuple[Path, ...]] = (),
    /,
    *,
    model: Model = DEFAULT_MODEL,
    sampler: SamplerTexts = (),
    nfe: int | None = None,
    sharpness: Sharpness = None,
    prompt: str | None = None,
    length: Length = None,
    seed: int = SEED,
    sample: int = 0,
    delay: float = 0.1,
    loading: Loading = DEFAULT_LOADING,
) -> None:
    """Watch a sample under one or more samplers, live or from recorded trajectories.

    $ limpet watch
    $ limpet watch --nfe 32 --sampler native --sampler crs
    $ limpet watch --sampler "native top_p=.9" --sampler ./mine.py:Mine
    $ limpet watch native.limpet crs.limpet

    Args:
        files: recorded trajectories to play (default: draw a sample and show each call)
        nfe: network calls of the samplers that do not set their own
        prompt: text that the sample begins with
        seed: the same seed gives the same sample as `limpet sample`, up to a network's rounding
        sample: the number of the sample under the seed
        delay: least time in seconds that a call is shown
    """
    if not 0 <= delay <= 60:
        raise LimpetError(f"delay is {delay}; it takes seconds from 0 to 60")
    frames: Iterable[Any]
    if files:
        trajectories = [Trajectory.load(file) for file in files]
        frames = range(max(trajectory.header.frames for trajectory in trajectories))
    else:
        check_not_both(sampler, sharpness)
        samplers, denoiser = named_samplers(sampler, nfe), loading.load(model)
        samplers = samplers or dict([captioned_sampler(None, nfe, sharpness, denoiser)])
        trajectories, frames = follow(denoiser, samplers, seed, sample, length, prompt)
    if not out.is_terminal:  # a file or a pipe gets the last frame alone
        *_, (number, _) = enumerate(frames)
        out.print(terminal.render(trajectories, number, out.width))
        return
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as screen:
        for number, _ in enumerate(frames):
            begun = time.monotonic()
            screen.update(terminal.render(trajectories, number, out.width), refresh=True)
            time.sleep(max(0.0, delay - (time.monotonic() - begun)))
