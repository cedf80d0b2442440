"""limpet: a library for sampling uniform-state discrete diffusion models, and for comparing samplers.

Public names are imported lazily: torch alone takes a second, and `limpet --help` does not need it. `__init__.pyi` says
the same to type checkers."""

import importlib
from typing import Any as _Any

__version__ = "0.3.0"

_MODULES = {  # module -> its public names
    "limpet.diffusion": ("process", "selection", "transitions", "truncation"),
    "limpet.diffusion.backends": ("Transition",),
    "limpet.errors": ("LimpetError",),
    "limpet.evaluation": ("Comparison", "Scores", "compare", "evaluate", "load_judge"),
    "limpet.generation": ("Inputs", "Sample", "Samples", "Step", "infill", "reply", "rollout", "sample", "steps"),
    "limpet.models": ("Denoiser", "ModelInput", "WrappedDenoiser"),
    "limpet.models.loading": ("load",),
    "limpet.samplers": (
        "CRS", "DDIM", "RDM", "BlockRefinement", "ConfidenceThreshold", "Context", "EntropyBound", "ForwardBackward",
        "GIDDAdaptive", "GIDDCorrection", "Gibbs", "Guided", "Mend", "Native", "Psi", "Sampler", "State", "StepInfo",
        "TauLeaping", "Trapezoidal", "param", "recommended",
    ),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> _Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULE_OF[name])
    value = getattr(module, name, None) or importlib.import_module(f"{module.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
