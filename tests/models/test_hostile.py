"""Every reader against the hostile corpus: one short sentence, in seconds, in little memory; and what a sentence is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import limpet
from hostile import CASES
from limpet.diffusion.rng import CounterRNG
from limpet.errors import MOST, LimpetError, plain
from limpet.recording.trajectory import record

SECONDS, BYTES, PRINTED = 10, 1 << 30, 400
GOOD = {"a tokenizer of huge ids", "a tokenizer without its unknown", "two thousand views of one storage"}


@pytest.fixture(scope="module")
def told():
    """What one process said of all of them; those that it did not come to are not there."""
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, str(Path(__file__).with_name("hostile.py"))]
    try:
        done = subprocess.run(program, env=here, capture_output=True, text=True, timeout=240, check=False)
        out = done.stdout
    except subprocess.TimeoutExpired as late:
        out = (late.stdout or b"").decode()
    return {line["name"]: line for line in map(json.loads, out.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_one_short_sentence(told, name):
    assert name in told, "it was never done with"
    found = told[name]
    assert found["seconds"] < SECONDS
    assert found["bytes"] < BYTES
    if found["said"] is None:
        assert name in GOOD  # it may be read: it does no harm
        return
    assert not found["said"].startswith("TRACEBACK"), found["said"]
    assert len("limpet: " + found["said"]) <= PRINTED
    assert found["said"].isprintable()


# Sentences


@given(st.text(st.characters(), max_size=2000))
@example("\x1b[2J\x07\u202e\ud800\n\r\t\x00" * 500)
@example("x" * 10**6)
def test_a_sentence_is_one_line_that_can_be_seen(text):
    shown = str(LimpetError(text))
    assert len(shown) <= MOST
    assert shown.isprintable()
    shown.encode("utf-8")
    if text.isprintable() and len(text) <= MOST:
        assert shown == text


def test_a_long_sentence_keeps_its_end():
    assert plain("a" * 1000 + ": copy it again").endswith(": copy it again")


# Seeds


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30])
def test_a_seed_that_is_none_is_refused_everywhere(seed):
    model = limpet.load("exact:chain")
    for use in (
        lambda: limpet.sample(model, limpet.Native(nfe=2), 1, seed),
        lambda: limpet.compare(model, {"a": limpet.Native(nfe=2)}, 1, (1, seed)),
        lambda: record(model, limpet.Native(nfe=2), seed),
        lambda: model.draw(2, seed),
        lambda: CounterRNG(seed, None),
    ):
        with pytest.raises(LimpetError, match="seed is"):
            use()


def test_samples_under_a_seed_are_as_many_as_a_counter_has():
    model = limpet.load("exact:chain")
    limpet.sample(model, limpet.Native(nfe=2), 1, 1, first=2**32 - 1)
    with pytest.raises(LimpetError, match="first"):
        limpet.sample(model, limpet.Native(nfe=2), 2, 1, first=2**32 - 1)
