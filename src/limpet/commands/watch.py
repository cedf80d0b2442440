"""`limpet watch`: a sample comes into being in the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro
from rich.live import Live

from limpet.commands import DEFAULT_MODEL, Precision, out, precision_on
from limpet.compare import baselines
from limpet.denoisers.catalog import load
from limpet.errors import LimpetError
from limpet.policy import Policy
from limpet.view import terminal
from limpet.view.trajectory import Frame, Trajectory, Words, follow, name_of


def run(
    files: tyro.conf.Positional[tuple[Path, ...]] = (),
    /,
    *,
    model: str = DEFAULT_MODEL,
    against: str | None = None,
    prompt: str | None = None,
    length: int | None = None,
    seed: int = 8200,
    sample: int = 0,
    delay: float = 0.1,
    device: str | None = None,
    precision: Precision = "auto",
    policy: Annotated[Policy, tyro.conf.arg(name="")] = Policy(),
) -> None:
    """Watch a sample: live, or from recorded trajectories. Without policy flags this is CRS.

    $ limpet watch
    $ limpet watch --nfe 32 --against native
    $ limpet watch --against "top_p=0.9, horizon=0" --prompt "Once"
    $ limpet watch native.limpet crs.limpet

    Args:
        files: trajectories to play; without any, a sample is made and shown as it comes
        model: built-in name, folder, .safetensors or .ckpt file, owner/name on the hub, or exact:NAME
        against: a second arm on the same randomness: native, "top-p .9", or fields of the policy that differ
        prompt: text that the sample begins with
        length: tokens in the sample; the model's own unless told
        seed: the same seed gives the same sample as `limpet sample`
        sample: which of the seed's samples
        delay: seconds that a step stays, at least
        device: cpu, cuda, ...; a GPU where there is one
        precision: what the network runs in; auto is bfloat16 where the device has it
        policy: the sampler
    """
    if not 0 <= delay <= 60:
        raise LimpetError(f"delay is {delay}; it takes seconds from 0 to 60")
    if files:
        shown = recorded(files)
    else:
        arms = {name_of(policy): policy}
        if against is not None:
            name, other = parse_arm(against, policy)
            arms = {name: other, **arms}
            if len(arms) < 2:
                raise LimpetError(f"--against {against!r} is the same sampler as the policy: change one of them")
        denoiser = load(model, device=device, precision=precision_on(device, precision))
        headers, path = follow(denoiser, arms, seed, sample, length, prompt)
        shown = live([terminal.Reel(header) for header in headers], path, Words(denoiser.tokenizer))
    if not out.is_terminal:  # a file or a pipe gets the end alone
        *_, (reels, r) = shown
        out.print(terminal.render(reels, r, out.width))
        return
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as screen:
        for reels, r in shown:
            begun = time.monotonic()
            screen.update(terminal.render(reels, r, out.width), refresh=True)
            time.sleep(max(0.0, delay - (time.monotonic() - begun)))


Shown = Iterator[tuple[list[terminal.Reel], int]]  # the arms as far as they have come, and the frame to show


def live(reels: list[terminal.Reel], path: Iterator[tuple[Frame | None, ...]], words: Words) -> Shown:
    """Every frame as it is made."""
    for r, frames in enumerate(path):
        for reel, frame in zip(reels, frames, strict=True):
            if frame is not None:
                words.of(frame)
                reel.add(frame, words.told)
        yield reels, r


def recorded(files: tuple[Path, ...]) -> Shown:
    """Every frame of files, the shorter ones resting at their end."""
    reels = []
    for path in files:
        trajectory = Trajectory.load(path)
        reel = terminal.Reel(trajectory.header)
        for frame in trajectory.frames:
            reel.add(frame, trajectory.words)
        reels.append(reel)
    for r in range(max(reel.header.frames for reel in reels)):
        yield reels, r


def parse_arm(text: str, policy: Policy) -> tuple[str, Policy]:
    """A baseline by name, or the policy with some fields changed: "top_p=0.9, horizon=0"."""
    named = baselines(policy)
    if text in named:
        return text, named[text]
    changes = {}
    for part in text.split(","):
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise LimpetError(
                f"--against {text!r} is no arm: it takes {', '.join(name for name in named if name != 'CRS')}, or "
                'fields of the policy such as "top_p=0.9, horizon=0"'
            )
        try:
            changes[field.replace("-", "_")] = None if value.lower() == "none" else json.loads(value)
        except ValueError:
            changes[field.replace("-", "_")] = value
    return text, Policy.from_dict({**policy.to_dict(), **changes})
