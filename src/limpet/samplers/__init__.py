"""Samplers: one file and one screen each, and the ways to name them."""

from limpet.samplers.base import Sampler, available, find, from_dict, parse, words
from limpet.samplers.block_refinement import BlockRefinement
from limpet.samplers.crs import CRS
from limpet.samplers.ddim import DDIM
from limpet.samplers.entropy_bound import EntropyBound
from limpet.samplers.gibbs import Gibbs
from limpet.samplers.gidd import GIDDAdaptive, GIDDCorrection
from limpet.samplers.guided import Guided
from limpet.samplers.mend import Mend
from limpet.samplers.native import Native
from limpet.samplers.params import Param, param, params
from limpet.samplers.psi import Psi
from limpet.samplers.trapezoidal import Trapezoidal

__all__ = [
    "CRS",
    "DDIM",
    "BlockRefinement",
    "EntropyBound",
    "GIDDAdaptive",
    "GIDDCorrection",
    "Gibbs",
    "Guided",
    "Mend",
    "Native",
    "Param",
    "Psi",
    "Sampler",
    "Trapezoidal",
    "available",
    "find",
    "from_dict",
    "param",
    "params",
    "parse",
    "words",
]
