"""Completions, drawn in common batches: a text depends on its own request alone. Knows neither HTTP nor who waits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion.rng import CounterRNG
from limpet.errors import LimpetError
from limpet.generation import (
    Inputs,
    default_batch_size,
    fixed_tokens,
    ids_of,
    prompt_tokens,
    replies,
    rollout,
    split_text,
)
from limpet.models import Canvas, Denoiser
from limpet.models.exact import Source
from limpet.samplers import Sampler, choose_sampler
from limpet.server.handlers import Report, Resources

LENGTH_STEP = 32  # lengths of texts without a suffix are rounded up to a multiple of this: similar ones share a batch

Chat = tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class TextRequest:
    """A request for completions, checked as far as possible without its model."""

    model: str
    prompts: tuple[str | tuple[int, ...] | Chat, ...]  # text, ids, or the messages of a chat
    suffix: str
    sampler: Sampler | None  # None for the recommended one at `nfe`
    described: dict[str, Any] | None  # the sampler as answers show it
    nfe: int
    n: int  # samples of each prompt
    seed: int
    max_tokens: int | None
    limit: int  # tokens in a sample, prompt included
    sharpness: float | None = None  # of the recommended sampler
    steps: bool = False  # whether the text after every network call is reported, too

    @property
    def key(self) -> Hashable:
        """Requests with the same key can run in one batch."""
        return self.model, self.sampler, self.nfe, self.sharpness

    @property
    def rows(self) -> int:
        """Samples in all."""
        return self.n * len(self.prompts)


class Row(NamedTuple):
    """One sample of a batch: what is fixed in it, and where its completion stands."""

    request: int  # the number of its request in the batch
    choice: int  # its number in the request
    seed: int
    sample: int  # its number under the seed
    fixed: Tensor  # (L,) with -1 where it is free; of a Canvas model (P,), the tokens before the reply
    start: int
    end: int
    canvases: int

    @property
    def layout(self) -> Hashable:
        """Rows with the same layout run in one batch."""
        return len(self.fixed), self.canvases


def completions(resources: Resources, requests: Sequence[TextRequest], report: Report) -> None:
    """The completions of requests with one key. Each is reported when it is known, as the event done or refused."""
    model, first = resources.models[requests[0].model], requests[0]
    sampler = first.sampler or choose_sampler(None, first.nfe, first.sharpness, model)
    rows: list[list[Row]] = []
    for number, request in enumerate(requests):
        try:
            rows.append(list(_rows(model, request, number)))
        except LimpetError as error:
            rows.append([])
            report("refused", (number, str(error)))
    choices: list[dict[int, dict[str, Any]]] = [{} for _ in requests]

    def finish(row: Row, choice: dict[str, Any]) -> None:
        request, own, found = requests[row.request], rows[row.request], choices[row.request]
        found[row.choice] = choice
        if len(found) == len(own):
            report("done", (row.request, {
                "choices": [found[i] for i in range(len(own))],
                "prompt_tokens": sum(one.start for one in own[:: request.n]),
                "sampler": request.described or sampler.to_dict(), "nfe": sampler.nfe,
            }))  # fmt: skip

    def tell(row: Row, kind: str, data: dict[str, Any]) -> None:
        report(kind, (row.request, {"index": row.choice, **data}))

    layouts: dict[Hashable, list[Row]] = {}
    for row in (row for own in rows for row in own):
        layouts.setdefault(row.layout, []).append(row)
    for alike in layouts.values():
        size = default_batch_size(model.device, model.length if isinstance(model, Canvas) else len(alike[0].fixed))
        for start in range(0, len(alike), size):
            some = alike[start : start + size]
            if isinstance(model, Canvas):
                _draw_canvases(model, sampler, some, report, finish, tell)
            else:
                watched = {i for i, row in enumerate(some) if requests[row.request].steps}
                _draw(model, sampler, some, watched, report, finish, tell)


Place = tuple[Tensor, int, int, int]  # the last fields of a Row
Finish = Callable[[Row, dict[str, Any]], None]
Tell = Callable[[Row, str, dict[str, Any]], None]


def _rows(model: Denoiser, request: TextRequest, number: int) -> Iterator[Row]:
    """The samples of one request. Raises where the model cannot draw them."""
    if model.tokenizer is None:
        raise LimpetError(f"{model.name} has no tokenizer, so its samples have no text: choose another model")
    choice = 0
    for prompt in request.prompts:
        if isinstance(model, Canvas):
            place = _canvas_place(model, request, prompt)
        else:
            place = _plain_place(model, request, prompt)
        for sample in range(request.n):
            yield Row(number, choice, request.seed, sample, *place)
            choice += 1


def _plain_place(model: Denoiser, request: TextRequest, prompt: Any) -> Place:
    if model.prompt_layout is not None and request.suffix:
        raise LimpetError(f"{model.name} knows rows of one form: leave the suffix out")
    ids = prompt_tokens(model, list(prompt) if isinstance(prompt, tuple) else prompt) if prompt else []
    if model.prompt_layout is not None and not ids:
        ids = ids_of(model, model.prompt_layout.empty, "the prompt")
    after = ids_of(model, request.suffix, "the suffix") if request.suffix else []
    known, most = len(ids) + len(after), min(model.length, request.limit)
    is_whole = isinstance(model, Source) or model.prompt_layout is not None  # it knows no other length
    if known >= most or (is_whole and model.length > request.limit):
        raise LimpetError(
            f"prompt and suffix have {known} tokens, and a text of {model.name} has at most {most} here: shorten them"
        )
    count = min(most - known, request.max_tokens or most)
    step = 1 if after else LENGTH_STEP  # what fills a gap is `limpet.infill`'s
    length = model.length if is_whole else min(most, -(-(known + count) // step) * step)
    (fixed,) = fixed_tokens(model, 1, length, ids, {len(ids) + count: after} if after else None)
    return fixed, len(ids), len(ids) + count, 0


def _canvas_place(model: Canvas, request: TextRequest, prompt: Any) -> Place:
    if request.suffix:
        raise LimpetError(f"{model.name} writes replies: leave the suffix out")
    begin = [] if model.begin is None else [model.begin]
    if isinstance(prompt, str):
        ids = [*begin, *ids_of(model, prompt, "the prompt")]
    elif prompt and not isinstance(prompt[0], int):
        ids = model.prompt(prompt)
    else:
        ids = ids_of(model, list(prompt), "the prompt") or begin
    count = request.max_tokens or model.length
    if len(ids) + count > request.limit:
        raise LimpetError(
            f"the prompt has {len(ids)} tokens and the reply {count}, and this server writes at most {request.limit}: "
            "shorten the prompt or lower max_tokens"
        )
    fixed = torch.tensor(ids, dtype=torch.long)
    return fixed, len(ids), len(ids) + count, -(-count // model.length)


def _draw(
    model: Denoiser,
    sampler: Sampler,
    rows: Sequence[Row],
    watched: set[int],
    report: Report,
    finish: Finish,
    tell: Tell,
) -> None:
    """One batch of a model that writes whole texts."""
    fixed = torch.stack([row.fixed for row in rows]).to(model.device)
    fitting = sampler.clamped(fixed.shape[1], model.vocab_size)
    decode = model.tokenizer.decode  # type: ignore[union-attr]
    for step in rollout(model, fitting, Inputs(fixed, _rng(model, rows))):
        report("", None)
        for i in watched:
            ids = step.tokens[i, : rows[i].end].tolist()
            tell(rows[i], "step", {"call": step.call + 1, "text": split_text(decode, ids, rows[i].start)[1]})
    for row, ids in zip(rows, step.tokens.tolist(), strict=True):
        text = split_text(decode, ids[: row.end], row.start)[1]
        finish(row, {"text": text, "finish_reason": "length", "tokens": row.end - row.start})


def _draw_canvases(
    model: Canvas, sampler: Sampler, rows: Sequence[Row], report: Report, finish: Finish, tell: Tell
) -> None:
    """One batch of replies to prompts of the same number of tokens. A text grows by whole canvases."""
    prompts = torch.stack([row.fixed for row in rows])
    prompts = prompts[:1] if bool((prompts == prompts[0]).all()) else prompts
    begun = model.after(prompts) if prompts.numel() else model
    ends, decode = set(model.ends), model.tokenizer.decode  # type: ignore[union-attr]

    fitting, canvases = sampler.clamped(model.length, model.vocab_size), rows[0].canvases

    def choice(row: Row, ids: list[int]) -> dict[str, Any]:
        count = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        most = row.end - row.start
        reason = "stop" if count < min(len(ids), most) else "length"
        return {"text": decode(ids[: min(count, most)]), "finish_reason": reason, "tokens": min(count + 1, most)}

    def tell_all(tokens: Tensor) -> None:
        is_last = tokens.shape[1] == canvases * model.length
        for row, ids in zip(rows, [] if is_last else tokens.tolist(), strict=not is_last):
            tell(row, "text", {"text": choice(row, ids)["text"]})

    with torch.inference_mode():
        found = replies(begun, fitting, _rng(model, rows), canvases, lambda _: report("", None), tell_all)
    for row, ids in zip(rows, found.tokens.tolist(), strict=True):
        finish(row, choice(row, ids))


def _rng(model: Denoiser, rows: Sequence[Row]) -> CounterRNG:
    """The random numbers of the rows: those that `limpet.sample` gives each under its seed."""
    seeds, samples = torch.tensor([[row.seed, row.sample] for row in rows], device=model.device).T
    return CounterRNG(seeds, samples)
