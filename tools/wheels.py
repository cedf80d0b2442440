"""Install the wheel alone under every Python that pyproject.toml names, try commands, and keep what came of them.

    python tools/wheels.py                         # python3.11, python3.12 ... on the path
    python tools/wheels.py PYTHON PYTHON PYTHON    # these; minutes, and gigabytes of torch, for each

pip installs the wheel and its requirements, and nothing else, into an empty environment of each Python. The results
are kept in benchmarks/results/wheels.json."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import limpet

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/wheels.json"
NOT_IMPORTED = ("diffusers", "fsspec", "matplotlib", "pandas", "pydantic", "ray", "rdkit", "scipy", "transformers")
GEMMA_CONFIG = '{"model_type": "diffusion_gemma"}'  # enough of a config for its loader to be chosen
PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79\n"
TOY = "--model exact:words --n 2 --nfe 2"
MINI = "--model mini --n 1 --nfe 2 --length 16"


def names_extra(module: str, extra: str, prefix: str = "limpet: ") -> str:
    """The pattern of the sentence that names a missing extra."""
    return re.escape(f"{prefix}this needs {module}: pip install 'limpet[{extra}]'") + "$"


def python(code: str) -> str:
    """A command line that runs code."""
    return f'python -c "{code}"'


ERROR = "LimpetError: "  # as Python ends its traceback
MISSING = {  # by extra: a command that needs it, its exit code, and a pattern of its output
    "judges": ("limpet score a.txt --judge someone/some-judge", 2, names_extra("transformers", "judges")),
    "gemma": ("limpet info gemma", 2, names_extra("transformers", "gemma")),
    "diffusers": (python("import limpet.integrations.diffusers"), 1, names_extra("diffusers", "diffusers", ERROR)),
    "molecules": ("limpet compare --model molecules --n 1 --nfe 2 --seeds 1", 2, names_extra("rdkit", "molecules")),
    "figures": (
        "limpet paper theory closed-loop-interleave --figures figures",
        2,
        names_extra("matplotlib", "figures"),
    ),
    "lab": (
        python("from limpet.experiments import claims; claims.bounds(0.0, 1.0, 4)"),
        1,
        names_extra("scipy", "lab", ERROR),
    ),
    "parquet": (f"limpet bulk samples {TOY} --format parquet", 2, names_extra("pyarrow", "parquet")),
    "ray": ("limpet paper study run factorial --preset smoke --on ray", 2, names_extra("ray", "ray")),
    "serve": ("limpet serve", 2, names_extra("pydantic", "serve")),
    "ray-serve": (
        python("from limpet.integrations.ray_serve import deployment; deployment()"),
        1,
        names_extra("ray", "ray-serve", ERROR),
    ),
    "notebook": (
        python("import limpet; limpet.sample(limpet.load('exact:words'), 'native nfe=2', n=1).to_pandas()"),
        1,
        names_extra("pandas", "notebook", ERROR),
    ),
    "lm-eval": (python("import limpet.integrations.lm_eval"), 1, names_extra("lm_eval", "lm-eval", ERROR)),
    "sglang": (python("import limpet.integrations.sglang"), 1, names_extra("sglang", "sglang", ERROR)),
    "tensorboard": (
        python("from limpet.integrations.tensorboard import scalars; scalars('events').__enter__()"),
        1,
        names_extra("tensorboard", "tensorboard", ERROR),
    ),
}
IMPORTS = (
    "import sys, limpet; assert limpet.__file__.startswith(sys.prefix); "
    f"assert not {{*{NOT_IMPORTED}}} & {{*sys.modules}}"
)
COMMANDS: dict[str, tuple[int, list[str]]] = {  # the exit code of each, and patterns that its output matches
    python(IMPORTS): (0, []),
    "limpet --version": (0, [f"^limpet {re.escape(limpet.__version__)}$"]),
    f"limpet sample {MINI} --json": (0, [r'"tokens": \[(\d+, ){15}\d+\]']),
    f"limpet compare {TOY} --seeds 1 --json": (0, [rf'"name": "{name}"' for name in ("native", "crs", "mend")]),
    f"limpet compare {MINI} --seeds 1 --sampler crs --json": (0, ['"name": "mini-judge"']),
    "limpet sample --model molecules --n 1 --nfe 2": (0, []),
    "limpet sample --model sudoku --n 1 --nfe 2 --prompt puzzle.txt": (0, [r"------\+-------\+------"]),
    "limpet compare --model sudoku --n 1 --nfe 2 --seeds 1 --prompt puzzle.txt --json": (0, ['"solved": ']),
    "limpet compare --model exact:grammar --n 1 --nfe 2 --seeds 1 --json": (0, ['"grammatical": ']),
    "limpet check exact:words --sampler crs": (0, []),
    "limpet doctor": (0, [re.escape(f"pip install 'limpet[{extra}]'") for extra in MISSING]),
} | {line: (code, [pattern]) for line, code, pattern in MISSING.values()}


def versions() -> list[str]:
    """The versions of Python that pyproject.toml names, such as 3.11."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [match[1] for one in named if (match := re.search(r":: (3\.\d+)$", one))]


def build(folder: Path) -> Path:
    """Build the wheel into a folder."""
    call = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(call, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def try_commands(programs: Path, folder: Path) -> list[dict[str, Any]]:
    """Run every command in a folder, with the programs of an environment; one row for each.

    A row has the exit code, and whether code and output are as COMMANDS says."""
    (folder / "a.txt").write_text("a text\n")
    (folder / "puzzle.txt").write_text(PUZZLE)
    (folder / "gemma").mkdir()
    (folder / "gemma/config.json").write_text(GEMMA_CONFIG)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    rows = []
    for line, (code, patterns) in COMMANDS.items():
        name, *rest = shlex.split(line)
        call = [str(programs / name), *rest]
        done = subprocess.run(call, cwd=folder, capture_output=True, text=True, env=env, timeout=300, check=False)
        output = " ".join((done.stdout + done.stderr).split())
        is_ok = done.returncode == code and all(re.search(pattern, output) for pattern in patterns)
        is_ok &= code == 1 or "Traceback" not in output  # Python's own -c has one; a command has none
        row = {"command": line, "code": done.returncode, "ok": is_ok}
        rows.append(row if is_ok else {**row, "output": output[-500:]})
    return rows


def try_python(interpreter: str, wheel: Path, folder: Path) -> dict[str, Any]:
    """Install the wheel into an empty environment of one Python, with constraints.txt, and try every command."""
    subprocess.run([interpreter, "-m", "venv", str(folder / "env")], check=True)
    programs = folder / "env/bin"
    constraints = str(ROOT / "constraints.txt")
    call = ["-m", "pip", "install", "--quiet", "--no-cache-dir", "--constraint", constraints, str(wheel)]
    subprocess.run([str(programs / "python"), *call], check=True)
    code = "import json, platform, torch; print(json.dumps([platform.python_version(), torch.__version__]))"
    done = subprocess.run([str(programs / "python"), "-c", code], check=True, capture_output=True, text=True)
    version, torch = json.loads(done.stdout)
    (folder / "work").mkdir()
    return {"python": version, "torch": torch, "commands": try_commands(programs, folder / "work")}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        about = {"name": wheel.name, "bytes": wheel.stat().st_size, "sha256": digest}
        environments = []
        for interpreter in sys.argv[1:] or [f"python{version}" for version in versions()]:
            with tempfile.TemporaryDirectory() as other:
                environments.append(try_python(interpreter, wheel, Path(other)))
            failed = [row for row in environments[-1]["commands"] if not row["ok"]]
            print(environments[-1]["python"], *(failed or ["ok"]), sep="\n", flush=True)
    RESULTS.write_text(json.dumps({"wheel": about, "environments": environments}, indent=1) + "\n")
    sys.exit(any(not row["ok"] for one in environments for row in one["commands"]))
