"""How long `limpet tune` takes from an empty store on this machine, and what it finds.

    python benchmarks/tuning.py --out benchmarks/results/tuning.json

The command runs in a temporary folder. Its result is kept without the rungs."""

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


def time_tuning(words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-m", "limpet.cli.main", "tune", *words, "--json"]
        begun = time.perf_counter()
        done = subprocess.run(call, cwd=folder, check=True, capture_output=True, text=True)
        taken = time.perf_counter() - begun
    found = json.loads(done.stdout)
    kept = {name: found[name] for name in ("config", "winner", "delta_nll")}
    cores = len(os.sched_getaffinity(0))
    return {"command": " ".join(["limpet", "tune", *words]), "minutes": taken / 60, "cores": cores, **kept}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", default=["mini", "--nfe", "16"], help="arguments of limpet tune")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tuning.json"))
    options = parser.parse_args()
    options.out.write_text(json.dumps(time_tuning(options.words), indent=1) + "\n")
    print(options.out.read_text(), end="")
