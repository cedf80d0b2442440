"""Samplers: the interface, one file for each, and their names."""

from limpet.samplers.base import Blend, Context, Features, Sampler, State, StepInfo
from limpet.samplers.block_refinement import BlockRefinement
from limpet.samplers.confidence_threshold import ConfidenceThreshold
from limpet.samplers.crs import CRS
from limpet.samplers.ddim import DDIM
from limpet.samplers.entropy_bound import EntropyBound
from limpet.samplers.forward_backward import ForwardBackward
from limpet.samplers.gibbs import Gibbs
from limpet.samplers.gidd import GIDDAdaptive, GIDDCorrection
from limpet.samplers.guided import Guided
from limpet.samplers.mend import Mend
from limpet.samplers.names import as_sampler, available, describe, find, from_dict, named_samplers, parse
from limpet.samplers.native import Native
from limpet.samplers.params import Param, param, params
from limpet.samplers.psi import Psi
from limpet.samplers.rdm import RDM
from limpet.samplers.recommended import choose_sampler, recommended
from limpet.samplers.tau_leaping import TauLeaping
from limpet.samplers.trapezoidal import Trapezoidal

__all__ = [
    "CRS",
    "DDIM",
    "RDM",
    "Blend",
    "BlockRefinement",
    "ConfidenceThreshold",
    "Context",
    "EntropyBound",
    "Features",
    "ForwardBackward",
    "GIDDAdaptive",
    "GIDDCorrection",
    "Gibbs",
    "Guided",
    "Mend",
    "Native",
    "Param",
    "Psi",
    "Sampler",
    "State",
    "StepInfo",
    "TauLeaping",
    "Trapezoidal",
    "as_sampler",
    "available",
    "choose_sampler",
    "describe",
    "find",
    "from_dict",
    "named_samplers",
    "param",
    "params",
    "parse",
    "recommended",
]
