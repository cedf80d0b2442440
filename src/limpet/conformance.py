"""Whether somebody's own model or sampler keeps the contract: one row a check, with what was found."""

from __future__ import annotations

import inspect
import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limpet import samplers
from limpet.diffusion import backends as steps
from limpet.diffusion import process
from limpet.diffusion.backends import Transition
from limpet.diffusion.process import EPS
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.transitions import ancestral
from limpet.diffusion.truncation import Support
from limpet.errors import LimpetError
from limpet.generation import Counted
from limpet.models import Denoiser, Needed, Wrapped, check_model, tokenizer_digest
from limpet.models.exact import Source
from limpet.registry import said
from limpet.samplers import Sampler, params
from limpet.samplers.context import Context, State, StepInfo, generate, open_context

SAMPLES, SEED, NFE = 3, 8200, 8
TIMES = (1.0, 0.5, EPS)  # one for each sample, too
LOGITS = 2**23  # a check holds at most as many of them: a large vocabulary is checked on shorter sequences
ROUNDING = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2}  # of the largest logit, over other numbers of rows
COARSE = 5e-2  # the same for bfloat16 and what else there is
MARKS = 7  # that a path can be recorded with, beside where it was given
REMEMBERED = 64  # distributions of whole samples
FLIPS = 1e-2  # of tokens that two backends may draw apart, as their sums round differently
STRANGE = (
    object(),
    None,
    True,
    -1,
    0,
    2**40,
    math.nan,
    math.inf,
    "no such thing",
)  # most parameters refuse most of these

Claims = Iterable[tuple[bool, str]]  # what a check finds, one by one: whether it is as it should be, and in words


class Row(NamedTuple):
    """One check: the first of its claims that does not hold, or else the last."""

    what: str
    found: str
    ok: bool


def _row(what: str, claims: Callable[..., Claims], *given: Any) -> Row:
    """A check of a subject that may do anything, for it is somebody's own: what it raises is what was found."""
    row = Row(what, "", True)
    try:
        with torch.inference_mode():
            for ok, found in claims(*given):
                row = Row(what, found, ok)
                if not ok:
                    break
    except Exception as error:
        row = Row(what, str(error) if isinstance(error, LimpetError) else said(error), False)
    return row


class Alone(Wrapped):
    """A denoiser that reads every sample alone, so that nothing rounds otherwise in another company; that knows nothing
    where nobody asked; and that remembers, for a checked path is walked more than once."""

    def __init__(self, inner: Denoiser) -> None:
        super().__init__(inner)
        self.known: dict[tuple[float, bytes, bytes, bytes], Tensor] = {}

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return self.body_carried(tokens, t, None, None)

    def body_carried(self, tokens: Tensor, t: float | Tensor, clean: Tensor | None, carried: Tensor | None) -> Tensor:
        times = torch.as_tensor(t, dtype=torch.float64).expand(len(tokens)).tolist()
        told, brought = ([None] * len(times) if part is None else torch.split(part, 1) for part in (clean, carried))
        return torch.cat(list(map(self._row, times, torch.split(tokens, 1), told, brought)))

    def _row(self, t: float, row: Tensor, clean: Tensor | None, carried: Tensor | None) -> Tensor:
        key = t, _bytes(row), _bytes(clean), _bytes(carried)
        if key not in self.known:
            if len(self.known) == REMEMBERED:
                self.known.clear()
            inner = self.inner
            if inner.carries:
                body = inner.body_carried(row, t, clean, carried)
            else:
                body = inner.body(row, t) if clean is None else inner.body_told(row, t, lambda: None, clean)
            self.known[key] = inner.head(body)
        return self.known[key]

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        return self.body_told(tokens, t, needed, None)

    def body_told(self, tokens: Tensor, t: float | Tensor, needed: Needed, clean: Tensor | None) -> Tensor:
        logits, index = self.body_carried(tokens, t, clean, None), needed()
        if index is None:
            return logits
        unasked = torch.ones_like(tokens, dtype=torch.bool).flatten().index_fill(0, index.long(), False)
        return logits.masked_fill(unasked.view(*tokens.shape, 1), math.nan)

    def head(self, features: Tensor) -> Tensor:
        return features


def _bytes(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def length_of(model: Denoiser) -> int:
    """The length that a model is checked on: its own, unless its vocabulary is large."""
    return max(1, min(model.length, LOGITS // (SAMPLES * model.vocab_size)))


def _path(model: Denoiser, length: int, fixed: Tensor | None = None, which: slice = slice(None), **how: Any) -> Context:
    """The paths that are checked, or some of them."""
    rng = CounterRNG(SEED, torch.arange(SAMPLES, device=model.device)[which])
    free = torch.full((SAMPLES, length), -1, device=model.device)
    return open_context(model, rng, (free if fixed is None else fixed)[which], **how)


# Models: each check is given a model and (3, L) uniform tokens


def model_rows(model: Denoiser, length: int | None = None) -> Iterator[Row]:
    """Every check of a model; nothing more of one that does not say what it is."""
    first = _row("it says what it is", _says, model)
    yield first
    if first.ok:
        for what, claims in MODEL_CHECKS.items():
            yield _row(what, claims, model, _path(model, length or length_of(model)).noise())


def _says(model: Denoiser) -> Claims:
    check_model(model)
    size = f"{model.vocab_size} tokens, length {model.length}"
    how = f"predicts {model.predicts}, {model.schedule.name}, {model.precision}"
    yield True, f"{model.name}, digest {model.digest[:12]}, {size}, {how}"


def _shapes(model: Denoiser, tokens: Tensor) -> Claims:
    features = model.body(tokens, 0.5)
    logits, row, whole = model.head(features), model.head(features[0, :1]), model.logits(tokens, 0.5)
    size = (*tokens.shape, model.vocab_size)
    ok = features.shape[:2] == tokens.shape and logits.shape == whole.shape == size and row.shape == (1, size[-1])
    found = f"features {tuple(features.shape)}, logits {tuple(logits.shape)} as {whole.dtype}"
    yield ok and whole.dtype == torch.float32, found.replace("torch.", "")


def _distributions(model: Denoiser, tokens: Tensor) -> Claims:
    for t in TIMES:
        sums = model.logits(tokens, t).double().softmax(-1).sum(-1)
        for sample, position in sums.isnan().nonzero().tolist():
            yield False, f"none (nan, +inf or all -inf) at t = {t:g}, position {position} of sample {sample}"
    yield True, f"at every position, at t = {', '.join(f'{t:g}' for t in TIMES)}"


def _near(model: Denoiser, *pairs: tuple[Tensor, Tensor]) -> Claims:
    """The largest difference of logits that should be the same, against rounding; an exact source has none."""
    worst = scale = 0.0
    for one, other in pairs:
        apart = torch.where(one == other, 0.0, (one - other).abs()).nan_to_num(nan=math.inf)
        worst, scale = max(worst, float(apart.max())), max(scale, float(other[other.isfinite()].abs().max()))
    allowed = 0.0 if isinstance(model, Source) else ROUNDING.get(model.precision, COARSE) * scale
    yield worst <= allowed, f"largest difference {worst:.2g}, of logits up to {scale:.3g}"


def _parts(model: Denoiser, tokens: Tensor) -> Claims:
    return _near(model, *((model.head(model.body(tokens, t)).float(), model.logits(tokens, t)) for t in TIMES))


def _some(model: Denoiser, tokens: Tensor) -> Claims:
    """The body where every third position is needed, and the head on those rows."""
    index = torch.arange(0, tokens.numel(), 3, device=tokens.device)
    features = model.body_at(tokens, 0.5, lambda: index).flatten(0, 1)[index]
    return _near(model, (model.head(features).float(), model.logits(tokens, 0.5).flatten(0, 1)[index]))


def _times(model: Denoiser, tokens: Tensor) -> Claims:
    each = model.logits(tokens, torch.tensor(TIMES, dtype=torch.float64, device=tokens.device))
    return _near(model, *((each[i], model.logits(tokens, t)[i]) for i, t in enumerate(TIMES)))


def _batch(model: Denoiser, tokens: Tensor) -> Claims:
    pairs = ((model.logits(tokens[i : i + 1], t)[0], model.logits(tokens, t)[i]) for i, t in enumerate(TIMES))
    return _near(model, *pairs)


def _clean(model: Denoiser, tokens: Tensor) -> Claims:
    """Nothing clean is nothing told; and a sample alone hears what it hears in a batch."""
    if model.told_clean == "nothing":
        yield True, "nothing to do: it is told of none"
        return
    half = torch.arange(tokens.shape[1], device=tokens.device) < tokens.shape[1] // 2
    clean = torch.stack([half, half & False, half | True])[: len(tokens)]

    def said(which: slice, clean: Tensor | None) -> Tensor:
        return model.head(model.body_told(tokens[which], 0.5, lambda: None, clean)).float()

    every, none = slice(None), torch.zeros_like(clean)
    alone = torch.cat([said(slice(i, i + 1), clean[i : i + 1]) for i in range(len(tokens))])
    yield from _near(model, (said(every, none), model.logits(tokens, 0.5)), (alone, said(every, clean)))


def _again(model: Denoiser, tokens: Tensor) -> Claims:
    given = tokens.clone()
    same = all(model.logits(tokens, t).equal(model.logits(tokens, t)) for t in TIMES)
    held = tokens.equal(given)
    yield same and held, f"{'the same' if same else 'other'} logits, its tokens {'as' if held else 'not as'} given"


def _falls(model: Denoiser, tokens: Tensor) -> Claims:
    signal = model.schedule.signal(torch.linspace(EPS, 1, 1001, dtype=torch.float64))
    first, last = float(signal[0]), float(signal[-1])
    falls = bool((signal.diff() < 0).all()) and first <= 1 and last >= 0
    yield falls, f"signal {first:.6g} at t = {EPS:g}, {last:.6g} at t = 1"


def _reverse(model: Denoiser, tokens: Tensor) -> Claims:
    """The dense reverse distribution is a distribution, and every backend draws the same tokens from it with the same uniforms."""
    alone, backends, worst, flips, drawn = Alone(model), steps.backends(tokens.device), 0.0, 0, 0
    for call, (t, s) in enumerate(((1.0, 0.6), (0.5, 0.3), (0.1, EPS))):
        before, after = float(model.schedule.signal(t)), float(model.schedule.signal(s))
        probs = alone.body(tokens, t).double().softmax(-1)
        probs = process.leave_one_out(probs, tokens, before) if model.predicts == "posterior" else probs
        reverse = process.reverse_probs(probs, tokens, before, after)
        worst = max(worst, float((reverse.sum(-1) - 1).abs().max()), float(-reverse.min()))
        for top_p in (1.0, 0.9):
            results = []
            for backend in backends.values():
                ctx = _path(alone, tokens.shape[1], backend=backend)
                coins = ancestral(before, after)
                ask = Transition(call, tokens, ctx.free, ctx.no_positions, coins, support=Support(top_p))
                results.append(ctx.call(tokens, t, ask)[1].tokens)
            flips += sum(int((result != results[0]).sum()) for result in results[1:])
            drawn += tokens.numel() * (len(results) - 1)
    ok = worst < 1e-9 and flips <= (0 if isinstance(model, Source) else FLIPS * drawn)
    yield ok, f"sums to 1 within {worst:.1g}; {' and '.join(backends)} draw {flips} of {drawn} tokens apart"


def _converts(model: Denoiser, tokens: Tensor) -> Claims:
    if model.predicts != "posterior":
        yield True, "nothing to do: its distributions are leave-one-out"
        return
    worst = 0.0
    for t in TIMES:
        probs, signal = model.logits(tokens, t).double().softmax(-1), float(model.schedule.signal(t))
        back = process.posterior(process.leave_one_out(probs, tokens, signal), tokens, signal)
        worst = max(worst, float((back - probs).abs().max()))
    yield worst < 1e-9, f"to leave-one-out and back within {worst:.1g}"


def _text(model: Denoiser, tokens: Tensor) -> Claims:
    tokenizer = model.tokenizer
    if tokenizer is None:
        yield True, "no tokenizer: its samples are ids"
        return
    lossless, inside = True, range(model.vocab_size)
    for row in tokens.tolist():
        text = tokenizer.decode(row)
        again = tokenizer.decode(ids := list(tokenizer.encode(text)))
        yield all(token in inside for token in ids), f"{text[:40]!r} is encoded with an id outside the vocabulary"
        settled = tokenizer.decode(list(tokenizer.encode(again)))
        yield settled == again, f"{again[:40]!r} is another text when encoded and decoded"
        yield bool(again) or not text, f"{text[:40]!r} is no text when encoded and decoded"
        lossless &= again == text
    silent = sum(not tokenizer.decode([token]) for token in range(model.vocab_size))
    digest = tokenizer_digest(tokenizer)
    known = f"digest {digest[:12]}" if digest else "no digest, so judges read its samples as text"
    back = "comes back from ids" if lossless else "comes back from ids once encoded, as the tokenizer writes it"
    yield True, f"{back}; {silent} of {model.vocab_size} ids leave none; {known}"


MODEL_CHECKS: dict[str, Callable[[Denoiser, Tensor], Claims]] = {
    "shapes of body, head and logits": _shapes,
    "distributions": _distributions,
    "body and head against logits": _parts,
    "some positions against all": _some,
    "a time for each sample against one for all": _times,
    "a sample alone against a batch": _batch,
    "clean positions": _clean,
    "the same call twice": _again,
    "the schedule falls": _falls,
    "the reverse distribution": _reverse,
    "a posterior converts": _converts,
    "text": _text,
}


# Samplers: each check is given a sampler on a model


class Walk(NamedTuple):
    """A batch of paths: every state, the first before any call, and what each call saw and did."""

    states: list[State]
    infos: list[StepInfo]
    calls: int  # of the denoiser, counted


class Subject:
    """A sampler on a model."""

    def __init__(self, sampler: Sampler, model: Denoiser, length: int) -> None:
        self.sampler, self.model, self.length, self.alone = sampler, model, length, Alone(model)
        self.shape = SAMPLES, length

    def walk(self, sampler: Sampler | None = None, alone: bool = True, calls: int | None = None, **how: Any) -> Walk:
        """All calls of the paths, or the first few; under another sampler, and each sample alone, unless told not."""
        sampler = sampler or self.sampler
        counted = Counted(self.alone if alone else self.model)
        ctx = _path(counted, self.length, **({"fixed": self.few} if sampler.needs_given else {}) | how)
        begun = sampler.begin(ctx)
        walked = list(islice(generate(sampler, ctx, begun), calls))
        return Walk([begun, *(state for state, _ in walked)], [info for _, info in walked], counted.calls)

    @cached_property
    def every(self) -> Tensor:
        """A given token at every position."""
        return _path(self.model, self.length).noise().flip(-1)

    @cached_property
    def few(self) -> Tensor:
        """The same at the beginning, and at a few positions further on; -1 elsewhere."""
        position = torch.arange(self.length, device=self.every.device)
        return self.every.masked_fill((position >= self.length // 4) & (position % 7 > 0), -1)

    @cached_property
    def plain(self) -> Walk:
        return self.walk(alone=False)


def arm_rows(model: Denoiser, text: str, nfe: int = NFE, length: int | None = None) -> Iterator[Row]:
    """Every check of a sampler, named as `--arm` names it, on a model; nothing more of one that cannot be made."""
    first = _row("it can be made", lambda: [(True, samplers.parse(text, nfe=nfe)[1].caption)])
    yield first
    if first.ok:
        yield from sampler_rows(model, samplers.parse(text, nfe=nfe)[1], length)


def sampler_rows(model: Denoiser, sampler: Sampler, length: int | None = None) -> Iterator[Row]:
    """Every check of a sampler on a model."""
    subject = Subject(sampler, model, length or length_of(model))
    for what, claims in SAMPLER_CHECKS.items():
        yield _row(what, claims, subject)


def _params(subject: Subject) -> Claims:
    kind, there = type(subject.sampler), params(type(subject.sampler))
    own = [name for base in kind.__mro__ if Sampler in base.__mro__ for name, hint in
           inspect.get_annotations(base).items() if "ClassVar" not in str(hint)]  # fmt: skip
    loose, silent = [name for name in own if name not in there], [name for name in there if not there[name].words]
    yield not loose, f"{', '.join(loose)} is annotated but no field: make {kind.__name__} a frozen dataclass too"
    yield not silent, f"no words for {', '.join(silent)}: use limpet.parameter"
    yield True, ", ".join(there)


def _refuses(subject: Subject) -> Claims:
    there = params(type(subject.sampler))
    bad = [(name, value) for name, param in there.items() for value in STRANGE if not param.accepts(value)]
    for name, value in bad:
        with suppress(LimpetError):
            subject.sampler.replace(**{name: value})
            yield False, f"{name} {value!r} is taken, and it takes {there[name].takes}"
    yield True, f"{len(bad)} of them"


def _written(subject: Subject) -> Claims:
    """As it is, and with each parameter changed; a class may come back from its file as another of the same name."""
    for sampler in (subject.sampler, *_changed(subject.sampler).values()):
        text = json.dumps(sampler.to_dict())
        for again in (samplers.from_dict(json.loads(text)), pickle.loads(pickle.dumps(sampler))):
            alike = type(again).__qualname__ == type(sampler).__qualname__ and vars(again) == vars(sampler)
            yield alike, f"{text} is read as another sampler"
    yield True, json.dumps(subject.sampler.to_dict())


def _calls(subject: Subject) -> Claims:
    told, made = [info.call for info in subject.plain.infos], f"{subject.plain.calls} for nfe {subject.sampler.nfe}"
    yield told == list(range(subject.sampler.nfe)), f"{made}, told as {', '.join(map(str, told))}"
    yield subject.plain.calls == subject.sampler.nfe, made


def _states(subject: Subject) -> Claims:
    size, kinds = subject.model.vocab_size, [part.dtype for part in subject.plain.states[0].memory]
    for call, tokens, memory, _ in subject.plain.states:
        shapes = [tuple(tokens.shape), *(tuple(part.shape[:2]) for part in memory)]
        yield set(shapes) == {subject.shape}, f"{shapes} after {call} calls; each must begin with {subject.shape}"
        inside = tokens.dtype == torch.long and int(tokens.min()) >= 0 and int(tokens.max()) < size
        yield inside, f"tokens that are none of the {size} after {call} calls"
        alike = not memory or not kinds or [part.dtype for part in memory] == kinds
        yield alike, f"another kind of memory after {call} calls than at the beginning"
    yield True, f"tokens and {len(kinds)} of its own, {subject.shape} each"


def _marks(subject: Subject) -> Claims:
    names = list(subject.plain.infos[0].marks)
    room = len(names) <= MARKS and "given" not in names
    yield room, f"{', '.join(names)}: a recorded path has room for {MARKS}, and given is one of its own"
    for info in subject.plain.infos:
        yield list(info.marks) == names, f"{', '.join(info.marks)} in call {info.call}, {', '.join(names)} in the first"
        for name, mark in {"input": info.input, **info.marks}.items():
            ok = tuple(mark.shape) == subject.shape and (name not in info.marks or mark.dtype == torch.bool)
            yield ok, f"{name} of call {info.call} is {mark.dtype} {tuple(mark.shape)}".replace("torch.", "")
    yield True, ", ".join(names) or "none"


def _given(subject: Subject) -> Claims:
    """A few positions, then all of them. A call of a sampler that needs them may hide some, if it marks where."""
    for fixed in (subject.few, subject.every):
        walked = subject.walk(alone=False, fixed=fixed)
        seen = [(f"state after {state.call} calls", state.tokens) for state in walked.states]
        for info in walked.infos:
            noised = info.marks.get("noised") if subject.sampler.needs_given else None
            input = info.input if noised is None else fixed.where(noised, info.input)
            seen.append((f"input of call {info.call}", input))
        for where, tokens in seen:
            held = tokens.where(fixed >= 0, fixed).equal(fixed)
            yield held, f"another token stands at a given position in the {where}"
    yield True, f"{int((subject.few[0] >= 0).sum())} of {subject.length}, and then all, hold in state, input and output"


def _parted(ones: list[State], others: list[State], which: slice = slice(None)) -> int | None:
    """After how many calls two walks are no longer the same; what is remembered counts where both remember alike."""
    for one, other in zip(ones, others, strict=True):
        memories = zip(one.memory, other.memory, strict=False)
        if not all(a[which].equal(b) for a, b in ((one.tokens, other.tokens), *memories)):
            return one.call
    return None


def _company(subject: Subject) -> Claims:
    one = slice(1, 2)
    parted = _parted(subject.walk().states, subject.walk(which=one).states, one)
    how = "the same" if parted is None else f"another after {parted} calls"
    yield parted is None, f"sample 1 of {SAMPLES} is {how}"


def _watched(subject: Subject) -> Claims:
    """A trace looks at every distribution, and without one a distribution that was not asked for is nan: neither changes what the
    denoiser sees, nor the end. A state that nobody looks at again may differ."""
    quiet, watched = subject.walk(), subject.walk(trace=True)
    for one, other in zip(quiet.infos, watched.infos, strict=True):
        yield one.input.equal(other.input), f"another input in call {one.call}"
    same = quiet.states[-1].tokens.equal(watched.states[-1].tokens)
    yield same, f"the same inputs, and {'the same' if same else 'another'} end"


def _shares(subject: Subject) -> Claims:
    """What it and another both claim to share is the same: itself with one parameter changed, and every other sampler."""
    sampler, own, claims = subject.sampler, subject.walk().states, []
    others = {f"{name} changed": other for name, other in _changed(sampler).items()}
    kinds = [name for name, kind in samplers.available().items() if kind is not type(sampler)]
    for name, other in {**others, **{kind: samplers.parse(kind, nfe=sampler.nfe)[1] for kind in kinds}}.items():
        claimed = min(sampler.shared(other), other.shared(sampler))
        what = f"with {name} it claims {claimed} calls"
        yield 0 <= claimed <= min(sampler.nfe, other.nfe), what
        if claimed:
            parted = _parted(own[: claimed + 1], subject.walk(other, calls=claimed).states)
            yield parted is None, f"{what}, and they part after {parted}"
            claims.append(f"{claimed} with {name}")
    yield True, ", ".join(claims) or "none"


def _changed(sampler: Sampler) -> dict[str, Sampler]:
    """The same sampler with each parameter changed that can be, and far, so that it shows."""
    found: dict[str, Sampler] = {}
    for name, param in params(type(sampler)).items():
        value = getattr(sampler, name)
        near = (value + 1, value / 2, value - 1) if isinstance(value, int | float) else ()
        for other in (None, False, True, 0.5, 1, *reversed(near), param.low, param.high, *reversed(param.choices)):
            if other != value and param.accepts(other):
                with suppress(LimpetError):  # parameters may depend on each other
                    found[name] = sampler.replace(**{name: other})  # the last that can be is the best
    return found


SAMPLER_CHECKS: dict[str, Callable[[Subject], Claims]] = {
    "parameters": _params,
    "bad values are refused": _refuses,
    "written out and read back": _written,
    "calls of the denoiser": _calls,
    "state and memory": _states,
    "marks": _marks,
    "given tokens": _given,
    "a sample alone against a batch": _company,
    "a path that is watched": _watched,
    "calls shared with another": _shares,
}


def verdict(model: Denoiser, rows: list[Row]) -> str:
    """One line to send to whoever asks."""
    from limpet import __version__

    failed = sum(not row.ok for row in rows)
    return f"limpet {__version__}, {model.name} ({model.digest[:12]}): {len(rows)} checks, {failed} failed"
