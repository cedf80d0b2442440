"""Draws docs/images/trajectory.svg: some calls of a recorded trajectory, with noisy tokens, predictions, commits and
revisions. `python tools/trajectory_picture.py` writes it; a test holds it current."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import numpy as np

import limpet
from limpet.recording import Trajectory, record

FILE = Path(__file__).resolve().parents[1] / "docs/images/trajectory.svg"
SAMPLER, SEED = "mend nfe=12 top_p=.9", 8201
POSITIONS = slice(0, 24)
CALLS = (0, 4, 6, 8, 11)
LEFT, CELL, LINE, GAP, TOP = 152, 22, 24, 12, 34  # pixels
STYLE = """
text { font: 15px ui-monospace, monospace; fill: #1f2328; text-anchor: middle }
.name { font: 13px system-ui, sans-serif; text-anchor: end }
.key { font: 13px system-ui, sans-serif; text-anchor: start }
.noisy { fill: #6a737d } .sure { font-weight: 700 } .unsure { fill: #6a737d }
rect.committed { fill: #cfe5ff } rect.chosen { fill: none; stroke: #0969da; stroke-width: 2 }
rect.revised { fill: none; stroke: #bc4c00; stroke-width: 2.5; stroke-dasharray: 4 2 }
line { stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .noisy, .unsure { fill: #9ea7b3 }
rect.committed { fill: #12406f } rect.chosen { stroke: #6cb6ff }
rect.revised { stroke: #f0883e } line { stroke: #3d444d }
}
"""
KEY = (
    ("committed", "committed: read by every later call"),
    ("chosen", "committed by this call"),
    ("revised", "revised by this call"),
)


def recorded() -> Trajectory:
    """The trajectory that is drawn."""
    return record(limpet.load("exact:words"), SAMPLER, seed=SEED)


def box(kind: str, x: float, y: float) -> str:
    return f'<rect class="{kind}" x="{x - CELL / 2 + 1:g}" y="{y - 17}" width="{CELL - 2}" height="22" rx="3"/>'


def line(name: str, y: int, texts: list[str], kinds: list[str], boxes: dict[str, np.ndarray]) -> list[str]:
    """One line of the picture: its name, and a letter for each position."""
    parts = [f'<text class="name" x="{LEFT - 18}" y="{y}">{name}</text>']
    for column, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        x = LEFT + column * CELL
        parts += [box(mask, x, y) for mask, where in boxes.items() if where[column]]
        parts.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(text if text != " " else "␣")}</text>')
    return parts


def picture(trajectory: Trajectory) -> str:
    """The picture as SVG: for each call, what the network reads and what it predicts; then the output."""
    header, texts = trajectory.header, trajectory.token_texts
    parts, y = [], TOP
    for column, (kind, text) in enumerate(KEY):
        x = (24, 286, 470)[column]
        parts += [box(kind, x, 20), f'<text class="key" x="{x + 16}" y="20">{text}</text>']
    for call in CALLS:
        frame = trajectory.frames[call]
        masks = {mask: header.mask(frame, mask)[POSITIONS] for mask in header.masks}
        y += LINE + GAP
        read = [texts[int(token)] for token in frame.model_input[POSITIONS]]
        kinds = ["sure" if is_visible else "noisy" for is_visible in masks["visible"]]
        parts += line(f"call {call + 1} reads", y, read, kinds, {"committed": masks["visible"]})
        y += LINE
        best = [texts[int(token)] for token in frame.top_tokens[POSITIONS, 0]]
        kinds = ["sure" if deficit < 0.5 * 65535 else "unsure" for deficit in frame.deficit[POSITIONS]]
        parts += line("predicts", y, best, kinds, {one: masks[one] for one in ("chosen", "revised")})
        parts.append(f'<line x1="24" x2="{LEFT + 24 * CELL}" y1="{y + 13}" y2="{y + 13}"/>')
    y += LINE + GAP
    output = [texts[int(token)] for token in trajectory.frames[-1].tokens[POSITIONS]]
    parts += line("output", y, output, ["sure"] * len(output), {})
    width, height = LEFT + 24 * CELL + 8, y + 14
    title = f"{header.model}, {header.name}, seed {header.seed}: some of {header.calls} calls"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", "",
    ])  # fmt: skip


def main() -> int:
    """Write the picture."""
    FILE.write_text(picture(recorded()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
