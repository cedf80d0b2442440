"""`limpet view`: recorded trajectories as one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from limpet.cli.common import err
from limpet.errors import LimpetError
from limpet.files import write_whole
from limpet.recording import page
from limpet.recording.trajectory import Trajectory, same_randomness


def run(
    files: tyro.conf.Positional[tuple[Path, ...]],
    /,
    *,
    out_file: Annotated[Path, tyro.conf.arg(name="out", aliases=["-o"])] = Path("page.html"),
    title: str | None = None,
) -> None:
    """Write one HTML page that shows trajectories side by side. It holds all it needs and reaches no network.

    $ limpet sample --n 1 --record crs.limpet
    $ limpet sample --n 1 --arm native --record native.limpet
    $ limpet view native.limpet crs.limpet -o page.html

    Args:
        files: trajectories, one for each arm
        out_file: the page
        title: its heading
    """
    if not files:
        raise LimpetError("there is nothing to view: name one or more trajectories (`limpet sample --record FILE`)")
    trajectories = [Trajectory.load(path) for path in files]
    write_whole(out_file, page.self_contained(trajectories, title))
    err.print(f"wrote {out_file}: open it in a browser", markup=False)
    if not same_randomness([trajectory.header for trajectory in trajectories]):
        err.print("these trajectories do not share model, seed, sample and length: the page says so", markup=False)
