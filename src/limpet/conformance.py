"""Checks of a user's model or sampler against what the rest of limpet relies on; each check is one row of a report."""

import copy
import inspect
import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limpet import samplers
from limpet.diffusion import backends, process
from limpet.diffusion.backends import Transition
from limpet.diffusion.process import EPS
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.transitions import ancestral
from limpet.diffusion.truncation import Support
from limpet.errors import LimpetError
from limpet.generation import CountingDenoiser, Inputs, context_of, rollout
from limpet.models import Cache, Denoiser, ModelInput, WrappedDenoiser, check_model, tokenizer_digest
from limpet.models.exact import Source
from limpet.registry import describe_error
from limpet.samplers import Sampler, State, StepInfo, params

SAMPLES, SEED, NFE = 3, 8200, 8
TIMES = (1.0, 0.5, EPS)  # also one for each sample
MAX_LOGITS = 2**23  # most logits of one batch: a model with a large vocabulary is checked on shorter sequences
ROUNDING = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2}  # allowed difference, relative to the largest logit
COARSE_ROUNDING = 5e-2  # the same for bfloat16 and all other precisions
MAX_MASKS = 7  # masks that a recording stores besides the fixed positions
CACHED_SAMPLES = 64  # logits of whole samples that are kept
MAX_DISAGREEMENT = 1e-2  # share of tokens that two backends may draw differently, because their sums round differently
BAD_VALUES = (object(), None, True, -1, 0, 2**40, math.nan, math.inf, "no such thing")  # most parameters refuse most

Claims = Iterable[tuple[bool, str]]  # the findings of a check, in order: whether each is as it should be, and a text


class CheckResult(NamedTuple):
    """The result of one check: its first finding that is wrong, or else its last finding."""

    what: str
    found: str
    ok: bool


def _check(what: str, claims: Callable[..., Claims], *arguments: Any) -> CheckResult:
    """Runs a check. The subject is a user's code, so an exception of any kind is a finding."""
    result = CheckResult(what, "", True)
    try:
        with torch.inference_mode():
            for ok, found in claims(*arguments):
                result = CheckResult(what, found, ok)
                if not ok:
                    break
    except Exception as error:
        found = str(error) if isinstance(error, LimpetError) else describe_error(error)
        result = CheckResult(what, found, False)
    return result


class SeparatedDenoiser(WrappedDenoiser):
    """A denoiser that computes every sample in a batch of its own, so that rounding does not depend on the batch.

    Logits outside the needed rows are NaN, and recent logits are stored, because checks repeat trajectories. A call
    with a cache is computed as it is."""

    def __init__(self, inner: Denoiser) -> None:
        super().__init__(inner)
        self.cache: dict[tuple[float, bytes, bytes, bytes], Tensor] = {}

    def backbone(self, inputs: ModelInput) -> Tensor:
        if inputs.cache is not None:
            return self.inner.head(self.inner.backbone(inputs))
        tokens, size = inputs.tokens, len(inputs.tokens)
        times = torch.as_tensor(inputs.t, dtype=torch.float64).expand(size).tolist()
        clean, previous = (
            [None] * size if part is None else torch.split(part, 1) for part in (inputs.clean, inputs.previous)
        )
        logits = torch.cat(list(map(self._logits, times, torch.split(tokens, 1), clean, previous)))
        if (index := inputs.rows()) is None:
            return logits
        unneeded = torch.ones_like(tokens, dtype=torch.bool).flatten().index_fill(0, index.long(), False)
        return logits.masked_fill(unneeded.view(*tokens.shape, 1), math.nan)

    def _logits(self, t: float, tokens: Tensor, clean: Tensor | None, previous: Tensor | None) -> Tensor:
        key = t, _bytes(tokens), _bytes(clean), _bytes(previous)
        if key not in self.cache:
            if len(self.cache) == CACHED_SAMPLES:
                self.cache.clear()
            inputs = ModelInput(tokens, t, clean=clean, previous=previous)
            self.cache[key] = self.inner.head(self.inner.backbone(inputs))
        return self.cache[key]

    def head(self, features: Tensor) -> Tensor:
        return features


def _bytes(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def length_of(model: Denoiser) -> int:
    """The length that a model is checked on: its own, or less if its vocabulary is large."""
    return max(1, min(model.length, MAX_LOGITS // (SAMPLES * model.vocab_size)))


def _inputs(
    model: Denoiser, length: int, fixed: Tensor | None = None, which: slice = slice(None), **options: Any
) -> Inputs:
    """The inputs of the batch that checks sample, or of some of its samples."""
    rng = CounterRNG(SEED, torch.arange(SAMPLES, device=model.device)[which])
    free = torch.full((SAMPLES, length), -1, device=model.device)
    return Inputs((free if fixed is None else fixed)[which], rng, **options)


# Models: each check takes a model and (3, L) uniform tokens


def model_rows(model: Denoiser, length: int | None = None) -> Iterator[CheckResult]:
    """Every check of a model. A model without the required attributes gets only the first check."""
    first = _check("attributes", _attributes, model)
    yield first
    if first.ok:
        for what, claims in MODEL_CHECKS.items():
            yield _check(what, claims, model, context_of(model, _inputs(model, length or length_of(model))).noise())


def _attributes(model: Denoiser) -> Claims:
    check_model(model)
    size = f"{model.vocab_size} tokens, length {model.length}"
    how = f"predicts {model.predicts}, {model.schedule.name}, {model.precision}"
    yield True, f"{model.name}, digest {model.digest[:12]}, {size}, {how}"


def _shapes(model: Denoiser, tokens: Tensor) -> Claims:
    features = model.backbone(ModelInput(tokens, 0.5))
    logits, rows, combined = model.head(features), model.head(features[0, :1]), model.logits(tokens, 0.5)
    size = (*tokens.shape, model.vocab_size)
    ok = features.shape[:2] == tokens.shape and logits.shape == combined.shape == size and rows.shape == (1, size[-1])
    found = f"features {tuple(features.shape)}, logits {tuple(logits.shape)} as {combined.dtype}"
    yield ok and combined.dtype == torch.float32, found.replace("torch.", "")


def _finite(model: Denoiser, tokens: Tensor) -> Claims:
    for t in TIMES:
        sums = model.logits(tokens, t).double().softmax(-1).sum(-1)
        for sample, position in sums.isnan().nonzero().tolist():
            yield False, f"nan, +inf or all -inf at t = {t:g}, position {position} of sample {sample}"
    yield True, f"at every position, at t = {', '.join(f'{t:g}' for t in TIMES)}"


def _close(model: Denoiser, *pairs: tuple[Tensor, Tensor]) -> Claims:
    """Compares pairs of logits that should differ by rounding at most; those of an exact source must be equal."""
    worst = scale = 0.0
    for one, other in pairs:
        difference = torch.where(one == other, 0.0, (one - other).abs()).nan_to_num(nan=math.inf)
        worst, scale = max(worst, float(difference.max())), max(scale, float(other[other.isfinite()].abs().max()))
    allowed = 0.0 if isinstance(model, Source) else ROUNDING.get(model.precision, COARSE_ROUNDING) * scale
    yield worst <= allowed, f"largest difference {worst:.2g}, of logits up to {scale:.3g}"


def _two_parts(model: Denoiser, tokens: Tensor) -> Claims:
    inputs = (ModelInput(tokens, t) for t in TIMES)
    return _close(model, *((model.head(model.backbone(one)).float(), model.logits(tokens, one.t)) for one in inputs))


def _some_rows(model: Denoiser, tokens: Tensor) -> Claims:
    index = torch.arange(0, tokens.numel(), 3, device=tokens.device)
    features = model.backbone(ModelInput(tokens, 0.5, lambda: index)).flatten(0, 1)[index]
    return _close(model, (model.head(features).float(), model.logits(tokens, 0.5).flatten(0, 1)[index]))


def _times(model: Denoiser, tokens: Tensor) -> Claims:
    logits = model.logits(tokens, torch.tensor(TIMES, dtype=torch.float64, device=tokens.device))
    return _close(model, *((logits[i], model.logits(tokens, t)[i]) for i, t in enumerate(TIMES)))


def _batch(model: Denoiser, tokens: Tensor) -> Claims:
    alone = ((model.logits(tokens[i : i + 1], t)[0], model.logits(tokens, t)[i]) for i, t in enumerate(TIMES))
    return _close(model, *alone)


def _clean_positions(model: Denoiser, tokens: Tensor) -> Claims:
    """A mask without clean positions equals no mask, and the masks of other samples do not matter."""
    if model.clean_tokens == "ignored":
        yield True, "not applicable: the model ignores them"
        return
    half = torch.arange(tokens.shape[1], device=tokens.device) < tokens.shape[1] // 2
    clean = torch.stack([half, half & False, half | True])[: len(tokens)]

    def logits(which: slice, clean: Tensor) -> Tensor:
        return model.head(model.backbone(ModelInput(tokens[which], 0.5, clean=clean))).float()

    every, none = slice(None), torch.zeros_like(clean)
    alone = torch.cat([logits(slice(i, i + 1), clean[i : i + 1]) for i in range(len(tokens))])
    yield from _close(model, (logits(every, none), model.logits(tokens, 0.5)), (alone, logits(every, clean)))


def _repeated(model: Denoiser, tokens: Tensor) -> Claims:
    before = tokens.clone()
    same = all(model.logits(tokens, t).equal(model.logits(tokens, t)) for t in TIMES)
    kept = tokens.equal(before)
    yield same and kept, f"{'the same' if same else 'different'} logits, its input {'unchanged' if kept else 'changed'}"


def _no_gradients(model: Denoiser, tokens: Tensor) -> Claims:
    """Logits that require grad keep all activations in memory."""
    with torch.inference_mode(False), torch.enable_grad():
        requires_grad = model.logits(tokens.clone(), 0.5).requires_grad
    found = "the logits require grad: call requires_grad_(False) on the parameters" if requires_grad else "none"
    yield not requires_grad, found


def _cached(model: Denoiser, tokens: Tensor) -> Claims:
    """Some positions computed beside kept keys and values that are exact, and all positions beside others that are not,
    both equal the full call; and what was kept before is as it was."""
    if not model.cache_bytes:
        yield True, "not applicable: the model computes every position at every call"
        return
    first, other = Cache(None, (), []), Cache(None, (), [])
    full = model.head(model.backbone(ModelInput(tokens, 0.5, cache=first))).float().flatten(0, 1)
    model.backbone(ModelInput(tokens.flip(-1), 0.4, cache=other))
    kept = [layer.clone() for layer in other.after]
    every = torch.arange(tokens.numel(), device=tokens.device)
    pairs = []
    for index, before in ((every[::3], first), (every, other)):
        cache = Cache(index, tuple(before.after), [])
        features = model.backbone(ModelInput(tokens, 0.5, cache=cache)).flatten(0, 1)[index]
        pairs += [(model.head(features).float(), full[index])]
        pairs += [(new.float(), old.float()) for new, old in zip(cache.after, first.after, strict=True)]
    size = sum(layer.nbytes for layer in kept)
    yield (
        size == model.cache_bytes * tokens.numel(),
        f"{size} bytes for {tokens.numel()} positions, not cache_bytes each",
    )
    yield all(map(torch.equal, kept, other.after)), "what an earlier call kept has been overwritten"
    yield from _close(model, (full, model.logits(tokens, 0.5).flatten(0, 1)), *pairs)


def _schedule(model: Denoiser, tokens: Tensor) -> Claims:
    signal = model.schedule.signal(torch.linspace(EPS, 1, 1001, dtype=torch.float64))
    first, last = float(signal[0]), float(signal[-1])
    falls = bool((signal.diff() < 0).all()) and first <= 1 and last >= 0
    yield falls, f"signal {first:.6g} at t = {EPS:g}, {last:.6g} at t = 1"


def _reverse(model: Denoiser, tokens: Tensor) -> Claims:
    """The dense reverse distribution sums to 1, and all backends draw the same tokens from the same uniforms."""
    separated, worst, different, drawn = SeparatedDenoiser(model), 0.0, 0, 0
    available = backends.backends(tokens.device)
    for call, (t, s) in enumerate(((1.0, 0.6), (0.5, 0.3), (0.1, EPS))):
        signal_t, signal_s = float(model.schedule.signal(t)), float(model.schedule.signal(s))
        probs = separated.backbone(ModelInput(tokens, t)).double().softmax(-1)
        probs = process.leave_one_out(probs, tokens, signal_t) if model.predicts == "posterior" else probs
        reverse = process.reverse_probs(probs, tokens, signal_t, signal_s)
        worst = max(worst, float((reverse.sum(-1) - 1).abs().max()), float(-reverse.min()))
        for top_p in (1.0, 0.9):
            results = []
            for backend in available.values():
                ctx = context_of(separated, _inputs(model, tokens.shape[1], backend=backend))
                coins, support = ancestral(signal_t, signal_s), Support(top_p)
                transition = Transition(call, tokens, ctx.free, ctx.no_positions, coins, support=support)
                results.append(ctx.call(State(call, tokens), tokens, t, transition)[1].tokens)
            different += sum(int((result != results[0]).sum()) for result in results[1:])
            drawn += tokens.numel() * (len(results) - 1)
    ok = worst < 1e-9 and different <= (0 if isinstance(model, Source) else MAX_DISAGREEMENT * drawn)
    yield ok, f"sums to 1 within {worst:.1g}; {' and '.join(available)} draw {different} of {drawn} tokens differently"


def _text(model: Denoiser, tokens: Tensor) -> Claims:
    tokenizer = model.tokenizer
    if tokenizer is None:
        yield True, "no tokenizer: its samples are ids"
        return
    lossless, ids_allowed = True, range(model.vocab_size)
    for row in tokens.tolist():
        text = tokenizer.decode(row)
        again = tokenizer.decode(ids := list(tokenizer.encode(text)))
        yield all(token in ids_allowed for token in ids), f"{text[:40]!r} is encoded with an id outside the vocabulary"
        twice = tokenizer.decode(list(tokenizer.encode(again)))
        yield twice == again, f"{again[:40]!r} is another text when encoded and decoded"
        yield bool(again) or not text, f"{text[:40]!r} is empty when encoded and decoded"
        lossless &= again == text
    empty = sum(not tokenizer.decode([token]) for token in range(model.vocab_size))
    digest = tokenizer_digest(tokenizer)
    known = f"digest {digest[:12]}" if digest else "no digest, so judges read its samples as text"
    back = "comes back from ids" if lossless else "comes back from ids once encoded, as the tokenizer writes it"
    yield True, f"{back}; {empty} of {model.vocab_size} ids decode to no text; {known}"


MODEL_CHECKS: dict[str, Callable[[Denoiser, Tensor], Claims]] = {
    "shapes of backbone, head and logits": _shapes,
    "finite predictions": _finite,
    "backbone and head against logits": _two_parts,
    "some positions against all": _some_rows,
    "some positions beside a cache": _cached,
    "a time for each sample against one for all": _times,
    "a sample alone against a batch": _batch,
    "clean positions": _clean_positions,
    "the same call twice": _repeated,
    "gradients": _no_gradients,
    "schedule": _schedule,
    "reverse distribution": _reverse,
    "text": _text,
}


# Samplers: each check takes a sampler on a model


class CheckedTrajectory(NamedTuple):
    """The trajectories of a batch."""

    states: list[State]  # the first before any call
    infos: list[StepInfo]
    calls: int  # network calls, counted


class Subject:
    """A sampler on a model."""

    def __init__(self, sampler: Sampler, model: Denoiser, length: int) -> None:
        self.sampler, self.model, self.length, self.separated = sampler, model, length, SeparatedDenoiser(model)
        self.shape = SAMPLES, length

    def run(
        self, sampler: Sampler | None = None, separated: bool = True, calls: int | None = None, **options: Any
    ) -> CheckedTrajectory:
        """Samples the batch: by default with the checked sampler, every sample computed by itself, and all calls."""
        sampler = sampler or self.sampler
        counting = CountingDenoiser(self.separated if separated else self.model)
        inputs = _inputs(counting, self.length, **({"fixed": self.few_fixed} if sampler.needs_fixed else {}) | options)
        start = sampler.init(context_of(counting, inputs))
        steps = list(rollout(counting, sampler, inputs, start, calls))
        return CheckedTrajectory(
            [start, *(step.state for step in steps)], [step.info for step in steps], counting.calls
        )

    @cached_property
    def all_fixed(self) -> Tensor:
        """(B, L) a fixed token at every position."""
        return context_of(self.model, _inputs(self.model, self.length)).noise().flip(-1)

    @cached_property
    def few_fixed(self) -> Tensor:
        """(B, L) fixed tokens in the first quarter and at every seventh position, -1 elsewhere."""
        position = torch.arange(self.length, device=self.all_fixed.device)
        return self.all_fixed.masked_fill((position >= self.length // 4) & (position % 7 > 0), -1)

    @cached_property
    def trajectory(self) -> CheckedTrajectory:
        return self.run(separated=False)


def sampler_rows(
    model: Denoiser, sampler: Sampler | str, nfe: int = NFE, length: int | None = None
) -> Iterator[CheckResult]:
    """Every check of a sampler on a model.

    sampler: a sampler, or a text as `--sampler` takes it. nfe: the calls of a text that does not set its own."""
    if isinstance(sampler, str):
        first = _check("construction", lambda: [(True, samplers.parse(sampler, nfe=nfe)[1].caption)])
        yield first
        if not first.ok:
            return
    subject = Subject(samplers.as_sampler(sampler, nfe=nfe), model, length or length_of(model))
    for what, claims in SAMPLER_CHECKS.items():
        yield _check(what, claims, subject)


def _parameters(subject: Subject) -> Claims:
    kind, known = type(subject.sampler), params(type(subject.sampler))
    annotations = (inspect.get_annotations(base) for base in kind.__mro__ if issubclass(base, Sampler))
    names = [name for one in annotations for name, hint in one.items() if "ClassVar" not in str(hint)]
    loose, silent = [name for name in names if name not in known], [name for name in known if not known[name].help]
    yield not loose, f"{', '.join(loose)} is annotated but no field: make {kind.__name__} a frozen dataclass too"
    yield not silent, f"no help text for {', '.join(silent)}: use limpet.param"
    yield True, ", ".join(known)


def _bad_values(subject: Subject) -> Claims:
    known = params(type(subject.sampler))
    bad = [(name, value) for name, param in known.items() for value in BAD_VALUES if not param.accepts(value)]
    for name, value in bad:
        with suppress(LimpetError):
            subject.sampler.replace(**{name: value})
            yield False, f"{name} {value!r} is accepted, and it takes {known[name].takes}"
    yield True, f"{len(bad)} of them"


def _copies(subject: Subject) -> Claims:
    """As it is and with each parameter changed. A class from a file may come back as another class of that name."""
    for sampler in (subject.sampler, *_changed(subject.sampler).values()):
        text = json.dumps(sampler.to_dict())
        copies = samplers.from_dict(json.loads(text)), pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)
        for again in copies:
            same = type(again).__qualname__ == type(sampler).__qualname__ and vars(again) == vars(sampler)
            yield same, f"{text} is read as another sampler"
    yield True, json.dumps(subject.sampler.to_dict())


def _calls(subject: Subject) -> Claims:
    numbers = [info.call for info in subject.trajectory.infos]
    found = f"{subject.trajectory.calls} for nfe {subject.sampler.nfe}"
    yield numbers == list(range(subject.sampler.nfe)), f"{found}, numbered {', '.join(map(str, numbers))}"
    yield subject.trajectory.calls == subject.sampler.nfe, found


def _states(subject: Subject) -> Claims:
    size, dtypes = subject.model.vocab_size, [part.dtype for part in subject.trajectory.states[0].memory]
    for call, tokens, memory, *_ in subject.trajectory.states:
        shapes = [tuple(tokens.shape), *(tuple(part.shape[:2]) for part in memory)]
        yield set(shapes) == {subject.shape}, f"{shapes} after {call} calls; each must begin with {subject.shape}"
        valid = tokens.dtype == torch.long and int(tokens.min()) >= 0 and int(tokens.max()) < size
        yield valid, f"tokens outside the vocabulary of {size} after {call} calls"
        same = not memory or not dtypes or [part.dtype for part in memory] == dtypes
        yield same, f"memory of other types after {call} calls than at the start"
    yield True, f"tokens and {len(dtypes)} parts of memory, {subject.shape} each"


def _masks(subject: Subject) -> Claims:
    names = list(subject.trajectory.infos[0].masks)
    fits = len(names) <= MAX_MASKS and "fixed" not in names
    yield fits, f"{', '.join(names)}: a recording stores at most {MAX_MASKS} masks, and `fixed` is one of its own"
    for info in subject.trajectory.infos:
        yield list(info.masks) == names, f"{', '.join(info.masks)} in call {info.call}, {', '.join(names)} in the first"
        for name, part in {"model_input": info.model_input, **info.masks}.items():
            ok = tuple(part.shape) == subject.shape and (name not in info.masks or part.dtype == torch.bool)
            yield ok, f"{name} of call {info.call} is {part.dtype} {tuple(part.shape)}".replace("torch.", "")
    yield True, ", ".join(names) or "none"


def _fixed_tokens(subject: Subject) -> Claims:
    """A few fixed positions, then all. A sampler that needs fixed tokens may hide some where its masks say so."""
    for fixed in (subject.few_fixed, subject.all_fixed):
        trajectory = subject.run(separated=False, fixed=fixed)
        parts = [(f"state after {state.call} calls", state.tokens) for state in trajectory.states]
        for info in trajectory.infos:
            noised = info.masks.get("noised") if subject.sampler.needs_fixed else None
            tokens = info.model_input if noised is None else fixed.where(noised, info.model_input)
            parts.append((f"model input of call {info.call}", tokens))
        for where, tokens in parts:
            yield tokens.where(fixed >= 0, fixed).equal(fixed), f"another token at a fixed position in the {where}"
    count = int((subject.few_fixed[0] >= 0).sum())
    yield True, f"{count} of {subject.length}, and then all, are kept in state, model input and output"


def _first_difference(ones: list[State], others: list[State], which: slice = slice(None)) -> int | None:
    """After how many calls two trajectories differ; None if never. Parts of memory count if both have them."""
    for one, other in zip(ones, others, strict=True):
        memories = zip(one.memory, other.memory, strict=False)
        if not all(a[which].equal(b) for a, b in ((one.tokens, other.tokens), *memories)):
            return one.call
    return None


def _batch_of_one(subject: Subject) -> Claims:
    one = slice(1, 2)
    call = _first_difference(subject.run().states, subject.run(which=one).states, one)
    found = "the same" if call is None else f"different after {call} calls"
    yield call is None, f"sample 1 of {SAMPLES} is {found}"


def _trace(subject: Subject) -> Claims:
    """A trace inspects every prediction; without one, predictions that were not requested are NaN. Neither changes the
    model inputs or the output. States that are not read again may differ."""
    quiet, traced = subject.run(), subject.run(trace=True)
    for one, other in zip(quiet.infos, traced.infos, strict=True):
        yield one.model_input.equal(other.model_input), f"another model input in call {one.call}"
    same = quiet.states[-1].tokens.equal(traced.states[-1].tokens)
    yield same, f"the same model inputs, and {'the same' if same else 'another'} output"


def _shared_calls(subject: Subject) -> Claims:
    """The calls that two samplers both claim to share are the same: with one parameter changed, and all others."""
    sampler, own, claims = subject.sampler, subject.run().states, []
    others = {f"{name} changed": other for name, other in _changed(sampler).items()}
    for name, kind in samplers.available().items():
        if kind is not type(sampler):
            others[name] = samplers.as_sampler(name, nfe=sampler.nfe)
    for name, other in others.items():
        claimed = min(sampler.shared_calls(other), other.shared_calls(sampler))
        found = f"with {name} it claims {claimed} calls"
        yield 0 <= claimed <= min(sampler.nfe, other.nfe), found
        if claimed:
            call = _first_difference(own[: claimed + 1], subject.run(other, calls=claimed).states)
            yield call is None, f"{found}, and they differ after {call}"
            claims.append(f"{claimed} with {name}")
    yield True, ", ".join(claims) or "none"


def _changed(sampler: Sampler) -> dict[str, Sampler]:
    """For each parameter, the sampler with that parameter changed as much as possible, so that it has an effect."""
    changed: dict[str, Sampler] = {}
    for name, param in params(type(sampler)).items():
        value = getattr(sampler, name)
        near = (value + 1, value / 2, value - 1) if isinstance(value, int | float) else ()
        for other in (None, False, True, 0.5, 1, *reversed(near), param.low, param.high, *reversed(param.choices)):
            if other != value and param.accepts(other):
                with suppress(LimpetError):  # parameters may depend on each other
                    changed[name] = sampler.replace(**{name: other})  # a later value changes more
    return changed


SAMPLER_CHECKS: dict[str, Callable[[Subject], Claims]] = {
    "parameters": _parameters,
    "bad values": _bad_values,
    "copies": _copies,
    "network calls": _calls,
    "state and memory": _states,
    "masks": _masks,
    "fixed tokens": _fixed_tokens,
    "a sample alone against a batch": _batch_of_one,
    "with and without a trace": _trace,
    "calls shared with other samplers": _shared_calls,
}


def verdict(model: Denoiser, rows: list[CheckResult]) -> str:
    """The result of all checks, on one line."""
    from limpet import __version__

    failed = sum(not row.ok for row in rows)
    return f"limpet {__version__}, {model.name} ({model.digest[:12]}): {len(rows)} checks, {failed} failed"
