"""`limpet view`: recorded trajectories as one self-contained page."""

from pathlib import Path
from typing import Annotated

import tyro

from limpet.cli.common import err
from limpet.errors import LimpetError
from limpet.files import write_file
from limpet.recording import page
from limpet.recording.trajectory import Trajectory, share_randomness


def run(
    files: tyro.conf.Positional[tuple[Path, ...]],
    /,
    *,
    out_file: Annotated[Path, tyro.conf.arg(name="out", aliases=["-o"])] = Path("page.html"),
    title: str | None = None,
) -> None:
    """Write one HTML page that shows trajectories side by side. The page needs no network and no other file.

    $ limpet sample --n 1 --record crs.limpet
    $ limpet sample --n 1 --sampler native --record native.limpet
    $ limpet view native.limpet crs.limpet -o page.html

    Args:
        files: trajectories, as `limpet sample --record` writes them
        out_file: the page to write
        title: the page's heading; default: the names of the models
    """
    if not files:
        raise LimpetError("there is nothing to view: name one or more trajectories (`limpet sample --record FILE`)")
    trajectories = [Trajectory.load(path) for path in files]
    write_file(out_file, page.self_contained(trajectories, title))
    err.print(f"wrote {out_file}: open it in a browser", markup=False)
    if not share_randomness([trajectory.header for trajectory in trajectories]):
        err.print("the trajectories differ in model, seed, sample or length, so their randomness differs", markup=False)
