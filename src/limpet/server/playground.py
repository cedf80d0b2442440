"""The playground's page: the viewer of trajectories, a form, and a recorded run of what the form says at first."""

from __future__ import annotations

import base64
from importlib import resources
from typing import Any

from limpet.recording.page import asset, descriptions, fill
from limpet.recording.trajectory import Header, Trajectory

RECORDED = ("native", "crs", "recommended")  # the files of the recorded run, which tools/pictures.py makes


def recorded_files(page_data: dict[str, Any]) -> list[str]:
    """The trajectory files of the recorded run, in base64. None where the form starts with anything else.

    page_data: see `schema.page_data`."""
    folder = resources.files(__package__).joinpath("assets")
    files = [folder.joinpath(f"{name}.limpet").read_bytes() for name in RECORDED]
    headers = [Trajectory.from_bytes(file).header for file in files]
    samplers = {header.name: header.sampler for header in headers}
    is_start = samplers == page_data["samplers"] and all(_is_of(header, page_data) for header in headers)
    return [base64.b64encode(file).decode() for file in files] if is_start else []


def _is_of(header: Header, page_data: dict[str, Any]) -> bool:
    """Whether a trajectory has the model, the length and the seed that the form starts with."""
    first = page_data["models"][0]
    length = min(first["page_length"], page_data["limits"]["length"])
    expected = first["name"], first["digest"], length, page_data["seed"]
    return (header.model, header.digest, header.length, header.seed) == expected


def playground(page_data: dict[str, Any]) -> tuple[str, str]:
    """The page and its security policy. page_data: see `schema.page_data`."""
    subtitle = "watch a diffusion language model write, call by call"
    texts = {**page_data["descriptions"], **descriptions()}
    data = {**page_data, "descriptions": texts, "recorded": recorded_files(page_data)}
    form, script = (asset(name, "limpet.server") for name in ("playground.html", "playground.js"))
    return fill("limpet", subtitle, data, script, connect="'self'", form=form)
