"""Trajectories: what a frame says against the sampler's own words, the file's round trip, and every way to spoil it."""

import gzip
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet import sampler
from limpet.denoisers.duo import Duo
from limpet.errors import LimpetError
from limpet.policy import Policy
from limpet.sampler import NEVER
from limpet.samples import Counted, prepare
from limpet.streams import Stream
from limpet.view import trajectory
from limpet.view.trajectory import GIVEN, SELECTED, VISIBLE, Frame, Header, Trajectory, follow, record, same_randomness
from test_duo import random_network

POLICIES = {
    "CRS": Policy(nfe=12),
    "native": Policy(nfe=12, horizon=0),
    "short": Policy(nfe=12, horizon=2),
    "refreshed": Policy(nfe=12, horizon=4, values="refreshed"),
    "second": Policy(nfe=9, values="second"),
    "output": Policy(nfe=9, write="output", endpoint="ancestral", top_p=0.8),
}


@pytest.fixture(scope="module")
def words():
    return limpet.load("exact:words")


@pytest.fixture(scope="module", params=["leave-one-out", "posterior"])
def duo(request):
    return Duo(random_network(), name="tiny", predicts=request.param)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_trajectory_ends_in_the_text_that_sample_gives(words, policy):
    path = record(words, policy, seed=3, sample=1)
    made = limpet.sample(words, policy, n=2, seed=3)
    assert path.text == made.texts[1]
    assert path.frames[-1].state.tolist() == made.tokens[1].tolist()
    assert path.frames[-1].selected == made.selected[1]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_frames_are_what_the_sampler_saw(duo, policy):
    """Against the sampler run by hand, and the law computed from the input alone."""
    fixed = torch.full((1, 12), -1)
    fixed[0, 3] = 7
    path = record(duo, policy, seed=5, sample=2, fixed=fixed[0])
    run = prepare(duo, policy, Stream(5, torch.tensor([2])), fixed, trace=True)
    with torch.inference_mode():
        before = sampler.begin(run)
        for frame, (after, info) in zip(path.frames, sampler.generate(run, before), strict=False):
            assert frame.state.tolist() == before.tokens[0].tolist()
            assert frame.input.tolist() == info.input[0].tolist()
            assert (frame.marks & VISIBLE > 0).tolist() == info.visible[0].tolist()
            held = before.selected_at[0] != NEVER
            assert (frame.marks & SELECTED > 0).tolist() == held.tolist()
            assert frame.label[held].tolist() == before.labels[0][held].tolist()
            free = torch.arange(12) != 3
            assert (frame.marks & GIVEN == 0).tolist() == free.tolist()
            assert np.abs(frame.deficit[free] / 65535 - info.deficit[0][free].numpy()).max() <= 0.5 / 65535 + 1e-9

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
    assert path.frames[-1].state.tolist() == before.tokens[0].tolist()
    assert len(path.frames) == policy.nfe + 1
    assert path.frames[-1].state[3] == 7
    assert path.text is None


def test_arms_in_step_share_the_calls_in_which_they_agree(words):
    counted = Counted(words)
    counted.name, counted.digest, counted.tokenizer = words.name, words.digest, words.tokenizer
    policy = Policy(nfe=16)
    headers, path = follow(counted, {"native": policy.but(horizon=0), "CRS": policy}, seed=1)
    steps = list(path)
    warmup = round(0.33 * 15)  # the first labels are seen one step after the first selection
    assert counted.calls == 2 * 16 - (warmup + 1)
    assert same_randomness(headers)
    for r, (native, crs) in enumerate(steps[: warmup + 1]):
        assert native.state.tolist() == crs.state.tolist(), r
    alone = record(words, policy, seed=1)
    assert all(
        np.array_equal(a, b)
        for (_, one), other in zip(steps, alone.frames, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_an_arm_that_ends_first_rests(words):
    _, path = follow(words, {"short": Policy(nfe=4), "long": Policy(nfe=6)})
    ended = [tuple(frame is None for frame in step) for step in path]
    assert ended == [(False, False)] * 5 + [(True, False)] * 2


def test_a_prompt_is_marked_and_kept(words):
    path = record(words, Policy(nfe=6), prefix="moon ")
    for frame in path.frames:
        assert (frame.marks[:5] == GIVEN).all()
        assert not (frame.marks[5:] & GIVEN).any()
        assert not frame.deficit[:5].any()
    assert path.text.startswith("moon ")


def test_names_of_arms():
    assert trajectory.name_of(Policy()) == "CRS"
    assert trajectory.name_of(Policy(horizon=0, top_p=0.9)) == "native, top-p 0.9"
    assert trajectory.name_of(Policy(horizon=8, late_top_p=0.8)) == "horizon 8, top-p 0.8"


def test_seeds_are_checked(words):
    with pytest.raises(LimpetError, match="seed is -1"):
        record(words, seed=-1)


# The file


def random_trajectory(seed, length, nfe, vocab_size, candidates=4, words=None):
    random = np.random.default_rng(seed)
    header = Header(
        arm="CRS", model="m", digest="d", policy=Policy(nfe=nfe).to_dict(), seed=seed, sample=0, length=length,
        vocab_size=vocab_size, times=np.linspace(1, 1e-5, nfe).tolist(), candidates=candidates,
    )  # fmt: skip
    frames = [
        Frame(
            random.integers(vocab_size, size=length), random.integers(vocab_size, size=length),
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
    """A reader of its own: one line of JSON, then state, label, marks, deficit, ids, mass of every frame."""
    one = random_trajectory(1, 7, 3, 300)
    line, _, body = gzip.decompress(one.to_bytes()).partition(b"\n")
    about = json.loads(line)
    assert (about["format"], about["version"]) == ("limpet trajectory", 1)
    length, k = about["length"], about["candidates"]
    size = length * (2 + 2 + 1 + 2 + k * (2 + 1))
    assert len(body) == size * (len(about["times"]) + 1)
    frame = body[2 * size : 3 * size]
    assert np.frombuffer(frame[: 2 * length], "<u2").tolist() == one.frames[2].state.tolist()
    assert np.frombuffer(frame[4 * length : 5 * length], "u1").tolist() == one.frames[2].marks.tolist()
    assert np.frombuffer(frame[-k * length :], "u1").tolist() == one.frames[2].mass.ravel().tolist()


def test_1024_positions_and_64_steps_stay_below_two_megabytes():
    """The worst there can be: every number random, every word of a large vocabulary used."""
    letters = np.random.default_rng(0).integers(97, 123, size=(50258, 6)).astype(np.uint8)
    words = {i: bytes(row).decode() for i, row in enumerate(letters)}
    assert len(random_trajectory(0, 1024, 64, 50258, words=words).to_bytes()) < 2_000_000


def test_recording_again_gives_the_same_bytes(words):
    assert record(words, Policy(nfe=5), seed=9).to_bytes() == record(words, Policy(nfe=5), seed=9).to_bytes()


FOREIGN = "it is not a limpet trajectory: make one with `limpet sample --record FILE`"
GOOD = random_trajectory(2, 9, 4, 60).to_bytes()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_file_is_refused_or_harmless(data):
    """A flipped byte or a cut: either gzip's checksum notices, or the byte is one that says nothing."""
    if data.draw(st.booleans()):
        spoilt = GOOD[: data.draw(st.integers(0, len(GOOD) - 1))]
    else:
        at, flip = data.draw(st.integers(0, len(GOOD) - 1)), data.draw(st.integers(1, 255))
        spoilt = GOOD[:at] + bytes([GOOD[at] ^ flip]) + GOOD[at + 1 :]
    try:
        found = Trajectory.from_bytes(spoilt, "it").to_bytes()
    except LimpetError as error:
        found = str(error)
    assert found == GOOD or found in ("it is damaged: record it again", FOREIGN)


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
        {"vocab_size": 30}, {"times": []}, {"times": [1, 2, 3, 4]}, {"times": "abcd"}, {"times": [math.nan] * 4},
        {"words": []}, {"words": {"x": "y"}}, {"words": {"1": 2}}, {"policy": {"nfe": -1}}, {"policy": None},
        {"seed": -1}, {"text": 3}, {"scores": None}, {"arm": ...}, {"digest": 5}, {"times": [1.0] * 9},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_lies_is_refused(changes):
    with pytest.raises(LimpetError, match="it is damaged: record it again"):
        Trajectory.from_bytes(rewritten(**changes), "it")


def test_another_version_is_named():
    with pytest.raises(LimpetError, match="version 2, and this limpet reads version 1"):
        Trajectory.from_bytes(rewritten(version=2))


def test_a_file_that_promises_too_much_is_not_unpacked():
    bomb = gzip.compress(gzip.decompress(rewritten(length=2**20, times=[1.0] * 65536)) + bytes(10**6))
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
