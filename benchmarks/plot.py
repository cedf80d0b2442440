"""Draw docs/images/speed.png from a run of benchmarks/gpu.py.

python benchmarks/plot.py benchmarks/results/h200.json docs/images/speed.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROWS = (
    ("released top-p .9", "#7f7f7f"), ("released native", "#b0b0b0"), ("bare", "#222222"),
    ("native", "#4477aa"), ("top-p .9", "#66ccee"), ("CRS", "#ee6677"),
)  # fmt: skip


def main(source: Path, target: Path) -> None:
    found = json.loads(source.read_text())
    cells = [(64, 64), (64, 8), (16, 64), (16, 8)]
    figure, axes = plt.subplots(1, len(cells), figsize=(13, 3.4), sharey=True)
    for axis, (batch, nfe) in zip(axes, cells, strict=True):
        for place, (name, colour) in enumerate(ROWS):
            row = found.get(f"batch {batch} nfe {nfe} {name}")
            if row is None:
                continue
            if "seconds" not in row:
                axis.text(1, place, "out of memory", va="center", fontsize=8)
                continue
            milliseconds = 1000 * row["seconds"] / nfe
            axis.barh(place, milliseconds, color=colour)
            axis.text(milliseconds, place, f" {milliseconds:.1f}", va="center", fontsize=8)
        axis.set_title(f"batch {batch}, {nfe} calls", fontsize=10)
        axis.set_yticks(range(len(ROWS)), [name for name, _ in ROWS], fontsize=9)
        axis.set_xlabel("ms a call")
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"One call of the 169.6M network and all that goes with it, {found['device']}", fontsize=11)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
