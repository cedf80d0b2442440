"""How long `limpet tune` takes from a cold store on this machine, and what it finds.

    python benchmarks/tuning.py --out benchmarks/results/tuning.json

The command runs in a folder of its own that is thrown away; what it prints is kept without its rungs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def cold(words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-m", "limpet.cli.main", "tune", *words, "--json"]
        begun = time.perf_counter()
        done = subprocess.run(call, cwd=folder, check=True, capture_output=True, text=True)
        taken = time.perf_counter() - begun
    found = json.loads(done.stdout)
    kept = {name: found[name] for name in ("question", "arm", "less")}
    cores = len(os.sched_getaffinity(0))
    return {"command": " ".join(["limpet", "tune", *words]), "minutes": taken / 60, "cores": cores, **kept}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", default=["mini", "--nfe", "16"], help="what tune is given")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tuning.json"))
    given = parser.parse_args()
    given.out.write_text(json.dumps(cold(given.words), indent=1) + "\n")
    print(given.out.read_text(), end="")
