"""`limpet paper study`: list, run, resume and report the paper's studies."""

from typing import Annotated, Literal

import tyro

from limpet.cli.common import Json, show
from limpet.cli.study import DEFAULT_OPTIONS, Options, run_action
from limpet.paper.studies import PRESETS, STUDIES, preset, study


def run(
    action: Annotated[Literal["list", "run", "status", "report"], tyro.conf.Positional],
    name: Annotated[str, tyro.conf.Positional] = "all",
    /,
    size: Annotated[str, tyro.conf.arg(name="preset")] = "mini",
    n: int | None = None,
    prompts: str | None = None,
    options: Options = DEFAULT_OPTIONS,
    json: Json = False,
) -> int:
    """Run the paper's studies. Finished units stay in the store and are never computed again.

    $ limpet paper study list
    $ limpet paper study run nfe-scaling --preset mini
    $ limpet paper study status nfe-scaling
    $ limpet paper study report nfe-scaling
    $ limpet paper study run all --preset paper --on ray --address auto \\
        --store s3://bucket/store

    Args:
        action: list all studies and presets; run or resume a study; show its status; write its report
        name: a study, or all
        size: paper, mini, mini-gpu, exact or smoke
        n: samples per seed (default: the preset's)
        prompts: a file of prompts for continuations, one a line or JSON lines (default: the preset's)
    """
    if action == "list":
        sizes = {one.name: one.about for one in PRESETS.values()}
        lines = [f"{key:<14} {about}" for key, about in {**STUDIES, "": "", **sizes}.items()]
        show(json, {"studies": STUDIES, "presets": sizes}, lines)
        return 0
    chosen = preset(size, n, prompts)
    names = list(STUDIES) if name == "all" else [name]
    return run_action(action, [study(one, chosen) for one in names], options, json)
