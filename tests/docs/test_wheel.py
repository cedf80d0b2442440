"""The wheel alone samples and compares, and a missing extra is one sentence; the site and the release are complete."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import release
import wheels

ROOT = Path(__file__).parents[2]
FOR_DEVELOPERS = {"docs", "release", "dev"}  # extras


def required(name: str, extras: frozenset[str] = frozenset(), known: set[str] | None = None) -> set[str]:
    """The distributions that one requires, directly or not."""
    known = set() if known is None else known
    for line in importlib.metadata.requires(name) or ():
        one = Requirement(line)
        if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        if one.name.lower() not in known:
            known.add(one.name.lower())
            required(one.name, frozenset(one.extras), known)
    return known


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """The programs of a fresh environment with the wheel, and links to the packages that it requires."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    call = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(call, check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in required("limpet"):
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(files[0].locate().parents[len(files[0].parts) - 1] / top)
    return python.parent


@pytest.mark.long
def test_every_command_works_or_names_its_extra(programs, tmp_path):
    assert [row for row in wheels.try_commands(programs, tmp_path) if not row["ok"]] == []


@pytest.mark.long
def test_a_command_that_fails_is_reported(programs, tmp_path, monkeypatch):
    wrong = {
        "limpet --version": (1, []),
        "limpet samplers": (0, ["no such words"]),
        "python -c \"print('Traceback')\"": (0, []),
        "limpet --help": (0, ["^usage: limpet COMMAND"]),
    }
    monkeypatch.setattr(wheels, "COMMANDS", wrong)
    assert [row["ok"] for row in wheels.try_commands(programs, tmp_path)] == [False, False, False, True]


def test_every_supported_python_was_tried():
    results = json.loads(wheels.RESULTS.read_text())
    assert [one["python"].rpartition(".")[0] for one in results["environments"]] == wheels.versions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={wheels.versions()[0]}"
    wanted = [(line, code) for line, (code, _) in wheels.COMMANDS.items()]
    for one in results["environments"]:
        assert [(row["command"], row["code"]) for row in one["commands"]] == wanted
        assert all(row["ok"] for row in one["commands"])


def test_every_extra_is_missed_by_some_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(wheels.MISSING) == set(project["optional-dependencies"]) - FOR_DEVELOPERS


@pytest.mark.long
def test_the_site_has_no_warning(tmp_path):
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    reference = (tmp_path / "site/api/index.html").read_text()
    for name in ("limpet.generation.sample", "limpet.samplers.crs.CRS", "limpet.errors.LimpetError"):
        assert f'id="{name}"' in reference


@pytest.mark.long
def test_a_release_is_checked(tmp_path):
    """tools/release.py finds what is missing, and what is too much."""
    call = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(call, cwd=ROOT, check=True, capture_output=True)
    assert release.problems(tmp_path) == []
    (tmp_path / "another.whl").write_bytes(b"")
    assert "not limpet-" in release.problems(tmp_path)[0]
