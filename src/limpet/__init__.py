"""limpet: the laboratory and the fast sampler for uniform-state discrete diffusion language models."""

from limpet import process, sampler, selector, support
from limpet.compare import Comparison, compare
from limpet.denoisers.catalog import load
from limpet.errors import LimpetError
from limpet.judges import load_judge
from limpet.policy import Policy
from limpet.samples import Samples, Selection, sample

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "LimpetError",
    "Policy",
    "Samples",
    "Selection",
    "compare",
    "load",
    "load_judge",
    "process",
    "sample",
    "sampler",
    "selector",
    "support",
]
