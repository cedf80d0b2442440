"""limpet: the laboratory and the fast sampler for uniform-state discrete diffusion language models."""

from limpet import process, sampler, selector, support
from limpet.errors import LimpetError
from limpet.policy import Policy
from limpet.samples import Samples, Selection, sample

__version__ = "0.1.0"
__all__ = ["LimpetError", "Policy", "Samples", "Selection", "process", "sample", "sampler", "selector", "support"]
