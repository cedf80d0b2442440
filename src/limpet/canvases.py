"""From a prompt to a reply, canvas by canvas: what stands before each, where a text ends, and who goes on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from limpet.diffusion.rng import CounterRNG, canvas_seed
from limpet.errors import LimpetError
from limpet.generation import Counted, Given, Samples, Watcher, at_once, given_tokens, reachable, watcher
from limpet.models import Canvas, tokenizer_digest
from limpet.samplers import CRS, Sampler
from limpet.samplers.context import generate, open_context


class Written(NamedTuple):
    """Replies of one batch."""

    tokens: Tensor  # (B, canvases x L), padded after each end
    committed: Tensor  # (B,) positions committed in all canvases
    calls: int  # of the denoiser's body
    rows: int  # of its head


def reply(
    model: Canvas,
    sampler: Sampler | None = None,
    n: int = 8,
    seed: int = 8200,
    length: int | None = None,
    prompt: Given = "",
    batch_size: int | None = None,
    progress: bool | Watcher = False,
    *,
    first: int = 0,
) -> Samples:
    """n replies to a prompt: text, which the model's chat template puts into words, or ids as they are.

    length: the most tokens of a reply, in whole canvases. A reply ends with its first end-of-text token, after which
    it is padded; a sampler that finishes early spares the calls that are left once all samples of a batch are finished.
    The first canvas is what `sample` makes of `model.after(prompt)`. `Samples.nfe` is of the longest reply."""
    sampler = CRS() if sampler is None else sampler
    reachable(n, seed, first, batch_size)
    canvases = -(-(model.length if length is None else length) // model.length)
    if canvases < 1:
        raise LimpetError(f"length is {length}; ask for at least one token")
    ids = model.prompt(prompt) if isinstance(prompt, str) else prompt
    text = torch.as_tensor(ids, dtype=torch.long).reshape(1, -1)
    given_tokens(model, 1, text.shape[1], text, None)  # every id is one
    begun = model.after(text) if text.numel() else model
    size = min(n, batch_size or at_once(model.device, model.length))
    with watcher(progress) as watch, torch.inference_mode():
        parts = []
        for start in range(0, n, size):
            samples = torch.arange(first + start, first + min(n, start + size), device=model.device)
            done, total = start * sampler.nfe * canvases, n * sampler.nfe * canvases
            parts.append(_written(model, begun, sampler, seed, samples, canvases, watch, done, total))
    longest = max(part.tokens.shape[1] for part in parts)
    padded = [torch.nn.functional.pad(one.tokens, (0, longest - one.tokens.shape[1]), value=model.pad) for one in parts]
    free = sum(one.calls * len(one.tokens) for one in parts) * model.length
    tokenizer = model.tokenizer
    return Samples(
        tokens=torch.cat(padded).cpu(),
        nfe=max(one.calls for one in parts),
        head_rows=sum(one.rows for one in parts) / max(1, free),
        committed=torch.cat([one.committed for one in parts]).cpu(),
        memory=(),
        sampler=sampler,
        seed=seed,
        first=first,
        given=torch.full((n, longest), -1),
        model=model.name,
        digest=begun.digest,
        precision=model.precision,
        tokenizer=tokenizer_digest(tokenizer),
        _decode=None if tokenizer is None else lambda ids: tokenizer.decode([i for i in ids if i not in model.ends]),
    )


def _written(
    model: Canvas, begun: Canvas, sampler: Sampler, seed: int, samples: Tensor, canvases: int, watch: Watcher,
    done: int, total: int,
) -> Written:  # fmt: skip
    """The replies of some samples. A sample that has ended leaves the batch, and its context the cache."""
    size, width = len(samples), model.length
    tokens = torch.full((size, canvases * width), model.pad, device=samples.device)
    committed, open = torch.zeros_like(samples), torch.arange(size, device=samples.device)
    context, calls, rows, canvas = begun, 0, 0, 0
    for canvas in range(canvases):
        counted = Counted(context)
        rng = CounterRNG(canvas_seed(seed, canvas), samples[open])
        ctx = open_context(counted, rng, torch.full((len(open), width), -1, device=samples.device))
        for state, info in generate(sampler, ctx):
            watch(state, info, done + (canvas * sampler.nfe + info.call + 1) * size, total)
            if bool(sampler.finished(state).all()):
                ctx.check_finite()
                break
        calls, rows = calls + counted.calls, rows + counted.rows
        committed[open] += info.marks.get("committed", ctx.no_positions).sum(-1)
        written, goes_on = ended(state.tokens, model.ends, model.pad)
        tokens[open, canvas * width : (canvas + 1) * width] = written
        if not goes_on.any():
            break
        if canvas < canvases - 1:
            context, open = context.after(state.tokens[goes_on], goes_on.nonzero()[:, 0]), open[goes_on]
    return Written(tokens[:, : (canvas + 1) * width], committed, calls, rows)


def ended(tokens: Tensor, ends: tuple[int, ...], pad: int) -> tuple[Tensor, Tensor]:
    """(B, L) a canvas with all after its first end padded, and (B,) bool: where there was none."""
    is_end = torch.isin(tokens, torch.tensor(ends, dtype=torch.long, device=tokens.device))
    after = is_end.cumsum(-1) - is_end.long() > 0
    return tokens.masked_fill(after, pad), ~is_end.any(-1)
