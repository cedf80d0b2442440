"""Draw docs/images/speed.png from a run of benchmarks/gpu.py, and print the tables of docs/speed.md.

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

from limpet import style

ROWS = ("released top-p .9", "released native", "bare", "own forward", "native", "top-p .9", "CRS")


def table(found: dict[str, Any]) -> Iterator[str]:
    """One Markdown row for each measurement, in order."""
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


def beside(found: dict[str, Any]) -> Iterator[str]:
    """Every sampler beside native sampling, as many calls each."""
    yield "| calls | | of native | of bare | peak GiB | head rows |"
    yield "|---|---|---|---|---|---|"
    for nfe in (64, 8):
        rows = found[f"samplers {nfe}"]
        for name, row in rows.items():
            if name not in ("bare", "own forward"):
                times = row["seconds"] / rows["native"]["seconds"]
                yield (
                    f"| {nfe} | {name} | {times:.3f} | {row['ratio']:.3f} | {row['peak_gib']:.1f} "
                    f"| {row['head_rows']:.3f} |"
                )


def draw(found: dict[str, Any], target: Path) -> None:
    paper, cells = style.colours(), [(64, 64), (64, 8), (16, 64), (16, 8)]
    figure, axes = plt.subplots(1, len(cells), figsize=(13, 3.6), sharey=True)
    for axis, (batch, nfe) in zip(axes, cells, strict=True):
        for place, name in enumerate(ROWS):
            row = found.get(f"batch {batch} nfe {nfe} {name}")
            if row is None:
                axis.text(0, place, " not measured", va="center", fontsize=8, color=paper["soft"])
                continue
            if "seconds" not in row:
                axis.barh(
                    place, 1, color="none", edgecolor=paper["alarm"], hatch="////", transform=axis.get_yaxis_transform()
                )
                axis.text(0.5, place, "out of memory", va="center", ha="center", fontsize=8, color=paper["alarm"],
                          transform=axis.get_yaxis_transform(), backgroundcolor=paper["card"])  # fmt: skip
                continue
            milliseconds = 1000 * row["seconds"] / nfe
            released = name.startswith("released")  # the same sampler, by its authors' functions
            own = paper[style.family(name) or ("ink" if name == "bare" else "soft")]
            axis.barh(
                place,
                milliseconds,
                color=paper["card"] if released else own,
                edgecolor=own,
                hatch="..." if released else "",
            )
            axis.text(milliseconds, place, f" {milliseconds:.1f}", va="center", fontsize=8)
        axis.set_title(f"batch {batch}, {nfe} calls", fontsize=10)
        axis.set_yticks(range(len(ROWS)), ROWS, fontsize=9)
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
    print("\n".join([*table(results), "", *beside(results)]))
