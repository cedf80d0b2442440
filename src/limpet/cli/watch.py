"""`limpet watch`: a sample comes into being in the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tyro
from rich.live import Live

from limpet.cli.common import DEFAULT_MODEL, HERE, Arms, Length, Model, Somewhere, arms, out
from limpet.errors import LimpetError
from limpet.recording import terminal
from limpet.recording.trajectory import Trajectory, follow


def run(
    files: tyro.conf.Positional[tuple[Path, ...]] = (),
    /,
    *,
    model: Model = DEFAULT_MODEL,
    arm: Arms = (),
    nfe: int | None = None,
    prompt: str | None = None,
    length: Length = None,
    seed: int = 8200,
    sample: int = 0,
    delay: float = 0.1,
    where: Somewhere = HERE,
) -> None:
    """Watch a sample under one or more samplers: live, or from recorded trajectories.

    $ limpet watch
    $ limpet watch --nfe 32 --arm native --arm crs
    $ limpet watch --arm "native top_p=.9" --arm ./mine.py:Mine --prompt "Once"
    $ limpet watch native.limpet crs.limpet

    Args:
        files: trajectories to play; without any, a sample is made and shown as it comes
        nfe: network calls of the arms that say no number
        prompt: text that the sample begins with
        seed: the same seed gives the same sample as `limpet sample`
        sample: which of the seed's samples
        delay: seconds that a call stays, at least
    """
    if not 0 <= delay <= 60:
        raise LimpetError(f"delay is {delay}; it takes seconds from 0 to 60")
    walk: Iterable[Any]
    if files:
        paths = [Trajectory.load(path) for path in files]
        walk = range(max(path.header.frames for path in paths))
    else:
        samplers = arms(arm or ("crs",), nfe)
        paths, walk = follow(where.load(model), samplers, seed, sample, length, prompt)
    if not out.is_terminal:  # a file or a pipe gets the end alone
        *_, (r, _) = enumerate(walk)
        out.print(terminal.render(paths, r, out.width))
        return
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as screen:
        for r, _ in enumerate(walk):
            begun = time.monotonic()
            screen.update(terminal.render(paths, r, out.width), refresh=True)
            time.sleep(max(0.0, delay - (time.monotonic() - begun)))
