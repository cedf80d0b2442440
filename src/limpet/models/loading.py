"""Load a model by name: exact sources, built-in models, files, the hub, other packages, a Python file."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from limpet import registry
from limpet.errors import LimpetError, one_line
from limpet.models import Denoiser, check_model, exact_sources, model_files
from limpet.models.prompt_layouts import LAYOUTS

GROUP = "limpet.models"
NAMES: model_files.Fields = {  # of config.json, for every family
    "checker": ("the name of a checker", lambda value: isinstance(value, str) and bool(re.fullmatch(r"[\w-]+", value))),
    "layout": (" or ".join(LAYOUTS), lambda value: isinstance(value, str) and value in LAYOUTS),
}


def load(
    name: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    precision: str = "float32",
    revision: str | None = None,
    **options: Any,
) -> Denoiser:
    """Load a model.

    name: a built-in model ("mini"), an exact source ("exact:words"), a folder, a .safetensors or .ckpt file,
    "owner/name" on the hub, the name of a model of another package, or "./my.py:factory" for a function in a file.
    device: default: a GPU where there is one.
    precision: what a network computes in: "float32", "bfloat16", or for Duo networks "float8", in which the largest
    products are in float8 and all else as in bfloat16. An exact source computes in float64 on the CPU in any case.
    revision: a commit, branch or tag on the hub.
    options: those of the model's family. A Duo checkpoint takes weights="raw" for its own weights instead of their
    running average.

    Returns a Denoiser."""
    if not isinstance(name, str | os.PathLike):
        raise LimpetError(f"a model is named by a text such as 'mini' or a path, not {one_line(repr(name), 80)}")
    text = os.fspath(name)
    device = model_files.usable_device(device)
    if text.startswith("exact:"):
        if unused := [*options, *(["revision"] if revision is not None else [])]:
            raise LimpetError(f"{text} is not read from files: it has no {' or '.join(unused)}, leave that out")
        return exact_sources.source(text)
    options |= {"device": device, "precision": precision}
    in_file = registry.is_file(text) and revision is None
    found = None if in_file else model_files.locate(name, revision)
    if found is None:
        offered = registry.installed(GROUP)
        if not in_file and text not in offered:
            names = [*model_files.builtin_names(), *offered]
            builtin = ", ".join(model_files.builtin_names()) or "none is installed"
            near = difflib.get_close_matches(text.lower(), names, 1)
            raise LimpetError(
                f"no model {text!r}{f', did you mean {near[0]}?' if near else ':'} "
                f"it is neither built in ({builtin}), nor a path that exists, nor a hub name like "
                f"owner/name, nor offered by another package ({', '.join(offered) or 'none offers any'})"
            )
        return _call_factory(text, registry.find("model", GROUP, {}, text), None, options)
    try:
        model = _call_factory(text, _family(found.folder), found.path, options)
    except LimpetError as error:
        if found.origin == "built in" and str(model_files.BUILTIN_FOLDER) in str(error):  # not a wrong option
            raise LimpetError(f"the built-in model {text!r} is damaged: {error}, or install again") from error
        raise
    with suppress(AttributeError):  # a model may have a name that cannot be set
        model.name = found.name
    _read_names(model, found.folder)
    model.info = {"source": found.origin, **model.info}
    return model


def _read_names(model: Denoiser, folder: Path) -> None:
    """Set the checker and the prompt layout that a folder's config.json names."""
    config = model_files.check_fields(model_files.read_config(folder), NAMES, folder / "config.json", "a model")
    if "checker" in config:
        model.checker = config["checker"]
    if "layout" in config:
        model.prompt_layout = LAYOUTS[config["layout"]]


def _family(folder: Path) -> Any:
    """The factory of the model_type that a folder's config.json names. Default: Duo's."""
    kind = model_files.read_config(folder).get("model_type", "duo")
    known = {**registry.installed(GROUP), **model_files.FAMILIES}
    if kind not in known and kind.lower() not in known:
        raise LimpetError(
            f"{folder / 'config.json'} has model_type {kind!r}, and the families known here are {', '.join(known)}: "
            f"install the package that offers it (entry point {GROUP})"
        )
    return registry.find("model", GROUP, model_files.FAMILIES, kind if kind in known else kind.lower())


def _call_factory(name: str, factory: Any, folder: Path | None, options: dict[str, Any]) -> Denoiser:
    """The model that a factory returns. Raises if it is no factory, or returns no denoiser."""
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
        with registry.prints_aside():
            model = factory(folder, **options)
    except LimpetError:
        raise
    except Exception as error:
        reason = registry.describe_error(error, getattr(inspect.getmodule(factory), "__file__", None))
        raise LimpetError(f"{name} made no model ({reason})") from error
    if not isinstance(model, Denoiser):
        raise LimpetError(f"{name} made a {type(model).__name__}, and a model is a limpet.Denoiser: return one")
    check_model(model)
    return model
