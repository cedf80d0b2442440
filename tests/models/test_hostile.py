"""Every reader against the hostile corpus: one short sentence, with little work and memory. Sentences and seeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import hostile
import limpet
from limpet.diffusion.rng import CounterRNG
from limpet.errors import MAX_SENTENCE, LimpetError, one_line
from limpet.recording.trajectory import record

SECONDS, BYTES, PRINTED = 20, 1 << 30, 400  # of CPU time, of memory, and characters
HARMLESS = {"a tokenizer of huge ids", "a tokenizer without its unknown", "two thousand views of one storage"}


def test_a_hostile_file_is_one_short_sentence():
    """One process reads them all, one after the other."""
    program = [sys.executable, str(Path(hostile.__file__))]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(program, env=path, capture_output=True, text=True, check=False)
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows.keys() == hostile.CASES.keys(), done.stderr[-2000:]
    assert {name: row["seconds"] for name, row in rows.items() if row["seconds"] > SECONDS} == {}
    assert {name: row["bytes"] for name, row in rows.items() if row["bytes"] > BYTES} == {}
    messages = {name: row["message"] for name, row in rows.items() if row["message"] is not None}
    assert rows.keys() - messages.keys() <= HARMLESS
    assert [one for one in messages.items() if one[1].startswith("TRACEBACK")] == []
    assert [one for one in messages.items() if len("limpet: " + one[1]) > PRINTED or not one[1].isprintable()] == []


# Sentences


@given(st.text(st.characters(), max_size=2000))
@example("\x1b[2J\x07\u202e\ud800\n\r\t\x00" * 500)
@example("x" * 10**6)
def test_a_sentence_is_one_printable_line(text):
    shown = str(LimpetError(text))
    assert len(shown) <= MAX_SENTENCE
    assert shown.isprintable()
    shown.encode("utf-8")
    if text.isprintable() and len(text) <= MAX_SENTENCE:
        assert shown == text


def test_a_long_sentence_keeps_its_end():
    assert one_line("a" * 1000 + ": copy it again").endswith(": copy it again")


# Seeds


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30])
def test_a_wrong_seed_is_refused_everywhere(seed):
    model = limpet.load("exact:chain")
    for use in (
        lambda: limpet.sample(model, limpet.Native(nfe=2), 1, seed),
        lambda: limpet.compare(model, {"a": limpet.Native(nfe=2)}, n=1, seeds=(1, seed)),
        lambda: record(model, limpet.Native(nfe=2), seed),
        lambda: model.draw(2, seed),
        lambda: CounterRNG(seed, None),
    ):
        with pytest.raises(LimpetError, match="seed is"):
            use()


def test_a_seed_has_as_many_samples_as_the_counter_has_values():
    model = limpet.load("exact:chain")
    limpet.sample(model, limpet.Native(nfe=2), 1, 1, first=2**32 - 1)
    with pytest.raises(LimpetError, match="first"):
        limpet.sample(model, limpet.Native(nfe=2), 2, 1, first=2**32 - 1)
