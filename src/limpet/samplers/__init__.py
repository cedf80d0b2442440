"""Samplers: one file and one screen each, and the ways to name them."""

from limpet.samplers.crs import CRS
from limpet.samplers.knobs import Knob, knob, knobs
from limpet.samplers.native import Native
from limpet.samplers.sampler import Sampler, available, find, from_dict, parse

__all__ = ["CRS", "Knob", "Native", "Sampler", "available", "find", "from_dict", "knob", "knobs", "parse"]
