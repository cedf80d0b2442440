"""`limpet check`: correct models and samplers pass, and each kind of mistake is found by the check for it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import limpet
from backends import Posterior
from limpet import CRS, Native, State, StepInfo, conformance, param
from limpet.cli import main
from limpet.diffusion import backends, process
from limpet.diffusion.backends import dense, sparse
from limpet.models import ModelInput, WrappedDenoiser
from limpet.models.duo import Duo, DuoShape
from limpet.models.exact import Markov
from limpet.models.exact_sources import SOURCES, source
from limpet.registry import from_file
from thinned import thinned

trained_like = from_file(f"{Path(__file__).parents[1] / 'tools/trained_like.py'}:trained_like")
pytestmark = pytest.mark.filterwarnings("ignore:.*found again by name")  # classes of a function
SHAPE = DuoShape(vocab_size=23, length=8, width=32, blocks=1, heads=2, hidden=32)
WORDS = source("exact:words")
SMALL = Markov(torch.ones(5), torch.rand(5, 5, generator=torch.Generator().manual_seed(5)) ** 3 + 0.01, 12, "small")


def rows_of(model, *texts, **options):
    rows = list(conformance.model_rows(model, **options))
    for text in texts:
        rows += conformance.sampler_rows(model, text, **options)
    return rows


def failed(rows):
    return {row.what: row.found for row in rows if not row.ok}


# Correct models


@pytest.mark.long
@pytest.mark.parametrize("name", SOURCES)
def test_exact_sources_and_every_sampler_pass(name):
    """The default tests hold every sampler to the contract on a small source, in test_every_sampler."""
    kinds = limpet.samplers.available()
    rows = rows_of(source(name), *kinds)
    assert not failed(rows)
    assert len(rows) == 1 + len(conformance.MODEL_CHECKS) + len(kinds) * (1 + len(conformance.SAMPLER_CHECKS))
    assert conformance.verdict(source(name), rows).endswith(f"{len(rows)} checks, 0 failed")


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float8"])
def test_a_network_passes_with_rounding(precision):
    model = Duo(trained_like(SHAPE), precision=precision)
    rows = rows_of(model, "native", "crs temperature=.7 values=nucleus")
    assert not failed(rows)
    assert any("largest difference" in row.found for row in rows)
    rows = rows_of(model, "crs", length=5)
    assert not failed(rows)
    assert "(3, 5)" in {row.what: row.found for row in rows}["state and memory"]


def test_a_posterior_passes():
    assert not failed(rows_of(Posterior(SMALL), "crs", "gibbs", "entropy-bound"))


def test_a_large_vocabulary_is_checked_on_shorter_sequences():
    assert conformance.length_of(WORDS) == 160
    large = WrappedDenoiser(WORDS)
    large.vocab_size, large.length = 50258, 1024
    assert conformance.SAMPLES * conformance.length_of(large) * large.vocab_size <= conformance.MAX_LOGITS
    assert conformance.length_of(large) > 40
    large.vocab_size = 10**9
    assert conformance.length_of(large) == 1


# Wrong models


class Wrong(WrappedDenoiser):
    """A model with one mistake."""

    def __init__(
        self,
        backbone: Callable[[ModelInput, Tensor], Tensor] = lambda inputs, features: features,
        head: Callable[[Tensor], Tensor] = lambda features: features,
        logits: Callable[[Tensor], Tensor] = lambda logits: logits,
        **attributes: Any,
    ) -> None:
        super().__init__(SMALL)
        self.change_backbone, self.change_head, self.change_logits = backbone, head, logits
        for name, value in attributes.items():
            setattr(self, name, value)

    def backbone(self, inputs):
        return self.change_backbone(inputs, super().backbone(inputs))

    def head(self, features):
        return self.change_head(super().head(features))

    def logits(self, tokens, t):
        return self.change_logits(super().logits(tokens, t))


class Tokenizer:
    """A tokenizer of the five ids, with mistakes."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.encode = encode

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("A") + i) if i else "" for i in ids)


def filled(dim: int, index: int, value: float):
    return lambda inputs, features: features.index_fill(dim, torch.tensor([index]), value)


def calls_differ():
    calls = []
    return lambda inputs, features: calls.append(None) or features * (1 + len(calls) % 2)


def changes_its_input(inputs, features):
    inputs.tokens[:, 0] = 0
    return features


def raises(features):
    raise RuntimeError("out of\nmemory")


def clean_of_the_first_sample(inputs, features):
    clean = inputs.clean if inputs.clean is not None else torch.zeros_like(inputs.tokens, dtype=torch.bool)
    return features + 1e-2 * clean[:1, :, None] * torch.arange(5)


def more_without_clean(inputs, features):
    return features if inputs.clean is None else features + 1e-2 * ~inputs.clean[..., None] * torch.arange(5)


SHAPES, GRAD = "shapes of backbone, head and logits", torch.zeros((), requires_grad=True)
RISING = process.Schedule("rising", lambda t: 0.2 + t / 2, lambda t: torch.ones_like(t))
WRONG_MODELS: dict[str, tuple[dict[str, Any], str, str]] = {  # the mistake, the check that finds it, and the finding
    "flat features": ({"backbone": lambda _, x: x.flatten(0, 1)}, SHAPES, r"IndexError|features \(36, 5\)"),
    "narrow head": ({"head": lambda x: x[..., :-1]}, SHAPES, "logits .3, 12, 4."),
    "float64 logits": ({"logits": lambda x: x.double()}, SHAPES, "as float64"),
    "exception": ({"head": raises}, SHAPES, "RuntimeError: out of memory"),
    "other logits": ({"logits": lambda x: 2 * x}, "backbone and head against logits", "largest difference"),
    "nan": ({"backbone": filled(1, 3, math.nan)}, "finite predictions", "at t = 1, position 3 of sample 0"),
    "inf": ({"backbone": filled(2, 3, math.inf)}, "finite predictions", "at t = 1, position 0 of sample 0"),
    "all -inf": ({"backbone": filled(1, 0, -math.inf)}, "finite predictions", "position 0"),
    "other rows": (
        {"backbone": lambda inputs, x: x if inputs.rows() is None else x.roll(1, 1)},
        "some positions against all",
        "largest difference",
    ),
    "head of a sequence": (
        {"head": lambda x: x - x.mean(-2, keepdim=True)},
        "some positions against all",
        "largest difference",
    ),
    "one time": (
        {"backbone": lambda inputs, x: x * (1 + float(torch.as_tensor(inputs.t).max()))},
        "a time for each sample against one for all",
        "largest difference",
    ),
    "depends on the batch": (
        {"backbone": lambda inputs, x: x + inputs.tokens.double().mean() * torch.arange(5.0)},
        "a sample alone against a batch",
        "largest difference",
    ),
    "random": ({"backbone": calls_differ()}, "the same call twice", "different logits"),
    "changes its input": ({"backbone": changes_its_input}, "the same call twice", "its input changed"),
    "gradients": ({"backbone": lambda _, x: x + GRAD}, "gradients", "the logits require grad"),
    "rising": ({"schedule": RISING}, "schedule", "0.7 at t = 1"),
    "unread text": (
        {"tokenizer": Tokenizer(lambda text: [ord(letter) - ord("A") for letter in reversed(text)])},
        "text",
        "another text when encoded and decoded",
    ),
    "unknown ids": ({"tokenizer": Tokenizer(lambda text: [9 for _ in text])}, "text", "outside the vocabulary"),
    "empty text": ({"tokenizer": Tokenizer(lambda text: [])}, "text", "is empty when encoded and decoded"),
    "clean positions of another": (
        {"clean_tokens": "fixed", "backbone": clean_of_the_first_sample},
        "clean positions",
        "largest difference 0.04",
    ),
    "no clean positions": (
        {"clean_tokens": "fixed", "backbone": more_without_clean},
        "clean positions",
        "largest difference 0.04",
    ),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_a_wrong_model_is_found(name):
    mistake, what, match = WRONG_MODELS[name]
    found = failed(rows_of(Wrong(**mistake)))
    assert what in found
    assert re.search(match, found[what])
    assert all("\n" not in sentence for sentence in found.values())


def test_an_exact_source_has_no_rounding_and_a_network_has_some():
    class Exact(Markov):
        def backbone(self, inputs):
            return super().backbone(inputs) * (1 + 1e-6 * len(inputs.tokens))

    slight = Wrong(backbone=lambda inputs, x: x * (1 + 1e-6 * len(inputs.tokens)), precision="float32")
    assert not failed(rows_of(slight))
    assert set(failed(rows_of(Exact(SMALL.initial, SMALL.transition, 12)))) == {"a sample alone against a batch"}


def test_a_wrong_backend_is_found(monkeypatch):
    def rolled(head, features, plan):
        outcome = sparse.advance(head, features, plan)
        return outcome._replace(tokens=outcome.tokens.roll(1, 1))

    wrong = {"dense": dense.BACKEND, "wrong": sparse.BACKEND._replace(advance=rolled)}
    monkeypatch.setattr(backends, "backends", lambda device: wrong)
    assert "reverse distribution" in failed(rows_of(SMALL))


@pytest.mark.parametrize(("field", "value"), [("name", None), ("digest", ""), ("vocab_size", 1), ("length", None)])
def test_a_model_with_a_wrong_attribute_gets_one_row(field, value):
    (row,) = rows_of(Wrong(**{field: value}))
    assert not row.ok
    assert f"has {field} {value!r}" in row.found


# Wrong samplers


@dataclass(frozen=True)
class Undocumented(Native):
    mystery: int = 3


class Undecorated(Native):
    colour: str = "blue"


@dataclass(frozen=True)
class Unchecked(Native):
    def __post_init__(self):
        pass


@dataclass(frozen=True)
class Forgetful(Native):
    extra: int = param(1, "Missing in the dictionary.")

    def to_dict(self):
        return {name: value for name, value in super().to_dict().items() if name != "extra"}


@dataclass(frozen=True)
class TwoCalls(Native):
    def step(self, ctx, state):
        super().step(ctx, state)
        return super().step(ctx, state)


@dataclass(frozen=True)
class VaryingMemory(Native):
    def init(self, ctx):
        return State(0, ctx.noise(), (ctx.no_positions,))

    def step(self, ctx, state):
        after, info = super().step(ctx, state)
        return after._replace(memory=(after.tokens,)), info


@dataclass(frozen=True)
class FlatMemory(Native):
    def init(self, ctx):
        return State(0, ctx.noise(), (torch.zeros(len(ctx.fixed)),))

    def step(self, ctx, state):
        after, info = super().step(ctx, state)
        return after._replace(memory=state.memory), info


@dataclass(frozen=True)
class OverwritesFixed(Native):
    def read(self, ctx, state, outcome):
        return outcome.top if state.call == self.nfe - 1 else outcome.tokens


@dataclass(frozen=True)
class ReadsUnrequested(Native):
    """Reads predictions that it has not requested."""

    def step(self, ctx, state):
        transition = self.transition(ctx, state, ctx.free, ctx.no_positions)
        features, outcome = ctx.call(state, state.tokens, self.times[state.call], transition)
        tokens = self.read(ctx, state, outcome)
        for rows, log_probs in ctx.log_probs(features, ctx.free.nonzero()):
            tokens[tuple(rows.unbind(-1))] = log_probs.argmax(-1)
        return state.next(tokens, features), StepInfo(state.call, 0.5, state.tokens, outcome, {})


@dataclass(frozen=True)
class Claims2(Native):
    def shared_calls(self, other):
        return 2


@dataclass(frozen=True)
class ClaimsTooMany(Native):
    def shared_calls(self, other):
        return self.nfe + 1


def changed(change: Callable[..., Any]) -> type[Native]:
    """A native sampler whose step is followed by a change of (ctx, state, after, info) -> (after, info)."""

    @dataclass(frozen=True)
    class Changed(Native):
        def step(self, ctx, state):
            return change(ctx, state, *super().step(ctx, state))

    return Changed


def raises_in_call_3(ctx, state, after, info):
    if state.call == 3:
        raise ZeroDivisionError("in call 3")
    return after, info


def with_masks(masks: Callable[..., dict[str, Tensor]]) -> type[Native]:
    return changed(lambda ctx, state, after, info: (after, info._replace(masks=masks(ctx, state))))


def with_tokens(tokens: Callable[..., Tensor]) -> type[Native]:
    return changed(lambda ctx, state, after, info: (after._replace(tokens=tokens(ctx, state, after)), info))


ALONE = "a sample alone against a batch"
WRONG_SAMPLERS = {  # the sampler, the check that finds the mistake, and the finding
    "no help text": (Undocumented, "parameters", "no help text for mystery"),
    "no field": (Undecorated, "parameters", "colour is annotated but no field"),
    "takes anything": (Unchecked, "bad values", "is accepted, and it takes"),
    "incomplete dictionary": (Forgetful, "copies", "is read as another sampler"),
    "two calls": (TwoCalls, "network calls", "16 for nfe 8"),
    "no count": (
        changed(lambda ctx, state, after, info: (after._replace(call=state.call), info)),
        "network calls",
        "returned a state of 0 calls after call 1",
    ),
    "wrong number": (
        changed(lambda ctx, state, after, info: (after, info._replace(call=0))),
        "network calls",
        "numbered 0, 0, 0",
    ),
    "exception": (changed(raises_in_call_3), "network calls", "ZeroDivisionError: in call 3"),
    "unknown tokens": (
        with_tokens(lambda ctx, state, after: after.tokens + 5 * (after.call == 8)),
        "state and memory",
        "outside the vocabulary of 5",
    ),
    "flat memory": (FlatMemory, "state and memory", r"\(3,\)"),
    "varying memory": (VaryingMemory, "state and memory", "memory of other types after 1 calls"),
    "numbers as a mask": (
        with_masks(lambda ctx, state: {"tokens": state.tokens}),
        "masks",
        r"tokens of call 0 is int64 \(3, 12\)",
    ),
    "late mask": (
        with_masks(lambda ctx, state: {"late": ctx.free} if state.call > 2 else {}),
        "masks",
        "late in call 3",
    ),
    "many masks": (with_masks(lambda ctx, state: {str(i): ctx.free for i in range(9)}), "masks", "at most 7"),
    "overwrites fixed tokens": (OverwritesFixed, "fixed tokens", "in the state after 8 calls"),
    "wrong model input": (
        changed(lambda ctx, state, after, info: (after, info._replace(model_input=info.model_input.roll(1, 1)))),
        "fixed tokens",
        "in the model input of call 0",
    ),
    "own randomness": (
        with_tokens(lambda ctx, state, after: torch.where(ctx.free, torch.randint_like(after.tokens, 5), after.tokens)),
        ALONE,
        "different after 1 calls",
    ),
    "depends on the batch": (
        with_tokens(lambda ctx, state, after: (after.tokens + state.tokens.sum()) % 5),
        ALONE,
        "different after 1 calls",
    ),
    "reads what it did not request": (ReadsUnrequested, "with and without a trace", "another model input in call"),
    "claims 2 shared calls": (
        Claims2,
        "calls shared with other samplers",
        "with nfe changed it claims 2 calls, and they differ after [12]",
    ),
    "claims too many": (ClaimsTooMany, "calls shared with other samplers", "with nfe changed it claims 3 calls"),
}


@pytest.mark.parametrize("name", thinned(WRONG_SAMPLERS))
def test_a_wrong_sampler_is_found(name):
    kind, what, match = WRONG_SAMPLERS[name]
    model = WORDS if kind is Claims2 else SMALL  # with few tokens, wrong claims can be right by chance
    found = failed(conformance.sampler_rows(model, kind(nfe=8)))
    assert what in found
    assert re.search(match, found[what])


def test_correct_samplers_pass():
    assert not failed(conformance.sampler_rows(SMALL, CRS(nfe=6, horizon=2, final_step="sample", write="both")))


# The command


def test_the_command_prints_rows_and_a_verdict(capsys):
    assert main.main(["check", "exact:verses", "--sampler", "native", "--nfe", "4"]) == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    assert "sampler native" in lines
    assert all(line.startswith(("ok ", "sampler ", "the model")) for line in lines if line)
    digest = source("exact:verses").digest[:12]
    assert last == f"limpet {limpet.__version__}, exact:verses ({digest}): 25 checks, 0 failed"


def test_the_command_fails_with_code_1_and_says_where(here, capsys):
    Path("mine.py").write_text(
        "from dataclasses import dataclass\nimport limpet, torch\n@dataclass(frozen=True)\nclass Mine(limpet.Native):\n"
        "    def step(self, ctx, state):\n        after, info = super().step(ctx, state)\n"
        "        return after._replace(tokens=torch.randint_like(after.tokens, 27)), info\n"
    )
    wrong = ["--sampler", "./mine.py:Mine", "--sampler", "native colour=3"]
    assert main.main(["check", "exact:verses", *wrong, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    bad = {(row["sampler"], row["what"]): row["found"] for row in document["checks"] if not row["ok"]}
    assert bad["native colour=3", "construction"].startswith("native has no parameter 'colour'")
    assert ("./mine.py:Mine", "a sample alone against a batch") in bad
    assert ("./mine.py:Mine", "fixed tokens") in bad
    assert {row["sampler"] for row in document["checks"]} == {None, "./mine.py:Mine", "native colour=3"}
    assert document["digest"] == source("exact:verses").digest
    assert document["verdict"].endswith(f"{len(document['checks'])} checks, {len(bad)} failed")
    assert main.main(["check", "no-such-model"]) == 2
