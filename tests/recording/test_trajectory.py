"""Trajectories: frames against the sampler's own steps, the round trip of a file, and damaged files."""

import gzip
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_duo import random_network

import limpet
from limpet import CRS, Native, param, samplers
from limpet.diffusion.rng import CounterRNG
from limpet.errors import LimpetError
from limpet.generation import CountingDenoiser, Inputs, context_of, rollout
from limpet.models import ModelInput
from limpet.models.duo import Duo
from limpet.recording.trajectory import VERSION, Frame, Header, Trajectory, follow, record, share_randomness
from limpet.samplers import State, StepInfo

SAMPLERS = {
    "CRS": CRS(nfe=12),
    "native": Native(nfe=12, final_step="argmax"),
    "short": CRS(nfe=12, horizon=2),
    "refreshed": CRS(nfe=12, horizon=4, values="refreshed"),
    "second": CRS(nfe=9, values="second"),
    "output": CRS(nfe=9, write="output", final_step="sample", top_p=0.8),
}


@dataclass(frozen=True)
class Odd(Native):
    """A user's sampler with a mask of its own: the even or the odd positions."""

    nfe: int = param(6, "Calls.", low=2)

    def step(self, ctx, state):
        state, info = super().step(ctx, state)
        place = torch.arange(state.tokens.shape[1]).expand_as(state.tokens)
        return state, info._replace(masks={"odd": (place + info.call) % 2 == 1})


@pytest.fixture(scope="module")
def words():
    return limpet.load("exact:words")


@pytest.fixture(scope="module", params=["leave-one-out", "posterior"])
def duo(request):
    return Duo(random_network(), name="tiny", predicts=request.param)


@pytest.mark.parametrize("name", samplers.available())
def test_every_sampler_can_be_recorded_and_read_again(words, name):
    """With a prompt, since some need fixed tokens."""
    sampler = samplers.find(name)(nfe=7)
    one = record(words, sampler, seed=3, prompt=[1])
    assert one.text == limpet.sample(words, sampler, n=1, seed=3, prompt=[1]).texts[0]
    again = Trajectory.from_bytes(one.to_bytes())
    assert again.header == one.header
    assert again.header.masks[0] == "fixed"
    assert len(again.frames) == 8


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_frames_are_the_steps_of_the_sampler(duo, sampler):
    """Against the rollout, and predictions that are computed from the model input alone."""
    fixed = torch.full((1, 12), -1)
    fixed[0, 3] = 7
    one = record(duo, sampler, seed=5, sample=2, fixed=fixed[0])
    inputs = Inputs(fixed, CounterRNG(5, torch.tensor([2])), trace=True)
    with torch.inference_mode():
        before = sampler.init(context_of(duo, inputs))
        for frame, step in zip(one.frames, rollout(duo, sampler, inputs, before), strict=False):
            assert frame.t == step.t
            assert frame.tokens.tolist() == before.tokens[0].tolist()
            assert frame.model_input.tolist() == step.model_input[0].tolist()
            assert one.header.masks == ["fixed", *step.masks]
            for name, mask in step.masks.items():
                assert one.header.mask(frame, name).tolist() == mask[0].tolist()
            if sampler.name == "crs":
                committed, committed_at = before.memory
                assert one.header.mask(frame, "committed").tolist() == (committed_at[0] < step.call).tolist()
                visible = one.header.mask(frame, "visible")
                assert frame.model_input[visible].tolist() == committed[0][visible].tolist()
            free = torch.arange(12) != 3
            assert (~one.header.mask(frame, "fixed")).tolist() == free.tolist()
            deficit = step.deficit[0]
            assert np.abs(frame.deficit[free] / 65535 - deficit[free].numpy()).max() <= 0.5 / 65535 + 1e-9

            logits = duo.head(duo.backbone(ModelInput(step.model_input, step.t)))[0].double()
            if duo.predicts == "posterior":
                noise = 1 - float(duo.schedule.signal(step.t))
                evidence = torch.full_like(logits, noise / 53)
                evidence[torch.arange(12), step.model_input[0]] += 1 - noise
                logits = logits - evidence.log()
            probs, tokens = logits.softmax(-1).topk(4)
            assert (frame.top_tokens == tokens.numpy()).mean() > 0.95  # near ties may fall either way
            assert np.abs(frame.top_probs / 255 - probs.numpy()).max() <= 0.5 / 255 + 1e-3
            before = step.state
    assert one.frames[-1].tokens.tolist() == before.tokens[0].tolist()
    assert len(one.frames) == sampler.nfe + 1 == one.header.frames
    assert one.frames[-1].tokens[3] == 7
    assert one.text is None


def test_samplers_share_the_calls_in_which_they_agree(words):
    counting = CountingDenoiser(words)
    both, frames = follow(counting, {"native": Native(nfe=16), "CRS": CRS(nfe=16)}, seed=1)
    for r, new_texts in enumerate(frames):
        assert [len(one.frames) for one in both] == [r + 1, r + 1]
        assert all(texts is not None for texts in new_texts)
    warmup = round(0.33 * 15)  # the first committed tokens are in the input one call after the first selection
    assert counting.calls == 2 * 16 - (warmup + 1)
    assert share_randomness([one.header for one in both])
    for native, crs in list(zip(both[0].frames, both[1].frames, strict=True))[: warmup + 1]:
        assert native.tokens.tolist() == crs.tokens.tolist()
    alone = record(words, CRS(nfe=16), seed=1, name="CRS")
    assert alone.to_bytes() == both[1].to_bytes()


def test_a_trajectory_may_end_before_another(words):
    both, frames = follow(words, {"short": CRS(nfe=4), "long": CRS(nfe=6)})
    ended = [tuple(texts is None for texts in new_texts) for new_texts in frames]
    assert ended == [(False, False)] * 5 + [(True, False)] * 2
    assert [len(one.frames) for one in both] == [5, 7]


def test_a_prompt_is_masked_and_kept(words):
    one = record(words, CRS(nfe=6), prompt="moon ")
    for frame in one.frames:
        assert (frame.masks[:5] == 1).all()
        assert not (frame.masks[5:] & 1).any()
        assert not frame.deficit[:5].any()
    assert one.text.startswith("moon ")


def test_a_trajectory_is_named_by_its_sampler(words):
    assert record(words, CRS(nfe=2)).header.name == "crs"
    assert record(words, "native nfe=2 top_p=.9").header.name == "native top_p=0.9"
    assert record(words, Native(nfe=2), name="mine").header.name == "mine"


# Samplers of users


def test_unknown_masks_are_kept_by_name(words):
    one = record(words, Odd(nfe=5), seed=2)
    assert one.header.masks == ["fixed", "odd"]
    for r, frame in enumerate(one.frames):
        place = np.arange(one.header.length)
        assert one.header.mask(frame, "odd").tolist() == ((place + min(r, 4)) % 2 == 1).tolist()
        assert not one.header.mask(frame, "committed").any()
    assert one.text == limpet.sample(words, Odd(nfe=5), 1, 2).texts[0]
    assert Trajectory.from_bytes(one.to_bytes()).header.sampler["sampler"].endswith("test_trajectory.py:Odd")


@pytest.mark.parametrize(
    "masks",
    [{"fixed": None}, {str(i): None for i in range(8)}, {"late": 2}, {"warmup_calls": -2}],
    ids=["fixed", "8", "late", "warmup_calls"],
)
def test_masks_that_cannot_be_kept_are_refused(words, masks):
    """Eight do not fit a byte beside "fixed"; what a bit means must be known from the first frame on."""

    class Masking(Odd):
        def step(self, ctx, state):
            state, info = super().step(ctx, state)
            there = {
                name: ctx.no_positions for name, since in masks.items()
                if since is None or (info.call >= since if since > 0 else info.call < -since)
            }  # fmt: skip
            return state, info._replace(masks=there)

    with pytest.raises(LimpetError, match="a sampler has at most 7 masks"):
        record(words, Masking(nfe=4))


def test_a_sampler_that_makes_no_call_is_named(words):
    class Silent(Odd):
        def step(self, ctx, state):
            other = context_of(words, Inputs(ctx.fixed, ctx.rng))
            transition = self.transition(ctx, state, ctx.free, ctx.no_positions)
            outcome = other.call(state, state.tokens, 0.5, transition)[1]
            return State(state.call + 1, state.tokens), StepInfo(state.call, 0.5, state.tokens, outcome, {})

    with pytest.raises(LimpetError, match=r"without ctx\.call"):
        record(words, Silent(nfe=4))


def test_seeds_are_checked(words):
    with pytest.raises(LimpetError, match="seed is -1"):
        record(words, CRS(nfe=2), seed=-1)


# The file


def random_trajectory(seed, length, nfe, vocab_size, candidates=4, words=None):
    random = np.random.default_rng(seed)
    header = Header(
        name="CRS", model="m", digest="d", sampler=CRS(nfe=nfe).to_dict(), masks=["fixed", "committed", "visible"],
        seed=seed, sample=0, length=length, vocab_size=vocab_size, calls=nfe, candidates=candidates,
    )  # fmt: skip
    frames = [
        Frame(
            random.random(), random.integers(vocab_size, size=length), random.integers(vocab_size, size=length),
            random.integers(8, size=length), random.integers(65536, size=length),
            random.integers(vocab_size, size=(length, candidates)), random.integers(256, size=(length, candidates)),
        )
        for _ in range(nfe + 1)
    ]  # fmt: skip
    return Trajectory(header, frames, words or {0: "</script>", 1: " é", 2: "\n"}, "text", {"nll": 1.5})


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(2, 5), st.sampled_from([2, 300, 65536, 65537, 10**6]))
@settings(max_examples=60, deadline=None)
def test_a_file_round_trips(seed, length, nfe, vocab_size):
    one = random_trajectory(seed, length, nfe, vocab_size)
    data = one.to_bytes()
    two = Trajectory.from_bytes(data)
    assert two.to_bytes() == data
    assert (two.header, two.token_texts, two.text, two.scores) == (one.header, one.token_texts, one.text, one.scores)
    for before, after in zip(one.frames, two.frames, strict=True):
        for a, b in zip(before, after, strict=True):
            assert np.array_equal(a, b)


def test_the_file_is_as_documented():
    """Read by other code: one line of JSON, then the arrays of every frame."""
    one = random_trajectory(1, 7, 3, 300)
    line, _, body = gzip.decompress(one.to_bytes()).partition(b"\n")
    about = json.loads(line)
    assert (about["format"], about["version"]) == ("limpet trajectory", VERSION)
    length, k = about["length"], about["candidates"]
    size = 8 + length * (2 + 2 + 1 + 2 + k * (2 + 1))
    assert len(body) == size * (about["calls"] + 1)
    frame = body[2 * size : 3 * size]
    assert np.frombuffer(frame[:8], "<f8")[0] == one.frames[2].t
    frame = frame[8:]
    assert np.frombuffer(frame[: 2 * length], "<u2").tolist() == one.frames[2].tokens.tolist()
    assert np.frombuffer(frame[2 * length : 4 * length], "<u2").tolist() == one.frames[2].model_input.tolist()
    assert np.frombuffer(frame[4 * length : 5 * length], "u1").tolist() == one.frames[2].masks.tolist()
    assert about["masks"] == ["fixed", "committed", "visible"]
    assert np.frombuffer(frame[-k * length :], "u1").tolist() == one.frames[2].top_probs.ravel().tolist()


def test_1024_positions_and_64_steps_stay_below_two_megabytes():
    """Also when every number is random and every token of a large vocabulary occurs."""
    letters = np.random.default_rng(0).integers(97, 123, size=(50258, 6)).astype(np.uint8)
    words = {i: bytes(row).decode() for i, row in enumerate(letters)}
    assert len(random_trajectory(0, 1024, 64, 50258, words=words).to_bytes()) < 2_000_000


DAMAGED = "it is damaged or not a limpet trajectory: record it again"
GOOD = random_trajectory(2, 9, 4, 60).to_bytes()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_file_is_refused_or_harmless(data):
    """A flipped byte or a cut: gzip's checksum notices, or the byte has no meaning, or it is of the version, which is
    read before the checksum."""
    if data.draw(st.booleans()):
        spoilt = GOOD[: data.draw(st.integers(0, len(GOOD) - 1))]
    else:
        at, flip = data.draw(st.integers(0, len(GOOD) - 1)), data.draw(st.integers(1, 255))
        spoilt = GOOD[:at] + bytes([GOOD[at] ^ flip]) + GOOD[at + 1 :]
    try:
        found = Trajectory.from_bytes(spoilt, "it").to_bytes()
    except LimpetError as error:
        found = str(error)
    refused = str(found).startswith("it is a trajectory of version ")
    assert found == GOOD or refused or str(found).startswith(DAMAGED)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_foreign_bytes_are_refused(data):
    for content in (data, gzip.compress(data), gzip.compress(data + b"\n")):
        with pytest.raises(LimpetError, match="damaged or not a limpet trajectory"):
            Trajectory.from_bytes(content)


def rewritten(**changes):
    line, _, body = gzip.decompress(GOOD).partition(b"\n")
    about = {**json.loads(line), **changes}
    return gzip.compress(json.dumps({k: v for k, v in about.items() if v is not ...}).encode() + b"\n" + body)


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 10}, {"length": -1}, {"length": "9"}, {"length": 2**40}, {"length": True}, {"candidates": 0},
        {"vocab_size": 30}, {"calls": 0}, {"calls": 5}, {"calls": 2**17}, {"calls": 4.0}, {"masks": None},
        {"masks": []}, {"masks": ["committed"]}, {"masks": ["fixed", "fixed"]}, {"masks": ["fixed", 3]},
        {"masks": ["fixed"]}, {"masks": ["fixed", *"abcdefgh"]}, {"token_texts": []}, {"token_texts": {"x": "y"}},
        {"token_texts": {"1": 2}}, {"sampler": None}, {"sampler": "crs"}, {"sampler": {"nfe": [1]}},
        {"sampler": {"budget": math.nan}}, {"sampler": {"budget": math.inf}}, {"seed": -1}, {"text": 3},
        {"scores": None}, {"scores": {"nll": {}}}, {"name": ...}, {"digest": 5},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_lies_is_refused(changes):
    with pytest.raises(LimpetError, match=DAMAGED):
        Trajectory.from_bytes(rewritten(**changes), "it")


@pytest.mark.parametrize("t", [math.nan, math.inf, -0.5, 1.5])
def test_a_time_that_is_none_is_refused(t):
    one = random_trajectory(2, 9, 4, 60)
    one.frames[1] = one.frames[1]._replace(t=t)
    with pytest.raises(LimpetError, match=DAMAGED):
        Trajectory.from_bytes(one.to_bytes(), "it")


def test_a_file_never_loads_code(tmp_path, monkeypatch):
    """Whatever the header calls the sampler, it is only shown."""
    bomb = tmp_path / "bomb.py"
    bomb.write_text("raise SystemExit('this file was run')")
    monkeypatch.setattr("limpet.registry.find", lambda *_: pytest.fail("something was looked up"))
    monkeypatch.setattr("limpet.registry.from_file", lambda *_: pytest.fail("a file was run"))
    for name in (f"{bomb}:Bomb", "os:system", "crs"):
        one = Trajectory.from_bytes(rewritten(sampler={"sampler": name, "nfe": 3}))
        assert one.header.sampler["sampler"] == name
        assert Trajectory.from_bytes(one.to_bytes()).header == one.header


def test_another_version_is_named():
    for other in (1, 2, 4, "two"):
        with pytest.raises(LimpetError, match=f"version {other!r}; this limpet reads version 3: record it again"):
            Trajectory.from_bytes(rewritten(version=other))


def test_a_file_that_promises_too_much_is_not_unpacked():
    bomb = gzip.compress(gzip.decompress(rewritten(length=2**20, calls=65536)) + bytes(10**6))
    with pytest.raises(LimpetError, match="damaged"):
        Trajectory.from_bytes(bomb)


def test_save_and_load(tmp_path):
    one = random_trajectory(3, 5, 3, 20)
    one.save(tmp_path / "a.limpet")
    assert Trajectory.load(tmp_path / "a.limpet").to_bytes() == one.to_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["a.limpet"]
    with pytest.raises(LimpetError, match="cannot be written"):
        one.save(tmp_path / "no" / "a.limpet")
    with pytest.raises(LimpetError, match="cannot be read"):
        Trajectory.load(tmp_path / "b.limpet")
    with pytest.raises(LimpetError, match="cannot be read"):
        Trajectory.load(tmp_path)
