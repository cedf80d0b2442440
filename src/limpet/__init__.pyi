# The public names of `__init__.py` for type checkers; a test holds the two equal.

from limpet.diffusion import process, selection, transitions, truncation
from limpet.diffusion.backends import Transition
from limpet.errors import LimpetError
from limpet.evaluation import Comparison, Scores, compare, evaluate, load_judge
from limpet.generation import Inputs, Sample, Samples, Step, reply, rollout, sample, steps
from limpet.models import Denoiser, ModelInput, WrappedDenoiser
from limpet.models.loading import load
from limpet.samplers import (
    CRS,
    DDIM,
    BlockRefinement,
    Context,
    EntropyBound,
    Gibbs,
    GIDDAdaptive,
    GIDDCorrection,
    Guided,
    Mend,
    Native,
    Psi,
    Sampler,
    State,
    StepInfo,
    Trapezoidal,
    param,
    recommended,
)

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
    "Inputs",
    "LimpetError",
    "Mend",
    "ModelInput",
    "Native",
    "Psi",
    "Sample",
    "Sampler",
    "Samples",
    "Scores",
    "State",
    "Step",
    "StepInfo",
    "Transition",
    "Trapezoidal",
    "WrappedDenoiser",
    "compare",
    "evaluate",
    "load",
    "load_judge",
    "param",
    "process",
    "recommended",
    "reply",
    "rollout",
    "sample",
    "selection",
    "steps",
    "transitions",
    "truncation",
]
