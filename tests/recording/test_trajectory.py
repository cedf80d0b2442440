"""Trajectories: what a frame says against the sampler's own words, the file's round trip, and every way to spoil it."""

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
from limpet.generation import Counted
from limpet.models.duo import Duo
from limpet.recording.trajectory import Frame, Header, Trajectory, follow, record, same_randomness
from limpet.samplers.context import State, StepInfo, generate, open_context

SAMPLERS = {
    "CRS": CRS(nfe=12),
    "native": Native(nfe=12),
    "short": CRS(nfe=12, horizon=2),
    "refreshed": CRS(nfe=12, horizon=4, values="refreshed"),
    "second": CRS(nfe=9, values="second"),
    "output": CRS(nfe=9, write="output", final_step="sample", top_p=0.8),
}


@dataclass(frozen=True)
class Odd(Native):
    """A sampler of somebody else's, with a mark of its own: every second position, in turn."""

    nfe: int = param(6, "Calls.", low=2)

    def step(self, ctx, state):
        state, info = super().step(ctx, state)
        place = torch.arange(state.tokens.shape[1]).expand_as(state.tokens)
        return state, info._replace(marks={"odd": (place + info.call) % 2 == 1})


@pytest.fixture(scope="module")
def words():
    return limpet.load("exact:words")


@pytest.fixture(scope="module", params=["leave-one-out", "posterior"])
def duo(request):
    return Duo(random_network(), name="tiny", predicts=request.param)


@pytest.mark.parametrize("name", samplers.available())
def test_every_sampler_can_be_recorded_and_read_again(words, name):
    """With a token given, since some need one."""
    sampler = samplers.find(name)(nfe=7)
    ctx = record(words, sampler, seed=3, prefix=[1])
    assert ctx.text == limpet.sample(words, sampler, n=1, seed=3, prefix=[1]).texts[0]
    again = Trajectory.from_bytes(ctx.to_bytes())
    assert again.header == ctx.header
    assert again.header.marks[0] == "given"
    assert len(again.frames) == 8


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_trajectory_ends_in_the_text_that_sample_gives(words, sampler):
    ctx = record(words, sampler, seed=3, sample=1)
    made = limpet.sample(words, sampler, n=2, seed=3)
    assert ctx.text == made.texts[1]
    assert ctx.frames[-1].state.tolist() == ctx.frames[-1].input.tolist() == made.tokens[1].tolist()
    assert ctx.header.marked(ctx.frames[-1], "committed").sum() == made.committed[1]
    assert ctx.header.sampler == sampler.to_dict()


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_frames_are_what_the_sampler_saw(duo, sampler):
    """Against the sampler run by hand, and the distribution computed from the input alone."""
    fixed = torch.full((1, 12), -1)
    fixed[0, 3] = 7
    ctx = record(duo, sampler, seed=5, sample=2, fixed=fixed[0])
    by_hand = open_context(duo, CounterRNG(5, torch.tensor([2])), fixed, trace=True)
    with torch.inference_mode():
        before = sampler.begin(by_hand)
        for frame, (after, info) in zip(ctx.frames, generate(sampler, by_hand, before), strict=False):
            assert frame.t == info.t
            assert frame.state.tolist() == before.tokens[0].tolist()
            assert frame.input.tolist() == info.input[0].tolist()
            assert ctx.header.marks == ["given", *info.marks]
            for name, mask in info.marks.items():
                assert ctx.header.marked(frame, name).tolist() == mask[0].tolist()
            if sampler.name == "crs":
                labels, committed_at = before.memory
                held = ctx.header.marked(frame, "committed")
                assert held.tolist() == (committed_at[0] < info.call).tolist()
                visible = ctx.header.marked(frame, "visible")
                assert frame.input[visible].tolist() == labels[0][visible].tolist()
            free = torch.arange(12) != 3
            assert (~ctx.header.marked(frame, "given")).tolist() == free.tolist()
            deficit = info.outcome.deficit[0]
            assert np.abs(frame.deficit[free] / 65535 - deficit[free].numpy()).max() <= 0.5 / 65535 + 1e-9

            logits = duo.logits(info.input, info.t)[0].double()
            if duo.predicts == "posterior":
                noise = 1 - float(duo.schedule.signal(info.t))
                evidence = torch.full_like(logits, noise / 53)
                evidence[torch.arange(12), info.input[0]] += 1 - noise
                logits = logits - evidence.log()
            mass, ids = logits.softmax(-1).topk(4)
            assert (frame.ids == ids.numpy()).mean() > 0.95  # near ties may fall either way
            assert np.abs(frame.mass / 255 - mass.numpy()).max() <= 0.5 / 255 + 1e-3
            before = after
    assert ctx.frames[-1].state.tolist() == before.tokens[0].tolist()
    assert len(ctx.frames) == sampler.nfe + 1 == ctx.header.frames
    assert ctx.frames[-1].state[3] == 7
    assert ctx.text is None


def test_arms_in_step_share_the_calls_in_which_they_agree(words):
    counted = Counted(words)
    paths, walk = follow(counted, {"native": Native(nfe=16), "CRS": CRS(nfe=16)}, seed=1)
    for r, news in enumerate(walk):
        assert [len(ctx.frames) for ctx in paths] == [r + 1, r + 1]
        assert all(word is not None for word in news)
    warmup = round(0.33 * 15)  # the first labels are seen one step after the first selection
    assert counted.calls == 2 * 16 - (warmup + 1)
    assert same_randomness([ctx.header for ctx in paths])
    for native, crs in list(zip(paths[0].frames, paths[1].frames, strict=True))[: warmup + 1]:
        assert native.state.tolist() == crs.state.tolist()
    alone = record(words, CRS(nfe=16), seed=1, arm="CRS")
    assert alone.to_bytes() == paths[1].to_bytes()


def test_an_arm_that_ends_first_rests(words):
    paths, walk = follow(words, {"short": CRS(nfe=4), "long": CRS(nfe=6)})
    ended = [tuple(new is None for new in news) for news in walk]
    assert ended == [(False, False)] * 5 + [(True, False)] * 2
    assert [len(ctx.frames) for ctx in paths] == [5, 7]


def test_a_prompt_is_marked_and_kept(words):
    ctx = record(words, CRS(nfe=6), prefix="moon ")
    for frame in ctx.frames:
        assert (frame.marks[:5] == 1).all()
        assert not (frame.marks[5:] & 1).any()
        assert not frame.deficit[:5].any()
    assert ctx.text.startswith("moon ")


def test_an_arm_is_named_by_its_sampler(words):
    assert record(words, CRS(nfe=2)).header.arm == "crs"
    assert record(words, Native(nfe=2, top_p=0.9)).header.arm == "native top_p=0.9"
    assert record(words, Native(nfe=2), arm="mine").header.arm == "mine"


# Samplers of somebody else's


def test_marks_that_nobody_here_knows_are_kept_by_name(words):
    ctx = record(words, Odd(nfe=5), seed=2)
    assert ctx.header.marks == ["given", "odd"]
    for r, frame in enumerate(ctx.frames):
        place = np.arange(ctx.header.length)
        assert ctx.header.marked(frame, "odd").tolist() == ((place + min(r, 4)) % 2 == 1).tolist()
        assert not ctx.header.marked(frame, "committed").any()
    assert ctx.text == limpet.sample(words, Odd(nfe=5), 1, 2).texts[0]
    assert Trajectory.from_bytes(ctx.to_bytes()).header.sampler["sampler"].endswith("test_trajectory.py:Odd")


@pytest.mark.parametrize(
    "marks",
    [{"given": None}, {str(i): None for i in range(8)}, {"late": 2}, {"warmup_calls": -2}],
    ids=["given", "8", "late", "warmup_calls"],
)
def test_marks_that_cannot_be_kept_are_refused(words, marks):
    """Eight do not fit a byte beside "given"; and what a bit means must be known from the first frame on."""

    class Marking(Odd):
        def step(self, ctx, state):
            state, info = super().step(ctx, state)
            there = {
                name: ctx.no_positions for name, since in marks.items()
                if since is None or (info.call >= since if since > 0 else info.call < -since)
            }  # fmt: skip
            return state, info._replace(marks=there)

    with pytest.raises(LimpetError, match="a sampler has at most 7 marks"):
        record(words, Marking(nfe=4))


def test_a_sampler_that_makes_no_call_is_named(words):
    class Silent(Odd):
        def step(self, ctx, state):
            outcome = open_context(words, ctx.rng, ctx.fixed).call(
                state.tokens, 0.5, self.transition(ctx, state, ctx.free, ctx.no_positions)
            )[1]
            return State(state.call + 1, state.tokens), StepInfo(state.call, 0.5, state.tokens, outcome, {})

    with pytest.raises(LimpetError, match=r"without path\.call"):
        record(words, Silent(nfe=4))


def test_seeds_are_checked(words):
    with pytest.raises(LimpetError, match="seed is -1"):
        record(words, CRS(nfe=2), seed=-1)


# The file


def random_trajectory(seed, length, nfe, vocab_size, candidates=4, words=None):
    random = np.random.default_rng(seed)
    header = Header(
        arm="CRS", model="m", digest="d", sampler=CRS(nfe=nfe).to_dict(), marks=["given", "committed", "visible"],
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
    assert (two.header, two.words, two.text, two.scores) == (one.header, one.words, one.text, one.scores)
    for before, after in zip(one.frames, two.frames, strict=True):
        for a, b in zip(before, after, strict=True):
            assert np.array_equal(a, b)


def test_the_file_is_as_documented():
    """A reader of its own: one line of JSON, then t, state, input, marks, deficit, ids, mass of every frame."""
    one = random_trajectory(1, 7, 3, 300)
    line, _, body = gzip.decompress(one.to_bytes()).partition(b"\n")
    about = json.loads(line)
    assert (about["format"], about["version"]) == ("limpet trajectory", 2)
    length, k = about["length"], about["candidates"]
    size = 8 + length * (2 + 2 + 1 + 2 + k * (2 + 1))
    assert len(body) == size * (about["calls"] + 1)
    frame = body[2 * size : 3 * size]
    assert np.frombuffer(frame[:8], "<f8")[0] == one.frames[2].t
    frame = frame[8:]
    assert np.frombuffer(frame[: 2 * length], "<u2").tolist() == one.frames[2].state.tolist()
    assert np.frombuffer(frame[2 * length : 4 * length], "<u2").tolist() == one.frames[2].input.tolist()
    assert np.frombuffer(frame[4 * length : 5 * length], "u1").tolist() == one.frames[2].marks.tolist()
    assert about["marks"] == ["given", "committed", "visible"]
    assert np.frombuffer(frame[-k * length :], "u1").tolist() == one.frames[2].mass.ravel().tolist()


def test_1024_positions_and_64_steps_stay_below_two_megabytes():
    """The worst there can be: every number random, every word of a large vocabulary used."""
    letters = np.random.default_rng(0).integers(97, 123, size=(50258, 6)).astype(np.uint8)
    words = {i: bytes(row).decode() for i, row in enumerate(letters)}
    assert len(random_trajectory(0, 1024, 64, 50258, words=words).to_bytes()) < 2_000_000


def test_recording_again_gives_the_same_bytes(words):
    assert record(words, CRS(nfe=5), seed=9).to_bytes() == record(words, CRS(nfe=5), seed=9).to_bytes()


FOREIGN = "it is not a limpet trajectory: make one with `limpet sample --record FILE`"
GOOD = random_trajectory(2, 9, 4, 60).to_bytes()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_file_is_refused_or_harmless(data):
    """A flipped byte or a cut: either gzip's checksum notices, or the byte is one that says nothing, or it is the
    version's, which is read before the checksum."""
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
    assert found == GOOD or refused or found in ("it is damaged: record it again", FOREIGN)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_foreign_bytes_are_refused(data):
    for content in (data, gzip.compress(data), gzip.compress(data + b"\n")):
        with pytest.raises(LimpetError, match=r"not a limpet trajectory|damaged"):
            Trajectory.from_bytes(content)


def rewritten(**changes):
    line, _, body = gzip.decompress(GOOD).partition(b"\n")
    about = {**json.loads(line), **changes}
    return gzip.compress(json.dumps({k: v for k, v in about.items() if v is not ...}).encode() + b"\n" + body)


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 10}, {"length": -1}, {"length": "9"}, {"length": 2**40}, {"length": True}, {"candidates": 0},
        {"vocab_size": 30}, {"calls": 0}, {"calls": 5}, {"calls": 2**17}, {"calls": 4.0}, {"marks": None},
        {"marks": []}, {"marks": ["committed"]}, {"marks": ["given", "given"]}, {"marks": ["given", 3]},
        {"marks": ["given"]}, {"marks": ["given", *"abcdefgh"]}, {"words": []}, {"words": {"x": "y"}},
        {"words": {"1": 2}}, {"sampler": None}, {"sampler": "crs"}, {"sampler": {"nfe": [1]}},
        {"sampler": {"budget": math.nan}}, {"sampler": {"budget": math.inf}}, {"seed": -1}, {"text": 3},
        {"scores": None}, {"scores": {"nll": {}}}, {"arm": ...}, {"digest": 5},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_lies_is_refused(changes):
    with pytest.raises(LimpetError, match="it is damaged: record it again"):
        Trajectory.from_bytes(rewritten(**changes), "it")


@pytest.mark.parametrize("t", [math.nan, math.inf, -0.5, 1.5])
def test_a_time_that_is_none_is_refused(t):
    one = random_trajectory(2, 9, 4, 60)
    one.frames[1] = one.frames[1]._replace(t=t)
    with pytest.raises(LimpetError, match="it is damaged: record it again"):
        Trajectory.from_bytes(one.to_bytes(), "it")


def test_a_file_never_loads_code(tmp_path, monkeypatch):
    """Whatever its header calls the sampler: it is shown, and nothing is looked up."""
    bomb = tmp_path / "bomb.py"
    bomb.write_text("raise SystemExit('this file was run')")
    monkeypatch.setattr("limpet.registry.find", lambda *_: pytest.fail("something was looked up"))
    monkeypatch.setattr("limpet.registry.from_file", lambda *_: pytest.fail("a file was run"))
    for name in (f"{bomb}:Bomb", "os:system", "crs"):
        ctx = Trajectory.from_bytes(rewritten(sampler={"sampler": name, "nfe": 3}))
        assert ctx.header.sampler["sampler"] == name
        assert Trajectory.from_bytes(ctx.to_bytes()).header == ctx.header


def test_another_version_is_named():
    for other in (1, 3, "two"):
        with pytest.raises(LimpetError, match=f"version {other!r}, and this limpet reads version 2"):
            Trajectory.from_bytes(rewritten(version=other))


def test_a_file_that_promises_too_much_is_not_unpacked():
    bomb = gzip.compress(gzip.decompress(rewritten(length=2**20, calls=65536)) + bytes(10**6))
    with pytest.raises(LimpetError, match="damaged"):
        Trajectory.from_bytes(bomb)


def test_save_and_load(tmp_path):
    one = random_trajectory(3, 5, 3, 20)
    one.save(tmp_path / "a.limpet")
    assert Trajectory.load(tmp_path / "a.limpet").to_bytes() == one.to_bytes()
    assert [ctx.name for ctx in tmp_path.iterdir()] == ["a.limpet"]
    with pytest.raises(LimpetError, match="cannot be written"):
        one.save(tmp_path / "no" / "a.limpet")
    with pytest.raises(LimpetError, match="cannot be read"):
        Trajectory.load(tmp_path / "b.limpet")
    with pytest.raises(LimpetError, match="cannot be read"):
        Trajectory.load(tmp_path)
