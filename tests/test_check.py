"""The conformance test itself: what is whole passes, and each way to be broken is found by the check that is for it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_duo import random_network

import limpet
from limpet import CRS, Info, Native, State, conformance, param, process
from limpet.cli import main
from limpet.models import Wrapped
from limpet.models.duo import Duo
from limpet.models.exact import Markov
from limpet.models.exact_sources import SOURCES, source

WORDS = source("exact:words")
GENERATOR = torch.Generator().manual_seed(5)
SMALL = Markov(torch.ones(5), torch.rand(5, 5, generator=GENERATOR) ** 3 + 0.01, 12, "small")


class Posterior(Wrapped):
    """An exact source that says the posterior, and says so."""

    def __init__(self, inner):
        super().__init__(inner)
        self.predicts = "posterior"

    def body(self, tokens, t):
        probs = self.inner.body(tokens, t).exp()
        return process.posterior(probs, tokens, self.schedule.signal(t)).log()

    def body_at(self, tokens, t, needed):
        return self.body(tokens, t)


def rows_of(model, *arms, **options):
    rows = list(conformance.model_rows(model, **options))
    for arm in arms:
        rows += (
            conformance.arm_rows(model, arm, **options)
            if isinstance(arm, str)
            else conformance.sampler_rows(model, arm)
        )
    return rows


def failed(rows):
    return {row.what: row.found for row in rows if not row.ok}


# What is whole


@pytest.mark.parametrize("name", SOURCES)
def test_exact_sources_and_every_sampler_pass(name):
    kinds = limpet.samplers.available()
    rows = rows_of(source(name), *kinds)
    assert not failed(rows)
    assert len(rows) == 1 + len(conformance.MODEL_CHECKS) + len(kinds) * (1 + len(conformance.SAMPLER_CHECKS))
    assert conformance.verdict(source(name), rows).endswith(f"{len(rows)} checks, 0 failed")


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float8"])
def test_a_network_passes_with_rounding(precision):
    model = Duo(random_network(), precision=precision)
    rows = rows_of(model, "native", "crs temperature=.7 values=nucleus")
    assert not failed(rows)
    assert any("largest difference" in row.found for row in rows)


def test_a_posterior_passes_and_is_converted():
    rows = rows_of(Posterior(SMALL), "crs")
    assert not failed(rows)
    (found,) = [row.found for row in rows if row.what == "a posterior converts"]
    assert "to leave-one-out and back within" in found


def test_a_large_vocabulary_is_checked_on_shorter_sequences():
    assert conformance.length_of(WORDS) == 160
    large = Wrapped(WORDS)
    large.vocab_size, large.length = 50258, 1024
    assert conformance.SAMPLES * conformance.length_of(large) * large.vocab_size <= conformance.LOGITS
    assert conformance.length_of(large) > 40
    large.vocab_size = 10**9
    assert conformance.length_of(large) == 1


def test_another_length_on_demand():
    rows = rows_of(Duo(random_network()), "crs", length=5)
    assert not failed(rows)
    assert "(3, 5)" in {row.what: row.found for row in rows}["state and memory"]


# What is broken in a model


class Broken(Wrapped):
    """A model with one thing wrong, on top of a sound one."""

    def __init__(self, inner=SMALL):
        super().__init__(inner)
        self.calls = 0

    def body_at(self, tokens, t, needed):
        return self.body(tokens, t)


class FlatBody(Broken):
    def body(self, tokens, t):
        return super().body(tokens, t).flatten(0, 1)


class NarrowHead(Broken):
    def head(self, features):
        return features[..., :-1]


class DoubleLogits(Broken):
    def logits(self, tokens, t):
        return super().logits(tokens, t).double()


class OtherLogits(Broken):
    def logits(self, tokens, t):
        return 2 * super().logits(tokens, t)


class Nan(Broken):
    def body(self, tokens, t):
        return super().body(tokens, t).index_fill(1, torch.tensor([3]), math.nan)


class Infinite(Broken):
    def body(self, tokens, t):
        return super().body(tokens, t).index_fill(2, torch.tensor([3]), math.inf)


class Impossible(Broken):
    def body(self, tokens, t):
        return super().body(tokens, t).index_fill(1, torch.tensor([0]), -math.inf)


class OtherPlaces(Broken):
    def body_at(self, tokens, t, needed):
        return self.body(tokens, t).roll(1, 1)


class WholeHead(Broken):
    """A head that knows only a whole sequence."""

    def head(self, features):
        return features - features.mean(-2, keepdim=True)


class OneTime(Broken):
    def body(self, tokens, t):
        return super().body(tokens, float(torch.as_tensor(t).max()))


class Sociable(Broken):
    def body(self, tokens, t):
        return super().body(tokens, t) + tokens.double().mean() * torch.arange(5.0)


class Slight(Broken):
    """Too little to matter to a network, too much for an exact source."""

    def __init__(self):
        super().__init__()
        self.precision = "float32"

    def body(self, tokens, t):
        return super().body(tokens, t) * (1 + 1e-6 * len(tokens))


class Moody(Broken):
    def body(self, tokens, t):
        self.calls += 1
        return super().body(tokens, t) * (1 + self.calls % 2)


class Grabbing(Broken):
    def body(self, tokens, t):
        body = super().body(tokens, t)
        tokens[:, 0] = 0
        return body


class Rising(Broken):
    def __init__(self):
        super().__init__()
        self.schedule = process.Schedule("rising", lambda t: 0.2 + t / 2, lambda t: torch.ones_like(t))


class Deaf(Broken):
    """A tokenizer that does not read what it wrote."""

    class Shouting:
        def encode(self, text):
            return [ord(letter) - ord("A") for letter in reversed(text)]

        def decode(self, ids):
            return "".join(chr(ord("A") + i) if i else "" for i in ids)

    def __init__(self):
        super().__init__()
        self.tokenizer = self.Shouting()


class Wide(Broken):
    """A tokenizer with ids that the model has not."""

    class Twice:
        def encode(self, text):
            return [2 * int(letter) for letter in text]

        def decode(self, ids):
            return "".join(map(str, ids))

    def __init__(self):
        super().__init__()
        self.tokenizer = self.Twice()


class Mute(Broken):
    """A tokenizer that reads nothing."""

    class Blind(Deaf.Shouting):
        def encode(self, text):
            return []

    def __init__(self):
        super().__init__()
        self.tokenizer = self.Blind()


class Hearsay(Broken):
    """A sample is told what the first of its batch is told."""

    def __init__(self):
        super().__init__()
        self.told_clean = "given"

    def body_told(self, tokens, t, needed, clean):
        return self.body(tokens, t) + 1e-2 * clean[:1, :, None] * torch.arange(5)


class Suspicious(Hearsay):
    """It hears more where it is told that nothing is clean."""

    def body_told(self, tokens, t, needed, clean):
        return self.body(tokens, t) + 1e-2 * ~clean[..., None] * torch.arange(5)


class Raising(Broken):
    def head(self, features):
        raise RuntimeError("out of\nmemory")


MODELS = {
    FlatBody: ("shapes of body, head and logits", r"IndexError|features \(36, 5\)"),
    NarrowHead: ("shapes of body, head and logits", "logits .3, 12, 4."),
    DoubleLogits: ("shapes of body, head and logits", "as float64"),
    OtherLogits: ("body and head against logits", "largest difference"),
    Nan: ("distributions", "at t = 1, position 3 of sample 0"),
    Infinite: ("distributions", "at t = 1, position 0 of sample 0"),
    Impossible: ("distributions", "position 0"),
    OtherPlaces: ("some positions against all", "largest difference"),
    WholeHead: ("some positions against all", "largest difference"),
    OneTime: ("a time for each sample against one for all", "largest difference"),
    Sociable: ("a sample alone against a batch", "largest difference"),
    Moody: ("the same call twice", "other logits"),
    Grabbing: ("the same call twice", "its tokens not as given"),
    Rising: ("the schedule falls", "0.7 at t = 1"),
    Deaf: ("text", "another text when encoded and decoded"),
    Wide: ("text", "outside the vocabulary"),
    Mute: ("text", "is no text when encoded and decoded"),
    Hearsay: ("clean positions", "largest difference 0.04"),
    Suspicious: ("clean positions", "largest difference 0.04"),
    Raising: ("shapes of body, head and logits", "RuntimeError: out of memory"),
}


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_what_is_wrong_with_a_model_is_found(kind):
    what, match = MODELS[kind]
    found = failed(rows_of(kind()))
    assert what in found
    assert re.search(match, found[what])
    assert all("\n" not in words for words in found.values())


def test_an_exact_source_has_no_rounding_and_a_network_has_some():
    class Exact(Markov):
        def body(self, tokens, t):
            return super().body(tokens, t) * (1 + 1e-6 * len(tokens))

    assert not failed(rows_of(Slight()))
    assert set(failed(rows_of(Exact(SMALL.initial, SMALL.transition, 12)))) == {"a sample alone against a batch"}


def test_a_wrong_backend_would_be_seen(monkeypatch):
    """The row on the reverse distribution compares every backend with the dense one: an untrue lazy step is seen."""
    from limpet.diffusion import backends as steps
    from limpet.diffusion.backends import dense, sparse

    def late(head, features, plan):
        outcome = sparse.advance(head, features, plan)
        return outcome._replace(tokens=outcome.tokens.roll(1, 1))

    monkeypatch.setattr(
        steps, "backends", lambda device: {"dense": dense.BACKEND, "other": sparse.BACKEND._replace(advance=late)}
    )
    assert "the reverse distribution" in failed(rows_of(SMALL))


@pytest.mark.parametrize(("field", "value"), [("name", None), ("digest", ""), ("vocab_size", 1), ("length", None)])
def test_a_model_that_does_not_say_what_it_is_gets_one_row(field, value):
    model = Broken()
    setattr(model, field, value)
    (row,) = rows_of(model)
    assert not row.ok
    assert f"has {field} {value!r}" in row.found


# What is broken in a sampler


@dataclass(frozen=True)
class Wordless(Native):
    mystery: int = 3


class Undecorated(Native):
    colour: str = "blue"


@dataclass(frozen=True)
class Gullible(Native):
    def __post_init__(self):
        pass


@dataclass(frozen=True)
class Forgetful(Native):
    extra: int = param(1, "Lost on paper.")

    def to_dict(self):
        return {name: value for name, value in super().to_dict().items() if name != "extra"}


@dataclass(frozen=True)
class Greedy(Native):
    def step(self, path, state):
        super().step(path, state)
        return super().step(path, state)


@dataclass(frozen=True)
class Uncounted(Native):
    def step(self, path, state):
        after, info = super().step(path, state)
        return after._replace(call=state.call), info


@dataclass(frozen=True)
class Misleading(Native):
    def step(self, path, state):
        after, info = super().step(path, state)
        return after, info._replace(call=0)


@dataclass(frozen=True)
class Beyond(Native):
    def step(self, path, state):
        after, info = super().step(path, state)
        return after._replace(tokens=after.tokens + 5 * (after.call == self.nfe)), info


@dataclass(frozen=True)
class Flat(Native):
    def begin(self, path):
        return State(0, path.noise(), (torch.zeros(len(path.fixed)),))

    def step(self, path, state):
        after, info = super().step(path, state)
        return after._replace(memory=state.memory), info


@dataclass(frozen=True)
class Fickle(Native):
    def begin(self, path):
        return State(0, path.noise(), (path.no_positions,))

    def step(self, path, state):
        after, info = super().step(path, state)
        return after._replace(memory=(after.tokens,)), info


@dataclass(frozen=True)
class Numbers(Native):
    def step(self, path, state):
        after, info = super().step(path, state)
        return after, info._replace(marks={"tokens": after.tokens})


@dataclass(frozen=True)
class Sometimes(Native):
    def step(self, path, state):
        after, info = super().step(path, state)
        return after, info._replace(marks={"late": path.free} if state.call > 2 else {})


@dataclass(frozen=True)
class Many(Native):
    def step(self, path, state):
        after, info = super().step(path, state)
        return after, info._replace(marks={str(i): path.free for i in range(9)})


@dataclass(frozen=True)
class Careless(Native):
    def read(self, path, state, outcome):
        return outcome.top if state.call == self.nfe - 1 else outcome.tokens


@dataclass(frozen=True)
class Loud(Native):
    """Given tokens hold in the state, and not in what it shows."""

    def step(self, path, state):
        after, info = super().step(path, state)
        return after, info._replace(input=info.input.roll(1, 1))


@dataclass(frozen=True)
class Random(Native):
    def step(self, path, state):
        after, info = super().step(path, state)
        return after._replace(tokens=torch.where(path.free, torch.randint_like(after.tokens, 5), after.tokens)), info


@dataclass(frozen=True)
class Together(Native):
    def step(self, path, state):
        after, info = super().step(path, state)
        return after._replace(tokens=(after.tokens + state.tokens.sum()) % 5), info


@dataclass(frozen=True)
class Peeping(Native):
    """Reads distributions that it has not asked for."""

    def step(self, path, state):
        transition = self.transition(path, state, path.free, path.no_positions)
        features, outcome = path.call(state.tokens, self.times[state.call], transition)
        tokens = self.read(path, state, outcome)
        for rows, probs in path.distributions(features, path.free.nonzero()):
            tokens[tuple(rows.unbind(-1))] = probs.argmax(-1)
        return State(state.call + 1, tokens), Info(state.call, 0.5, state.tokens, outcome, {})


@dataclass(frozen=True)
class Boasting(Native):
    def shared(self, other):
        return 2


@dataclass(frozen=True)
class Generous(Native):
    def shared(self, other):
        return self.nfe + 1


@dataclass(frozen=True)
class Failing(Native):
    def step(self, path, state):
        if state.call == 3:
            raise ZeroDivisionError("in call 3")
        return super().step(path, state)


SAMPLERS = {
    Wordless: ("parameters", "no words for mystery"),
    Undecorated: ("parameters", "colour is annotated but no field"),
    Gullible: ("bad values are refused", "is taken, and it takes"),
    Forgetful: ("written out and read back", "is read as another sampler"),
    Greedy: ("calls of the denoiser", "16 for nfe 8"),
    Uncounted: ("calls of the denoiser", "says that 0 calls were made after call 1"),
    Misleading: ("calls of the denoiser", "told as 0, 0, 0"),
    Beyond: ("state and memory", "none of the 5"),
    Flat: ("state and memory", r"\(3,\)"),
    Fickle: ("state and memory", "another kind of memory after 1 calls"),
    Numbers: ("marks", r"tokens of call 0 is int64 \(3, 12\)"),
    Sometimes: ("marks", "late in call 3"),
    Many: ("marks", "room for 7"),
    Careless: ("given tokens", "in the state after 8 calls"),
    Loud: ("given tokens", "in the input of call 0"),
    Random: ("a sample alone against a batch", "another after 1 calls"),
    Together: ("a sample alone against a batch", "another after 1 calls"),
    Peeping: ("a path that is watched", "another input in call"),
    Boasting: ("calls shared with another", "with nfe changed it claims 2 calls, and they part after [12]"),
    Generous: ("calls shared with another", "with nfe changed it claims 3 calls"),
    Failing: ("calls of the denoiser", "ZeroDivisionError: in call 3"),
}


@pytest.mark.parametrize("kind", SAMPLERS, ids=lambda kind: kind.__name__)
def test_what_is_wrong_with_a_sampler_is_found(kind):
    what, match = SAMPLERS[kind]
    found = failed(
        conformance.sampler_rows(WORDS if kind is Boasting else SMALL, kind(nfe=8))
    )  # of few tokens, few differ
    assert what in found
    assert re.search(match, found[what])


def test_sound_samplers_that_inherit_pass():
    @dataclass(frozen=True)
    class Late(CRS):
        since: int = param(3, "Nothing is committed before.", low=0)

    rows = list(conformance.sampler_rows(SMALL, CRS(nfe=6, horizon=2, final_step="sample", write="both")))
    assert not failed(rows)
    assert "no words" not in str(failed(conformance.sampler_rows(SMALL, Late(nfe=6))))


# The command


def test_the_command_prints_rows_and_a_verdict(capsys):
    assert main.main(["check", "exact:verses", "--arm", "native", "--nfe", "4"]) == 0
    *lines, said = capsys.readouterr().out.strip().splitlines()
    assert "arm native" in lines
    assert all(line.startswith(("ok ", "arm ", "the model")) for line in lines if line)
    model = source("exact:verses")
    assert said == f"limpet {limpet.__version__}, exact:verses ({model.digest[:12]}): 24 checks, 0 failed"


def test_the_command_fails_with_code_1_and_says_where(here, capsys):
    Path("mine.py").write_text(
        "from dataclasses import dataclass\nimport limpet, torch\n@dataclass(frozen=True)\nclass Mine(limpet.Native):\n"
        "    def step(self, path, state):\n        after, info = super().step(path, state)\n"
        "        return after._replace(tokens=torch.randint_like(after.tokens, 27)), info\n"
    )
    assert main.main(["check", "exact:verses", "--arm", "./mine.py:Mine", "--arm", "native colour=3", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    bad = {(row["arm"], row["what"]): row["found"] for row in document["checks"] if not row["ok"]}
    assert bad["native colour=3", "it can be made"].startswith("native has no parameter 'colour'")
    assert ("./mine.py:Mine", "a sample alone against a batch") in bad
    assert ("./mine.py:Mine", "given tokens") in bad
    assert {row["arm"] for row in document["checks"]} == {None, "./mine.py:Mine", "native colour=3"}
    assert document["digest"] == source("exact:verses").digest
    assert document["verdict"].endswith(f"{len(document['checks'])} checks, {len(bad)} failed")
    assert main.main(["check", "no-such-model"]) == 2


def test_the_command_on_samplers_lists_all_and_shows_every_knob_of_one(capsys):
    assert main.main(["samplers"]) == 0
    listed = capsys.readouterr().out
    for name, kind in limpet.samplers.available().items():
        assert f" {name} " in listed
        assert main.main(["samplers", name]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"{name}: ")
        for one in limpet.samplers.params(kind).values():
            assert f" {one.name} " in shown
    assert main.main(["samplers", "crs", "--json"]) == 0
    (described,) = json.loads(capsys.readouterr().out)
    assert described["words"] == CRS.__doc__
    (budget,) = [one for one in described["parameters"] if one["name"] == "budget"]
    assert (budget["default"], budget["low"], budget["kind"], budget["takes"]) == (0.5, 0, "float", "a number from 0")
    assert main.main(["samplers", "no-such"]) == 2
