"""The one door to every denoiser: exact sources, built-in models, files, the hub, other packages, a Python file."""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from limpet import registry
from limpet.errors import LimpetError
from limpet.models import Denoiser, check_model, exact_sources, model_files

GROUP = "limpet.models"


def load(
    name: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    precision: str = "float32",
    revision: str | None = None,
    **options: Any,
) -> Denoiser:
    """A model by name: "mini" or another built-in one, "exact:words" or another source whose distribution is known, a folder,
    a .safetensors or .ckpt file, "owner/name" on the hub, what another package calls a model of its own, or
    "./my.py:factory" for what a function of that file makes.

    device: a GPU where there is one, unless told. precision: what a network runs in: "float32", "bfloat16", or
    "float8" for Duo networks, whose largest products are then in float8 and all else as in bfloat16. revision: a
    commit, branch or tag on the hub. Other options are the family's own: a Duo checkpoint takes weights="raw" for its
    own weights instead of their running average. An exact source computes in float64 on the CPU whatever they say."""
    text = os.fspath(name)
    place = model_files.usable_device(device)
    if text.startswith("exact:"):
        if told := [*options, *(["revision"] if revision is not None else [])]:
            raise LimpetError(f"{text} is computed, not read from files: it has no {' or '.join(told)}, leave that out")
        return exact_sources.source(text)
    options |= {"device": place, "precision": precision}
    in_file = registry.is_file(text) and revision is None
    found = None if in_file else model_files.find(name, revision)
    if found is None:
        offered = registry.installed(GROUP)
        if not in_file and text not in offered:
            raise LimpetError(
                f"no model {text!r}: it is neither built in ({', '.join(model_files.builtin_names()) or 'none is installed'})"
                ", nor a path that exists, nor a hub name like owner/name, nor offered by another package "
                f"({', '.join(offered) or 'none offers any'})"
            )
        return _make(text, registry.find("model", GROUP, {}, text), None, options)
    try:
        model = _make(text, _family(found.folder), found.path, options)
    except LimpetError as error:
        if found.origin == "built in" and str(found.folder) in str(error):  # not if something else was asked wrongly
            raise LimpetError(f"the built-in model {text!r} is damaged: {error}, or install again") from error
        raise
    with suppress(AttributeError):  # a model may insist on a name of its own
        model.name = found.name
    model.info = {"source": found.origin, **model.info}
    return model


def _family(folder: Path) -> Any:
    """What makes models of the kind that a folder's config.json names; Duo's where it names none."""
    kind = model_files.read_config(folder).get("model_type", "duo")
    known = {**registry.installed(GROUP), **model_files.FAMILIES}
    if kind not in known and kind.lower() not in known:
        raise LimpetError(
            f"{folder / 'config.json'} has model_type {kind!r}, and the families known here are {', '.join(known)}: "
            f"install the package that offers it (entry point {GROUP})"
        )
    return registry.find("model", GROUP, model_files.FAMILIES, kind if kind in known else kind.lower())


def _make(name: str, factory: Any, folder: Path | None, options: dict[str, Any]) -> Denoiser:
    """What a factory makes, if it is a factory and makes a denoiser."""
    if not callable(factory):
        raise LimpetError(f"{name} is a {type(factory).__name__}, and a model comes from a function that makes it")
    try:
        inspect.signature(factory).bind(folder, **options)
    except (TypeError, ValueError) as error:
        raise LimpetError(
            f"{name} cannot be asked for a model ({error}): it takes (folder=None, *, device=None, "
            'precision="float32"), and what else you give it'
        ) from error
    try:
        model = factory(folder, **options)
    except LimpetError:
        raise
    except Exception as error:
        raise LimpetError(f"{name} made no model ({registry.said(error, inspect.getmodule(factory))})") from error
    if not isinstance(model, Denoiser):
        raise LimpetError(f"{name} made a {type(model).__name__}, and a model is a limpet.Denoiser: return one")
    check_model(model)
    return model
