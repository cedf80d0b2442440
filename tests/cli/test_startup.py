"""What starting costs, in modules and not in seconds: help needs no torch, a sample nothing that it does not use."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import limpet
from limpet.cli import main

SRC = Path(__file__).parents[2] / "src"
HEAVY = {
    "PIL", "diffusers", "fsspec", "httpx", "huggingface_hub", "hypothesis", "markdown_it", "matplotlib", "mauve",
    "nltk", "pandas", "pydantic", "pygments", "ray", "requests", "scipy", "sklearn", "starlette", "sympy",
    "transformers", "triton", "uvicorn",
}  # fmt: skip
ELSEWHERE = {"experiments", "paper", "training", "server"}  # not a sampler's own


@cache
def imported(code: str) -> frozenset[str]:
    """The modules that a fresh interpreter has loaded when it has run some code."""
    told = f"import sys\ntry:\n    {code}\nfinally:\n    print('loaded', *sys.modules, file=sys.stderr)"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True, check=False)
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
    assert {name for name in found if name.startswith("limpet.")} <= {"limpet.cli", "limpet.cli.main", "limpet.errors"}
    assert len(found) < 400  # torch alone brings a thousand


def test_a_sample_loads_what_it_uses() -> None:
    """Of torch, only what torch itself brings and the choice of a device; nothing of the laboratory."""
    torch = imported("import torch")
    found = imported(command("sample", "--model", "mini", "--n", "1", "--nfe", "2", "--length", "8"))
    assert {"torch", "limpet.models.duo"} <= found
    assert not packages(found - torch) & HEAVY
    assert {name for name in found - torch if name.startswith("torch")} <= {"torch.utils._device"}
    own = {name.split(".")[1] for name in found if name.startswith("limpet.")}
    assert not own & ELSEWHERE
    commands = {name for name in found if name.startswith("limpet.cli.")}
    assert commands == {f"limpet.cli.{name}" for name in ("main", "common", "sample")}
    assert len(found - torch) < 260


@pytest.mark.parametrize(("told", "found"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"),
                                             ({"OMP_WAIT_POLICY": "active"}, None)])  # fmt: skip
def test_threads_wait_briefly_unless_told_how(
    told: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.os, "environ", dict(told))
    assert main.main(["nothing"]) == 2
    assert main.os.environ.get("GOMP_SPINCOUNT") == found


def test_the_version_is_the_packages(capsys) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"limpet {limpet.__version__}\n"


def test_every_public_name_is_what_its_home_has() -> None:
    stub = ast.parse((SRC / "limpet/__init__.pyi").read_text(encoding="utf-8"))
    homes = {one.name: line.module for line in stub.body if isinstance(line, ast.ImportFrom) for one in line.names}
    listed = next(ast.literal_eval(line.value) for line in stub.body if isinstance(line, ast.Assign))
    assert sorted(listed) == sorted(limpet.__all__) == sorted(homes)
    assert set(homes) <= set(dir(limpet))
    for name, home in homes.items():
        assert getattr(limpet, name) is getattr(importlib.import_module(str(home)), name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        limpet.nonsense  # noqa: B018
