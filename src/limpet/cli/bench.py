"""`limpet bench`: what generations cost on this machine, beside bare forwards and the dense step."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from limpet.cli.common import DEFAULT_MODEL, Json, Somewhere, Where, err, show
from limpet.diffusion.backends import backends
from limpet.errors import LimpetError
from limpet.experiments import speed
from limpet.models.duo import Duo, Shape
from limpet.models.model_files import usable_device

COLUMNS = (  # of the table: head, what is in it, how it is written
    ("batch", "batch", "{}"), ("nfe", "nfe", "{}"), ("", "what", "{}"), ("seconds", "seconds", "{:.3f}"),
    ("of bare", "ratio", "{:.3f}"), ("peak GiB", "peak_gib", "{:.2f}"), ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("head rows", "head_rows", "{:.3f}"),
)  # fmt: skip
FASTEST = Where(precision="auto")


def run(
    model: str = DEFAULT_MODEL,
    nfe: tuple[int, ...] = (64, 8),
    batches: tuple[int, ...] | None = None,
    runs: int = 3,
    where: Somewhere = FASTEST,
    compile: bool | None = None,
    threads: int | None = None,
    released: bool = False,
    arithmetic: bool = False,
    json: Json = False,
) -> None:
    """Time whole generations, native, with top-p .9 and with CRS, in turns with as many bare forwards of the network.

    $ limpet bench
    $ limpet bench --model mini --batches 16 --nfe 64 --threads 2
    $ limpet bench --device cuda --model s-sahoo/duo --batches 1 16 64 256
    $ limpet bench --arithmetic

    Args:
        model: any Duo network that `limpet sample` takes
        nfe: network calls of a generation
        batches: samples computed at once; 16 on a CPU, 1 16 64 256 on a GPU unless told
        runs: how many times each is timed; medians are printed
        compile: compile the network of the bare forwards with torch.compile; on a GPU unless told
        threads: of the processor; as many as there are unless told
        released: also time the released sampler's dense float64 step, where it fits in memory
        arithmetic: time only the step's arithmetic, with every backend, at the released vocabulary
    """
    if runs < 1:
        raise LimpetError(f"runs is {runs}; time everything at least once")
    if threads is not None:
        torch.set_num_threads(threads)
    place = usable_device(where.device)
    if arithmetic:
        return _arithmetic(str(place), json)
    on_gpu = place.type == "cuda"
    compile = on_gpu if compile is None else compile
    denoiser = where.load(model)
    if not isinstance(denoiser, Duo):
        raise LimpetError(f"{model} is no Duo network, so there are no bare forwards to compare with: name one that is")
    bare: speed.Forward = torch.compile(denoiser.network, dynamic=False) if compile else denoiser.network
    rows: list[dict[str, Any]] = []
    for batch in batches or ((1, 16, 64, 256) if on_gpu else (16,)):
        for calls in nfe:
            err.print(f"timing batch {batch}, {calls} calls, {runs} runs each ...", markup=False)
            costs = speed.side_by_side(denoiser, bare, calls, batch, runs, released)
            for name, cost in costs.items():
                measured = asdict(cost) if cost else {"out of memory": True}
                rows.append({"batch": batch, "nfe": calls, "what": name} | measured)
    facts = {
        "model": denoiser.name, "device": str(place), "precision": denoiser.precision, "bare compiled": compile,
        "threads": torch.get_num_threads(), "torch": torch.__version__,
    }  # fmt: skip
    table = Table(title=", ".join(f"{name} {value}" for name, value in facts.items()), title_justify="left")
    for head, _, _ in COLUMNS:
        table.add_column(head, justify="right" if head else "left")
    for row in rows:
        shown = {"seconds": "out of memory"} if "out of memory" in row else {}
        cells = (shown.get(key, "" if row.get(key) is None else form.format(row[key])) for _, key, form in COLUMNS)
        table.add_row(*cells)
    show(json, facts | {"rows": rows}, [table])


def _arithmetic(device: str, json: bool) -> None:
    """Logits given, a few steps of a native path: each backend's time, and how often the dense one's it is."""
    shape = (1, 128, Shape().vocab_size)
    taken = speed.arithmetic(backends(device), shape, steps=9, device=device)
    rows = [{"step": name, "seconds": s, "times as fast as dense": taken["dense"] / s} for name, s in taken.items()]
    lines = (f"{row['step']:<8} {row['seconds']:8.3f} s {row['times as fast as dense']:8.1f} x dense" for row in rows)
    show(json, {"batch, length, vocabulary": shape, "device": device, "rows": rows}, lines)
