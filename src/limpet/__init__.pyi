# The public names and where each is at home: what type checkers read, and `__init__.py` when a name is first asked for.

from limpet.canvases import reply
from limpet.diffusion import process, selection, transitions, truncation
from limpet.diffusion.backends import Transition
from limpet.errors import LimpetError
from limpet.evaluation.comparison import Comparison, compare
from limpet.evaluation.judges import load_judge
from limpet.generation import Samples, sample
from limpet.models import Denoiser
from limpet.models.loading import load
from limpet.samplers import (
    CRS,
    DDIM,
    BlockRefinement,
    EntropyBound,
    Gibbs,
    GIDDAdaptive,
    GIDDCorrection,
    Guided,
    Mend,
    Native,
    Psi,
    Sampler,
    Trapezoidal,
    param,
)
from limpet.samplers.context import Context, State, StepInfo, generate

__version__: str
__all__ = [
    "CRS",
    "DDIM",
    "BlockRefinement",
    "Comparison",
    "Context",
    "Denoiser",
    "EntropyBound",
    "GIDDAdaptive",
    "GIDDCorrection",
    "Gibbs",
    "Guided",
    "LimpetError",
    "Mend",
    "Native",
    "Psi",
    "Sampler",
    "Samples",
    "State",
    "StepInfo",
    "Transition",
    "Trapezoidal",
    "compare",
    "generate",
    "load",
    "load_judge",
    "param",
    "process",
    "reply",
    "sample",
    "selection",
    "transitions",
    "truncation",
]  # fmt: skip
