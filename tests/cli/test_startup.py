"""What starting costs, counted in modules: help needs no torch, and a command loads only what it uses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import limpet
from examples import COMMANDS
from limpet.cli import main

SRC = Path(__file__).parents[2] / "src"
HEAVY = {
    "PIL", "diffusers", "fsspec", "httpx", "huggingface_hub", "hypothesis", "markdown_it", "matplotlib", "mauve",
    "nltk", "pandas", "pydantic", "pygments", "ray", "requests", "scipy", "sklearn", "starlette", "sympy",
    "transformers", "triton", "uvicorn",
}  # fmt: skip
ELSEWHERE = {"experiments", "paper", "training", "server"}  # packages that sampling does not need


@cache
def imported(code: str) -> frozenset[str]:
    """The modules that a fresh interpreter has loaded when it has run some code."""
    program = f"import sys\ntry:\n    {code}\nfinally:\n    print('loaded', *sys.modules, file=sys.stderr)"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return frozenset(done.stderr.splitlines()[-1].split()[1:])


def packages(modules: frozenset[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def command(*arguments: str) -> str:
    return f"import limpet.cli.main; limpet.cli.main.main({list(arguments)})"


@pytest.mark.parametrize("code", ["import limpet", command("--version"), command("--help")])
def test_neither_the_package_nor_its_help_needs_torch(code: str) -> None:
    found = imported(code)
    assert "limpet" in found
    assert not packages(found) & (HEAVY | {"torch", "numpy", "tokenizers", "safetensors", "rich"})
    light = {"limpet.cli", "limpet.cli.main", "limpet.cli.streams", "limpet.errors"}
    assert {name for name in found if name.startswith("limpet.")} <= light
    assert len(found) < 400  # torch alone brings a thousand


def test_a_sample_loads_what_it_uses() -> None:
    """Of torch, what torch itself loads and the choice of a device; no package that sampling does not need."""
    torch = imported("import torch")
    found = imported(command("sample", "--model", "mini", "--n", "1", "--nfe", "2", "--length", "8"))
    assert {"torch", "limpet.models.duo"} <= found
    assert not packages(found - torch) & HEAVY
    assert {name for name in found - torch if name.startswith("torch")} <= {"torch.utils._device"}
    own = {name.split(".")[1] for name in found if name.startswith("limpet.")}
    assert not own & ELSEWHERE
    commands = {name for name in found if name.startswith("limpet.cli.")}
    assert commands == {f"limpet.cli.{name}" for name in ("main", "streams", "parsing", "common", "sample")}
    assert len(found - torch) < 260


@pytest.mark.parametrize(("variables", "found"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"),
                                             ({"OMP_WAIT_POLICY": "active"}, None)])  # fmt: skip
def test_threads_wait_briefly_by_default(
    variables: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.os, "environ", dict(variables))
    assert main.main(["nothing"]) == 2
    assert main.os.environ.get("GOMP_SPINCOUNT") == found


def test_help_loads_no_sampler_of_another_package(package: Callable[..., None]) -> None:
    package("[limpet.samplers]\ntheirs = theirs:Theirs\n", theirs="raise SystemExit('loaded')")
    calls = [
        f"try: {command(*name.split(), '--help')}\nexcept SystemExit as end: assert end.code == 0" for name in COMMANDS
    ]
    assert "theirs" not in imported(f"for call in {calls}: exec(call)")


def test_the_version_is_the_packages(capsys) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"limpet {limpet.__version__}\n"
