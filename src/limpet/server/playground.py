"""The playground's page: the recording viewer, a form, and a run that was recorded before."""

from __future__ import annotations

import base64
from importlib import resources
from typing import Any

from limpet.recording.page import asset, fill, words

RECORDED = ("native", "crs", "mend")  # the run that the playground opens with, as tools/pictures.py made it


def recorded() -> list[str]:
    """The files of the recorded run, in base64."""
    folder = resources.files(__package__).joinpath("assets")
    return [base64.b64encode(folder.joinpath(f"{name}.limpet").read_bytes()).decode() for name in RECORDED]


def playground(about: dict[str, Any]) -> tuple[str, str]:
    """The page and its security policy. `about` names the models, the samplers' parameters and the limits."""
    lead = "watch a diffusion language model write, one reveal at a time"
    data = {**about, "words": {**about["words"], **words()}, "recorded": recorded()}
    form, script = (asset(name, "limpet.server") for name in ("playground.html", "playground.js"))
    return fill("limpet", lead, data, script, connect="'self'", form=form)
