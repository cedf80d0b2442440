"""How long each command takes: the seconds of one core that its examples use, kept in benchmarks/results/commands.json
and shown in docs/times.md.

    python tools/times.py          # from the root of the repository; minutes
    python tools/times.py --page   # the page alone, from the seconds kept
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
KEPT, PAGE = HERE / "benchmarks/results/commands.json", HERE / "docs/times.md"
COMMANDS = [  # in this order: some read what others wrote
    "limpet --help",
    "limpet doctor",
    "limpet info mini",
    "limpet samplers",
    "limpet sample --n 1 --nfe 16",
    "limpet sample --model exact:words --nfe 16 --n 8 --out words.jsonl",
    "limpet compare --model exact:words --nfe 8 --n 32",
    "limpet score words.jsonl",
    "limpet watch --model exact:words --nfe 16",
    "limpet sample --model exact:words --nfe 16 --n 1 --record words.limpet",
    "limpet view words.limpet",
    "limpet check exact:words --arm crs",
    "limpet tune exact:words --nfe 6 --n 4 --shards 2 --space 'mend late_top_p=1,.6'",
    "limpet study run factorial --preset smoke",
    "limpet study report factorial --preset smoke",
    "limpet audit temperature --preset smoke",
    "limpet theory separated-modes",
    "limpet train recipes/small/duo.toml",
    "limpet train recipes/small/judge.toml",
    "limpet train recipes/small/distilled.toml",
    "limpet bench --nfe 4 --batches 1 --runs 1",
]


def seconds(command: str, folder: Path) -> float:
    """Of one core, in a process of its own with one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call = [sys.executable, "-m", "limpet.cli.main", *shlex.split(command)[1:]]
    subprocess.run(call, cwd=folder, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)


def page(kept: dict[str, object], rows: dict[str, float]) -> str:
    lines = [f"| `{command}` | {taken:.1f} |" for command, taken in rows.items()]
    return "\n".join([
        "# How long it takes",
        "",
        "Seconds of one core, start-up included, with one thread, by `tools/times.py`",
        f"({kept['machine']}, Python {kept['python']}). `limpet serve` stays until it is stopped, and",
        "`limpet reproduce` says itself how long it will take.",
        "",
        "| command | seconds of one core |",
        "|---|---:|",
        *lines,
        "",
        "Time grows with the samples and with `--nfe`. What a study takes at each size, `limpet study list` says;",
        "on a GPU, read [Speed](speed.md).",
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    if "--page" not in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("recipes", "src"):
                Path(folder, name).symlink_to(HERE / name)
            rows = {}
            for command in COMMANDS:
                rows[command] = seconds(command, Path(folder))
                print(f"{rows[command]:6.1f} {command}", flush=True)
        about = {"machine": platform.machine(), "python": platform.python_version(), "seconds": rows}
        KEPT.write_text(json.dumps(about, indent=1) + "\n")
    kept = json.loads(KEPT.read_text())
    PAGE.write_text(page(kept, kept["seconds"]))
