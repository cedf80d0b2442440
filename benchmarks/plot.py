"""Draw docs/images/speed.png from a run of benchmarks/gpu.py, and print the table of docs/speed.md.

python benchmarks/plot.py benchmarks/results/h200.json docs/images/speed.png
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROWS = (
    ("released top-p .9", "#7f7f7f"), ("released native", "#b0b0b0"), ("bare", "#222222"), ("own forward", "#555555"),
    ("native", "#4477aa"), ("top-p .9", "#66ccee"), ("CRS", "#ee6677"),
)  # fmt: skip


def table(found: dict[str, Any]) -> Iterator[str]:
    """One Markdown row a measurement, in the order they were made."""
    yield "| batch | calls | | ms a call | of bare | least, most | peak GiB | tokens/s | head rows |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for key, row in found.items():
        if not (named := re.fullmatch(r"batch (\d+) nfe (\d+) (.+)", key)):
            continue
        batch, nfe, name = named.groups()
        if "seconds" not in row:
            yield f"| {batch} | {nfe} | {name} | out of memory | | | | | |"
            continue
        yield (
            f"| {batch} | {nfe} | {name} | {1000 * row['seconds'] / int(nfe):.1f} | {row['ratio']:.3f} "
            f"| {min(row['ratios']):.3f}, {max(row['ratios']):.3f} | {row['peak_gib']:.1f} "
            f"| {row['tokens_per_second']:,.0f} | {row['head_rows']:.3f} |"
        )


def draw(found: dict[str, Any], target: Path) -> None:
    cells = [(64, 64), (64, 8), (16, 64), (16, 8)]
    figure, axes = plt.subplots(1, len(cells), figsize=(13, 3.6), sharey=True)
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
    results = json.loads(Path(sys.argv[1]).read_text())
    draw(results, Path(sys.argv[2]))
    print("\n".join(table(results)))
