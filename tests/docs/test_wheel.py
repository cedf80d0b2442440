"""The wheel alone, in an environment with what limpet requires and nothing else: it samples and compares, and what an
extra would bring is named in one sentence; here, and as it was kept under every Python that is promised. And the site
and the release are built whole."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

HERE = Path(__file__).parents[2]
OURS = {"docs", "release", "dev"}  # extras of whoever works on limpet

sys.path.insert(0, str(HERE / "tools"))
try:
    import release
    import wheels
finally:
    sys.path.remove(str(HERE / "tools"))


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
    return wheels.build(tmp_path_factory.mktemp("dist"))


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


@pytest.mark.long
def test_every_command_does_as_it_should(alone, tmp_path):
    assert [row for row in wheels.tried(alone, tmp_path) if not row["held"]] == []


@pytest.mark.long
def test_a_command_that_does_not_is_told(alone, tmp_path, monkeypatch):
    wrong = {
        "limpet --version": (1, []),
        "limpet samplers": (0, ["no such words"]),
        "python -c \"print('Traceback')\"": (0, []),
        "limpet --help": (0, ["^usage: limpet COMMAND"]),
    }
    monkeypatch.setattr(wheels, "COMMANDS", wrong)
    assert [row["held"] for row in wheels.tried(alone, tmp_path)] == [False, False, False, True]


def test_every_python_that_is_promised_was_tried():
    kept = json.loads(wheels.KEPT.read_text())
    assert [one["python"].rpartition(".")[0] for one in kept["environments"]] == wheels.versions()
    promised = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    assert promised["requires-python"] == f">={wheels.versions()[0]}"
    for one in kept["environments"]:
        assert [(row["command"], row["code"]) for row in one["commands"]] == [
            (line, code) for line, (code, _) in wheels.COMMANDS.items()
        ]
        assert all(row["held"] for row in one["commands"])


def test_every_extra_is_missed_by_something():
    promised = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(wheels.MISSING) == set(promised) - OURS


@pytest.mark.long
def test_the_site_has_no_warning(tmp_path):
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(call, cwd=HERE, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    reference = (tmp_path / "site/api/index.html").read_text()
    for name in ("limpet.generation.sample", "limpet.samplers.crs.CRS", "limpet.errors.LimpetError"):
        assert f'id="{name}"' in reference


@pytest.mark.long
def test_the_site_is_served(tmp_path):
    """As `make docs` does, on a port of this test's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    recipe = (HERE / "Makefile").read_text().partition("\ndocs: ")[2].partition("\n\n")[0]
    assert recipe.endswith("mkdocs serve")
    call = [sys.executable, "-m", "mkdocs", "serve", "--no-livereload", "--dev-addr", address]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(call, cwd=HERE, stdout=log, stderr=log) as server:
        try:
            deadline, page = time.monotonic() + 120, ""
            while not page and server.poll() is None and time.monotonic() < deadline:
                try:
                    with urllib.request.urlopen(f"http://{address}/samplers/", timeout=5) as answer:
                        page = answer.read().decode()
                except OSError:
                    time.sleep(0.5)
        finally:
            server.terminate()
    assert "What was measured" in page, (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_release_is_checked(tmp_path):
    """tools/release.py finds what is missing from it, and too much of it."""
    call = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(call, cwd=HERE, check=True, capture_output=True)
    assert release.wrong(tmp_path) == []
    (tmp_path / "another.whl").write_bytes(b"")
    assert "not limpet-" in release.wrong(tmp_path)[0]
