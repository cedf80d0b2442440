"""The wheel alone, in an environment with what limpet requires and nothing else: it samples and compares, and what an
extra would bring is named in one sentence. And the site and the release are built whole."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

HERE = Path(__file__).parents[1]
pytestmark = pytest.mark.long


def needed(name: str, extras: frozenset[str] = frozenset(), known: set[str] | None = None) -> set[str]:
    """The distributions that one requires, with all that they require."""
    known = set() if known is None else known
    for line in importlib.metadata.requires(name) or ():
        one = Requirement(line)
        if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        if one.name.lower() not in known:
            known.add(one.name.lower())
            needed(one.name, frozenset(one.extras), known)
    return known


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    call = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(call, cwd=HERE, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def alone(wheel, tmp_path_factory) -> Path:
    """The folder of the commands of a fresh environment: the wheel by pip, and what it requires linked from here."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    call = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(call, check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in needed("limpet"):
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(files[0].locate().parents[len(files[0].parts) - 1] / top)
    return python.parent


def run(alone: Path, *call: str, cwd: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(alone / call[0]), *call[1:]]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=bare, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_it_imports_samples_and_compares(alone, wheel, tmp_path):
    said = run(alone, "python", "-c", "import sys, limpet; print(limpet.__file__); print(*sys.modules)").stdout
    assert str(alone.parent) in said.splitlines()[0]
    assert not {"transformers", "matplotlib", "scipy", "fsspec", "ray", "pandas", "pydantic"} & set(said.split())
    version = wheel.name.split("-")[1]
    assert run(alone, "limpet", "--version").stdout == f"limpet {version}\n"
    run(
        alone,
        "limpet",
        "sample",
        "--model",
        "mini",
        "--n",
        "1",
        "--nfe",
        "2",
        "--length",
        "16",
        "--out",
        "a.jsonl",
        cwd=tmp_path,
    )
    (row,) = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert len(row["tokens"]) == 16
    words = ("--model", "exact:words", "--n", "2", "--nfe", "2", "--shards", "1", "--json")
    assert len(json.loads(run(alone, "limpet", "compare", *words).stdout)["arms"]) == 5
    mini = ("--model", "mini", "--n", "1", "--nfe", "2", "--length", "16", "--shards", "1", "--arm", "crs", "--json")
    assert json.loads(run(alone, "limpet", "compare", *mini).stdout)["judge"]["name"] == "mini-judge"


MISSING = {
    "judges": ("transformers", ["score", "a.txt", "--judge", "someone/some-judge"]),
    "figures": ("matplotlib", ["theory", "separated-modes", "--figures", "figures"]),
    "ray": ("ray", ["study", "run", "factorial", "--preset", "smoke", "--on", "ray"]),
    "serve": ("pydantic", ["serve"]),
}


@pytest.mark.parametrize("extra", MISSING)
def test_what_is_missing_is_one_sentence(alone, tmp_path, extra):
    module, call = MISSING[extra]
    (tmp_path / "a.txt").write_text("a text\n")
    done = run(alone, "limpet", *call, cwd=tmp_path, code=2)
    assert done.stderr.splitlines()[-1] == f"limpet: this needs {module}: pip install 'limpet[{extra}]'"
    assert "Traceback" not in done.stderr


def test_a_verdict_names_the_extra(alone):
    """Reports of toys have none, and are written without it."""
    code = "from limpet.lab import claims; claims.bounds(0.0, 1.0, 4)"
    assert run(alone, "python", "-c", code, code=1).stderr.endswith("this needs scipy: pip install 'limpet[lab]'\n")


def test_a_data_frame_and_doctor_name_the_extra(alone):
    code = "import limpet; limpet.sample(limpet.load('exact:words'), limpet.Native(nfe=2), n=1).to_pandas()"
    assert run(alone, "python", "-c", code, code=1).stderr.endswith(
        "this needs pandas: pip install 'limpet[notebook]'\n"
    )
    shown = run(alone, "limpet", "doctor").stdout
    for extra in (*MISSING, "notebook"):
        assert f"pip install 'limpet[{extra}]'" in " ".join(shown.split())


def test_the_site_has_no_warning(tmp_path):
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(call, cwd=HERE, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    reference = (tmp_path / "site/api/index.html").read_text()
    for name in ("limpet.samples.sample", "limpet.samplers.crs.CRS", "limpet.errors.LimpetError"):
        assert f'id="{name}"' in reference


def test_a_release_is_checked(wheel, tmp_path):
    """tools/release.py finds what is missing from it, and too much of it."""
    sys.path.insert(0, str(HERE / "tools"))
    try:
        import release
    finally:
        sys.path.remove(str(HERE / "tools"))
    call = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(call, cwd=HERE, check=True, capture_output=True)
    assert release.wrong(tmp_path) == []
    (tmp_path / "another.whl").write_bytes(b"")
    assert "not limpet-" in release.wrong(tmp_path)[0]
