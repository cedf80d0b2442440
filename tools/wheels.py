"""Whether the wheel alone works under every Python that pyproject.toml names: built once, installed by pip with what it
requires and nothing else into an empty environment of each, and asked the same things; kept in
benchmarks/results/wheels.json.

    python tools/wheels.py                         # python3.11, python3.12 ... as the path has them
    python tools/wheels.py PYTHON PYTHON PYTHON    # these; minutes and gigabytes each, of torch
"""

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

HERE = Path(__file__).parents[1]
KEPT = HERE / "benchmarks/results/wheels.json"
UNASKED = ("diffusers", "fsspec", "matplotlib", "pandas", "pydantic", "ray", "scipy", "transformers")  # by an import
GEMMA = '{"model_type": "diffusion_gemma"}'  # enough of a config for its reader to be sought
TOY = "--model exact:words --n 2 --nfe 2"
MINI = "--model mini --n 1 --nfe 2 --length 16"


def lacks(module: str, extra: str, by: str = "limpet: ") -> str:
    """The last thing that is said where an extra is not there."""
    return re.escape(f"{by}this needs {module}: pip install 'limpet[{extra}]'") + "$"


def python(code: str) -> str:
    return f'python -c "{code}"'


ERROR = "LimpetError: "  # as Python ends its traceback
MISSING = {  # by extra, what needs it, the exit code, and what is said
    "judges": ("limpet score a.txt --judge someone/some-judge", 2, lacks("transformers", "judges")),
    "gemma": ("limpet info gemma", 2, lacks("transformers", "gemma")),
    "diffusers": (python("import limpet.integrations.diffusers"), 1, lacks("diffusers", "diffusers", ERROR)),
    "figures": ("limpet theory separated-modes --figures figures", 2, lacks("matplotlib", "figures")),
    "lab": (
        python("from limpet.experiments import claims; claims.bounds(0.0, 1.0, 4)"),
        1,
        lacks("scipy", "lab", ERROR),
    ),
    "parquet": (f"limpet sample {TOY} --out samples --format parquet", 2, lacks("pyarrow", "parquet")),
    "ray": ("limpet study run factorial --preset smoke --on ray", 2, lacks("ray", "ray")),
    "serve": ("limpet serve", 2, lacks("pydantic", "serve")),
    "notebook": (
        python("import limpet; limpet.sample(limpet.load('exact:words'), limpet.Native(nfe=2), n=1).to_pandas()"),
        1,
        lacks("pandas", "notebook", ERROR),
    ),
}
INSIDE = (
    f"import sys, limpet; assert limpet.__file__.startswith(sys.prefix); assert not {{*{UNASKED}}} & {{*sys.modules}}"
)
COMMANDS: dict[str, tuple[int, list[str]]] = {  # the exit code of each, and what is found in all that it says
    python(INSIDE): (0, []),
    "limpet --version": (0, [f"^limpet {re.escape(limpet.__version__)}$"]),
    f"limpet sample {MINI} --json": (0, [r'"tokens": \[(\d+, ){15}\d+\]']),
    f"limpet compare {TOY} --shards 1 --json": (0, [rf'"name": "{arm}"' for arm in ("native", "CRS", "Mend")]),
    f"limpet compare {MINI} --shards 1 --arm crs --json": (0, ['"name": "mini-judge"']),
    "limpet check exact:words --arm crs": (0, []),
    "limpet doctor": (0, [re.escape(f"pip install 'limpet[{extra}]'") for extra in MISSING]),
} | {line: (code, [said]) for line, code, said in MISSING.values()}


def versions() -> list[str]:
    """The Pythons that pyproject.toml names, such as 3.11."""
    named = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["classifiers"]
    return [found[1] for one in named if (found := re.search(r":: (3\.\d+)$", one))]


def build(folder: Path) -> Path:
    call = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(call, cwd=HERE, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def tried(commands: Path, folder: Path) -> list[dict[str, Any]]:
    """What came of every command of an environment, of which the folder of commands is given: run in another folder,
    with nothing of ours about."""
    (folder / "a.txt").write_text("a text\n")
    (folder / "gemma").mkdir()
    (folder / "gemma/config.json").write_text(GEMMA)
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    rows = []
    for line, (code, patterns) in COMMANDS.items():
        name, *rest = shlex.split(line)
        call = [str(commands / name), *rest]
        done = subprocess.run(call, cwd=folder, capture_output=True, text=True, env=bare, timeout=300, check=False)
        said = " ".join((done.stdout + done.stderr).split())
        held = done.returncode == code and all(re.search(pattern, said) for pattern in patterns)
        held &= code == 1 or "Traceback" not in said  # Python's own -c has one; a command has none
        rows.append({"command": line, "code": done.returncode, "held": held} | ({} if held else {"said": said[-500:]}))
    return rows


def alone(interpreter: str, wheel: Path, folder: Path) -> dict[str, Any]:
    """An empty environment of one Python, the wheel by pip in the versions that the repository holds, and its rows."""
    subprocess.run([interpreter, "-m", "venv", str(folder / "env")], check=True)
    commands = folder / "env/bin"
    constraints = str(HERE / "constraints.txt")
    call = ["-m", "pip", "install", "--quiet", "--no-cache-dir", "--constraint", constraints, str(wheel)]
    subprocess.run([str(commands / "python"), *call], check=True)
    asked = "import json, platform, torch; print(json.dumps([platform.python_version(), torch.__version__]))"
    said = subprocess.run([str(commands / "python"), "-c", asked], check=True, capture_output=True, text=True).stdout
    version, torch = json.loads(said)
    (folder / "work").mkdir()
    return {"python": version, "torch": torch, "commands": tried(commands, folder / "work")}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        about = {
            "name": wheel.name, "bytes": wheel.stat().st_size, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()
        }  # fmt: skip
        found = []
        for interpreter in sys.argv[1:] or [f"python{version}" for version in versions()]:
            with tempfile.TemporaryDirectory() as room:
                found.append(alone(interpreter, wheel, Path(room)))
            wrong = [row for row in found[-1]["commands"] if not row["held"]]
            print(found[-1]["python"], *(wrong or ["holds"]), sep="\n", flush=True)
    KEPT.write_text(json.dumps({"wheel": about, "environments": found}, indent=1) + "\n")
    sys.exit(any(not row["held"] for one in found for row in one["commands"]))
