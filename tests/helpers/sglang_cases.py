"""SGLang's released wheel, which `make .venv/.engines` puts beside the environment without what it depends on."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest

FOLDER = Path(sys.prefix) / "engines"


class Stub(types.ModuleType):
    """torchvision, which SGLang imports for models that read images. Nothing here reads one."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class StubFinder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_stubbed = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stubbed else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Stub:
        return Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def load_sglang() -> None:
    """Make SGLang importable, and load its plugins as its processes do: limpet is one of them."""
    if not (FOLDER / "sglang").is_dir():
        pytest.skip("SGLang is not here: make .venv/.engines")
    transformers = pytest.importorskip("transformers")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    finder = None if transformers.utils.is_torchvision_available() else StubFinder()
    if finder:
        sys.meta_path.append(finder)
    try:
        importlib.import_module("sglang.srt.dllm.algorithm.base")
        importlib.import_module("sglang.srt.plugins").load_plugins()
    finally:
        if finder:
            sys.meta_path.remove(finder)
