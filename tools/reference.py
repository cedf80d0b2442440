"""Writes what the documentation repeats from the code: the help of every command, the parameters of every sampler,
memory per GPU, what the paper reports of Duo, and `llms.txt`.

`python tools/reference.py` writes the blocks of docs/cli*.md, docs/parameters*.md, docs/checkpoints.md and docs/duo.md,
and docs/llms.txt. A test holds them current."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from blocks import block_of, put
from limpet import samplers
from limpet.cli import main as command_line
from limpet.cli.samplers import describe
from limpet.samplers.builtin import BUILTIN

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks/results"
PAPER = ROOT / "src/limpet/paper/studies/paper.toml"
COLUMNS = "80"  # of the help
SOURCES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
SUMMARY = (
    "limpet samples uniform-state discrete diffusion models (Duo, UDLM, GIDD, Sumi, DiffusionGemma) with committed "
    "reveal sampling (CRS), its successor Mend and other samplers, and compares them fairly."
)
COMMAND_PAGES = {  # page -> its commands
    "cli.md": "sample infill bulk watch view info check",
    "cli-compare.md": "compare score samplers tune study bench",
    "cli-serve.md": "serve train doctor paper",
}
PARAMETER_PAGES = {  # page -> its samplers
    "parameters.md": "native crs mend psi ddim gibbs trapezoidal tau-leaping forward-backward",
    "parameters-others.md": (
        "rdm confidence-threshold entropy-bound block-refinement gidd-adaptive gidd-correction guided"
    ),
}
GIB = 2**30
SIZES = {  # model on the hub: its parameters
    "UDLM, 139M": 139e6,
    "Duo, 424M": 424e6,
    "gidd-unif 3B": 3e9,
    "gidd-unif 10B": 10e9,
    "DiffusionGemma 26B": 25.2e9,
}


def help_of(name: str) -> str:
    """What `limpet NAME --help` prints at 80 columns."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": COLUMNS, "NO_COLOR": "1"}),
        redirect_stdout(printed),
        suppress(SystemExit),
    ):
        command_line.main([*name.split(), "--help"])
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().split("\n"))


def commands(page: str) -> str:
    """The help of the commands of a page, each under its name."""
    parts, own = [], COMMAND_PAGES[page].split()
    names = {name: command_line.COMMANDS[name] for name in own if name != "paper"}
    if "paper" in own:
        names |= {f"paper {name}": what for name, what in command_line.PAPER.items()}
    for name, what in names.items():
        parts.append(f"## limpet {name}\n\n{what[0].upper()}{what[1:]}.\n\n```text\n{help_of(name)}\n```")
    return "\n\n".join(parts)


def parameters(page: str) -> str:
    """A table for each sampler of a page. Of one that inherits, what it adds and the defaults that it changes."""
    parts = []
    kinds = {name: samplers.find(name) for name in BUILTIN}
    described = {name: describe(name, kind) for name, kind in kinds.items()}
    for name in PARAMETER_PAGES[page].split():
        kind = kinds[name]
        parents = [other for other, base in kinds.items() if base is not kind and issubclass(kind, base)]
        known: list[Any] = []
        ending = ""
        if parents:
            parent = max(parents, key=lambda other: len(kinds[other].__mro__))
            known = described[parent]["parameters"]
            ending = f" It also has the parameters of `{parent}`."
        own = [param for param in described[name]["parameters"] if param not in known]
        rows = ["| parameter | default | takes | meaning |", "|---|---|---|---|"]
        rows += [f"| `{one['name']}` | {one['default']} | {one['takes']} | {one['help']} |" for one in own]
        parts.append("\n".join([f"## {name}", "", f"{described[name]['description']}{ending}", "", *rows]))
    return "\n\n".join(parts)


def memory() -> str:
    """Peak memory on one GPU, measured; and the weights alone of what was not measured, from the parameters."""
    h200 = json.loads((RESULTS / "h200.json").read_text())
    large = json.loads((RESULTS / "large.json").read_text())
    rows = [
        "| model | batch | weights, GiB | peak with native, GiB | peak with CRS, GiB | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for batch in (1, 16, 64, 256):
        peaks = [f"{h200[f'batch {batch} nfe 64 {name}']['peak_gib']:.1f}" for name in ("native", "CRS")]
        rows.append(f"| Duo, 169.6M | {batch} | {169_627_218 * 2 / GIB:.1f} | {' | '.join(peaks)} | measured |")
    for name, found in large.items():
        if isinstance(found, dict) and "weights GiB" in found:
            shape, _, batch = name.partition(", batch ")
            peaks = [f"{found['costs'][one]['peak_gib']:.1f}" for one in ("native", "CRS")]
            rows.append(f"| {shape} | {batch} | {found['weights GiB']:.1f} | {' | '.join(peaks)} | measured |")
    rows += [f"| {name} | | {size * 2 / GIB:.1f} | | | from its parameters |" for name, size in SIZES.items()]
    return "\n".join(rows)


def expected() -> str:
    """What the paper reports of Duo-distilled, and what the calls cost on an H200."""
    reported = tomllib.loads(PAPER.read_text(encoding="utf-8"))["nfe-scaling"]
    h200 = json.loads((RESULTS / "h200.json").read_text())
    rows = ["| calls | sampler | GenPPL in the paper | entropy in the paper | 64 samples on one H200, seconds |",
            "|---:|---|---:|---:|---:|"]  # fmt: skip
    for nfe in (8, 16, 32, 64):
        for name, key in (("`native final_step=argmax`", "native"), ("`crs`", "CRS")):
            cells = reported[f"distilled/{nfe}/{key}"]
            time = h200.get(f"batch 64 nfe {nfe} {key}")
            seconds = f"{time['seconds']:.2f}" if time else ""
            rows.append(f"| {nfe} | {name} | {cells['ppl']} | {cells['entropy']} | {seconds} |")
    return "\n".join(rows)


def pages() -> Iterator[tuple[str, str]]:
    """(part of the site, page) of every page in the navigation, in its order."""

    def walk(part: str, entries: list[Any]) -> Iterator[tuple[str, str]]:
        for entry in entries:
            if isinstance(entry, str):
                yield part, entry
            else:
                for name, inner in entry.items():
                    yield from [(part, inner)] if isinstance(inner, str) else walk(part or name, inner)

    return walk("", yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


def source(page: str) -> Path:
    """The file of a page: a few of them are not in docs."""
    return ROOT / SOURCES[page] if page in SOURCES else DOCS / page


def opening(text: str) -> tuple[str, str]:
    """(title, first sentence) of a page."""
    title, _, rest = text.partition("\n\n")
    first = " ".join(next(part for part in rest.split("\n\n") if not part.startswith(("**In short", "#"))).split())
    first = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", first).replace("**", "")
    sentence = re.match(r".*?[.!?](?= |$)", first)
    return title.removeprefix("# "), sentence[0] if sentence else first


def llms() -> str:
    """The site for language models (llmstxt.org): every page with its first sentence."""
    lines, current = ["# limpet", "", f"> {SUMMARY}"], ""
    for part, page in pages():
        if part != current:
            lines += ["", f"## {part}", ""]
            current = part
        title, sentence = opening(source(page).read_text(encoding="utf-8"))
        lines.append(f"- [{title}]({page}): {sentence}")
    return "\n".join(lines) + "\n"


BLOCKS: dict[tuple[str, str], Callable[[], str]] = {  # page, block -> its content
    **{(page, "commands"): partial(commands, page) for page in COMMAND_PAGES},
    **{(page, "parameters"): partial(parameters, page) for page in PARAMETER_PAGES},
    ("checkpoints.md", "memory"): memory,
    ("duo.md", "expected"): expected,
}


def outdated() -> list[str]:
    """The generated parts that are not what this tool writes now."""
    found = [f"{page}: {name}" for (page, name), make in BLOCKS.items() if block_of(DOCS / page, name) != make()]
    is_current = (DOCS / "llms.txt").exists() and (DOCS / "llms.txt").read_text(encoding="utf-8") == llms()
    return found + ["llms.txt"] * (not is_current)


def main() -> int:
    """Write every block, and llms.txt."""
    for (page, name), make in BLOCKS.items():
        put(DOCS / page, name, make())
    (DOCS / "llms.txt").write_text(llms(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
