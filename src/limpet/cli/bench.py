"""`limpet bench`: what sampling costs on this machine, beside bare forwards and the dense step."""

from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from limpet.cli.common import DEFAULT_MODEL, Json, Loading, LoadOptions, err, show
from limpet.diffusion.backends import backends
from limpet.errors import LimpetError
from limpet.experiments import speed
from limpet.models.duo import Duo, DuoShape
from limpet.models.model_files import usable_device

COLUMNS = {  # of the table: field -> title, format
    "batch": ("batch", "{}"),
    "nfe": ("nfe", "{}"),
    "what": ("", "{}"),
    "seconds": ("seconds", "{:.3f}"),
    "ratio": ("of bare", "{:.3f}"),
    "peak_gib": ("peak GiB", "{:.2f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "head_rows": ("head rows", "{:.3f}"),
}
FASTEST = LoadOptions(precision="auto")


def run(
    model: str = DEFAULT_MODEL,
    nfe: tuple[int, ...] = (64, 8),
    batches: tuple[int, ...] | None = None,
    runs: int = 3,
    loading: Loading = FASTEST,
    compile: bool | None = None,
    threads: int | None = None,
    released: bool = False,
    arithmetic: bool = False,
    json: Json = False,
) -> None:
    """Time whole generations (native, top-p .9, CRS), alternately with as many bare forwards of the network.

    $ limpet bench
    $ limpet bench --model mini --batches 16 --nfe 64 --threads 2
    $ limpet bench --device cuda --model s-sahoo/duo --batches 1 16 64 256
    $ limpet bench --arithmetic

    Args:
        model: any Duo network that `limpet sample` takes
        nfe: network calls of a generation
        batches: samples computed at once (default: 16 on a CPU, 1 16 64 256 on a GPU)
        runs: how often each is timed; medians are printed
        compile: compile the network of the bare forwards with torch.compile (default: on a GPU)
        threads: of the processor (default: torch's own choice)
        released: also time the released sampler's dense float64 step, where it fits in memory
        arithmetic: time only the arithmetic of a step, with every backend, at the released vocabulary
    """
    counts = {"runs": [runs], "nfe": nfe, "batches": batches or [1], "threads": [1 if threads is None else threads]}
    for name, values in counts.items():
        if not values or min(values) < 1:
            raise LimpetError(f"{name} is {' '.join(map(str, values)) or 'empty'}; it takes whole numbers from 1")
    if threads is not None:
        torch.set_num_threads(threads)
    device = usable_device(loading.device)
    if arithmetic:
        return _arithmetic(str(device), json)
    on_gpu = device.type == "cuda"
    compile = on_gpu if compile is None else compile
    denoiser = loading.load(model)
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
    about = {
        "model": denoiser.name,
        "device": str(device),
        "precision": denoiser.precision,
        "bare compiled": compile,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    table = Table(title=", ".join(f"{name} {value}" for name, value in about.items()), title_justify="left")
    for title, _ in COLUMNS.values():
        table.add_column(title, justify="right" if title else "left")
    for row in rows:
        texts = {name: "" if row.get(name) is None else form.format(row[name]) for name, (_, form) in COLUMNS.items()}
        if "out of memory" in row:
            texts["seconds"] = "out of memory"
        table.add_row(*texts.values())
    show(json, about | {"rows": rows}, [table])


def _arithmetic(device: str, json: bool) -> None:
    """Print each backend's time for some steps of a native trajectory, and its speed over the dense one."""
    shape = (1, 128, DuoShape().vocab_size)
    seconds = speed.arithmetic(backends(device), shape, steps=9, device=device)
    rows = [
        {"step": name, "seconds": own, "times as fast as dense": seconds["dense"] / own}
        for name, own in seconds.items()
    ]
    lines = (f"{row['step']:<8} {row['seconds']:8.3f} s {row['times as fast as dense']:8.1f} x dense" for row in rows)
    show(json, {"batch, length, vocabulary": shape, "device": device, "rows": rows}, lines)
