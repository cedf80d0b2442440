"""`limpet sample`: texts from a model under a policy."""

from __future__ import annotations

import json as jsonlib
import time
from pathlib import Path
from typing import Annotated

import tyro

from limpet.commands import DEFAULT_MODEL, Precision, err, out, precision_on, progress_bar
from limpet.denoisers.catalog import load
from limpet.errors import LimpetError
from limpet.policy import Policy
from limpet.sampler import NEVER, Info, State
from limpet.samples import sample
from limpet.view import trajectory


def run(
    model: str = DEFAULT_MODEL,
    prompt: str | None = None,
    n: int = 4,
    length: int | None = None,
    seed: int = 8200,
    batch_size: int | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    record: Path | None = None,
    out_file: Annotated[Path | None, tyro.conf.arg(name="out")] = None,
    json: bool = False,
    policy: Annotated[Policy, tyro.conf.arg(name="")] = Policy(),
) -> None:
    """Sample texts. Without policy flags this is CRS; --horizon 0 is the native sampler.

    $ limpet sample --n 2 --nfe 32
    $ limpet sample --model s-sahoo/duo-distilled --prompt "The sea" --length 1024 --device cuda
    $ limpet sample --horizon 0 --top-p 0.9 --json > samples.jsonl
    $ limpet sample --n 1 --record crs.limpet

    Args:
        model: built-in name, folder, .safetensors or .ckpt file, owner/name on the hub, or exact:NAME
        prompt: text that every sample begins with
        n: how many samples
        length: tokens in a sample; the model's own unless told
        seed: the same seed gives the same samples, whatever the batch size
        batch_size: samples computed at once
        device: cpu, cuda, ...; a GPU where there is one
        precision: what the network runs in; auto is bfloat16 where the device has it
        record: also write the path of the first sample here, for `limpet watch` and `limpet view`
        out_file: also write the samples here as JSON lines
        json: print JSON lines, one a sample, instead of texts
        policy: the sampler
    """
    denoiser = load(model, device=device, precision=precision_on(device, precision))
    for file in (out_file, record):
        if file is not None and not file.absolute().parent.is_dir():
            raise LimpetError(f"{file} cannot be written: the folder {file.absolute().parent} does not exist")
    tokens = (length or denoiser.length) * n
    begun = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task(f"{denoiser.name}", total=n * policy.nfe, detail="")

        def watch(state: State, info: Info, done: int, total: int) -> None:
            selected = (state.selected_at != NEVER).float().mean(0).sum()
            rate = tokens * done / total / (time.monotonic() - begun)
            detail = f"step {info.step + 1}/{policy.nfe} · {selected:.0f} selected · {rate:,.0f} tokens/s"
            bar.update(task, completed=done, detail=detail)

        samples = sample(
            denoiser, policy, n, seed, length, prompt, batch_size, watch,
        )  # fmt: skip
    lines = [jsonlib.dumps(row, ensure_ascii=False) for row in samples.rows()]
    if out_file is not None:
        partial = out_file.with_name(out_file.name + ".partial")
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        partial.replace(out_file)
        err.print(f"wrote {n} samples to {out_file}", markup=False)
    if record is not None:
        path = trajectory.record(denoiser, policy, seed, 0, length, prompt)
        path.save(record)
        err.print(f"wrote the path of sample 0 to {record}", markup=False)
        if path.frames[-1].state.tolist() != samples.tokens[0].tolist():  # rounding, in a batch of another size
            err.print("its text differs from sample 0 here; --n 1 --precision float32 gives the same", markup=False)
    if json:
        print("\n".join(lines))
    elif out_file is None:
        texts = samples.texts if denoiser.tokenizer else [str(ids) for ids in samples.tokens.tolist()]
        for i, text in enumerate(texts):
            err.rule(f"sample {i} · seed {seed} · {samples.nfe} calls · {int(samples.selected[i])} selected")
            out.print(text, markup=False)
