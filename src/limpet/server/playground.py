"""The playground's page: the viewer of trajectories, a form, and a recorded run to begin with."""

from __future__ import annotations

import base64
from importlib import resources
from typing import Any

from limpet.recording.page import asset, descriptions, fill

RECORDED = ("native", "crs", "mend")  # the recorded run, which tools/pictures.py makes


def recorded_files() -> list[str]:
    """The trajectory files of the recorded run, in base64."""
    folder = resources.files(__package__).joinpath("assets")
    return [base64.b64encode(folder.joinpath(f"{name}.limpet").read_bytes()).decode() for name in RECORDED]


def playground(page_data: dict[str, Any]) -> tuple[str, str]:
    """The page and its security policy. page_data: see `schema.page_data`."""
    subtitle = "watch a diffusion language model write, call by call"
    texts = {**page_data["descriptions"], **descriptions()}
    data = {**page_data, "descriptions": texts, "recorded": recorded_files()}
    form, script = (asset(name, "limpet.server") for name in ("playground.html", "playground.js"))
    return fill("limpet", subtitle, data, script, connect="'self'", form=form)
