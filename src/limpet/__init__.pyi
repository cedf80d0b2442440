# The public names and where each is at home: what type checkers read, and `__init__.py` when a name is first asked for.

from limpet.canvases import reply
from limpet.comparison import Comparison, compare
from limpet.denoisers import Denoiser
from limpet.denoisers.catalog import load
from limpet.engine import process, selector, support
from limpet.engine.path import Info, Path, State, generate
from limpet.engine.steps import Transition, coins
from limpet.errors import LimpetError
from limpet.judges import load_judge
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
    knob,
)
from limpet.samples import Samples, sample

__version__: str
__all__ = [
    "CRS", "DDIM", "BlockRefinement", "Comparison", "Denoiser", "EntropyBound", "GIDDAdaptive", "GIDDCorrection",
    "Gibbs", "Guided", "Info", "LimpetError", "Mend", "Native", "Path", "Psi", "Sampler", "Samples", "State",
    "Transition", "Trapezoidal", "coins", "compare", "generate", "knob", "load", "load_judge", "process", "reply",
    "sample", "selector", "support",
]  # fmt: skip
