"""Measure how long each command takes, in seconds of one core, and fill docs/times.md.

python tools/times.py          # from the root of the repository; minutes
python tools/times.py --page   # the page alone, from the seconds in benchmarks/results/commands.json"""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/commands.json", ROOT / "docs/times.md"
COMMANDS = [  # in this order: some read what others wrote
    "limpet --help",
    "limpet doctor",
    "limpet info mini",
    "limpet samplers",
    "limpet sample --n 1 --nfe 16",
    "limpet sample --model exact:words --nfe 16 --n 8 --out words.jsonl",
    "limpet infill 'The sea' ' and went home.' --gap 12 --nfe 16 --n 1",
    "limpet compare --model exact:words --nfe 8 --n 32",
    "limpet score words.jsonl",
    "limpet watch --model exact:words --nfe 16",
    "limpet sample --model exact:words --nfe 16 --n 1 --record words.limpet",
    "limpet view words.limpet",
    "limpet bulk samples --model exact:words --nfe 8 --n 200",
    "limpet check exact:words --sampler crs",
    "limpet tune exact:words --nfe 6 --n 4 --n-seeds 2 --space 'mend late_top_p=1,.6'",
    "limpet study run study.toml",
    "limpet paper study run factorial --preset smoke",
    "limpet paper study report factorial --preset smoke",
    "limpet paper audit temperature --preset smoke",
    "limpet paper theory separated-modes",
    "limpet train small",
    "limpet train small-judge",
    "limpet train small-distilled",
    "limpet bench --nfe 4 --batches 1 --runs 1",
]
STUDY = (
    'model = "exact:words"\nsamples = 4\nseeds = [8200, 8210]\n[samplers]\nnative = "native nfe=8"\nCRS = "crs nfe=8"\n'
)


def core_seconds(command: str, folder: Path) -> float:
    """Seconds of one core that a command takes in a process of its own with one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call = [sys.executable, "-m", "limpet.cli.main", *shlex.split(command)[1:]]
    subprocess.run(call, cwd=folder, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)


def page(results: Mapping[str, Any]) -> str:
    """The page, from the stored results."""
    rows = "\n".join(f"| `{command}` | {seconds:.1f} |" for command, seconds in results["seconds"].items())
    return f"""# How long commands take

What to expect on a laptop: seconds of one core, start-up included, with one thread, measured by `tools/times.py`
({results["machine"]}, Python {results["python"]}). `limpet serve` runs until it is stopped. `limpet paper reproduce`
estimates its own time.

| command | seconds of one core |
|---|---:|
{rows}

Time grows with the number of samples and with `--nfe`. `limpet paper study list` says what each preset takes.

Next: [Speed](speed.md) for a GPU, [Clusters](scale.md) for several.
"""


if __name__ == "__main__":
    if "--page" not in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("recipes", "src"):
                Path(folder, name).symlink_to(ROOT / name)
            Path(folder, "study.toml").write_text(STUDY)
            seconds = {}
            for command in COMMANDS:
                seconds[command] = core_seconds(command, Path(folder))
                print(f"{seconds[command]:6.1f} {command}", flush=True)
        about = {"machine": platform.machine(), "python": platform.python_version(), "seconds": seconds}
        RESULTS.write_text(json.dumps(about, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
