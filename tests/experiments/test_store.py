"""The store: what is read is exactly what was written, or it is reported as damaged."""

import json
import os
import socket
import subprocess
import sys
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.errors import LimpetError
from limpet.experiments.store import DamagedUnitError, Store, _with_checksum, digest, process_space, unit_key
from study_cases import result_files

FACTS, OTHER_FACTS = {"seed": 1}, {"seed": 2}
KEY, OTHER = unit_key(FACTS), unit_key(OTHER_FACTS)
FOLDER = f"units/{KEY[:2]}/{KEY}"
TENSORS = {
    "tokens": torch.arange(12, dtype=torch.int32).view(3, 4),
    "committed_values": torch.zeros(3, 4, dtype=torch.int32),
}
ROWS = {"facts": FACTS, "nfe": 8, "columns": {"nll:é": [1.5, None, 0.1]}}


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    store.write(KEY, TENSORS, ROWS)
    return store


def test_a_unit_is_read_as_written(store):
    found = store.read(KEY)
    assert torch.equal(found.tensors["tokens"], TENSORS["tokens"])
    assert {name: found.rows[name] for name in ROWS} == ROWS
    assert store.read(OTHER) is None
    assert store.inspect(KEY)[0] is not None


def test_equal_results_are_equal_bytes(store, tmp_path):
    before = result_files(tmp_path)
    store.write(KEY, dict(reversed(TENSORS.items())), dict(reversed(ROWS.items())))
    assert result_files(tmp_path) == before
    assert len(before) == 2


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_cut_or_flipped_bit_is_noticed(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("store")
    store = Store(root)
    store.write(KEY, TENSORS, ROWS)
    path = data.draw(st.sampled_from(sorted((root / "units").rglob("*.*"))))
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw = raw[:at]
    else:
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    with pytest.raises(DamagedUnitError):
        store.read(KEY)
    assert store.inspect(KEY)[0] is None


def test_rows_of_another_unit_are_not_believed(store, tmp_path):
    store.write(OTHER, TENSORS, ROWS | {"facts": OTHER_FACTS})
    for name in ("rows.json", "tokens.safetensors"):
        os.replace(tmp_path / f"units/{OTHER[:2]}/{OTHER}/{name}", tmp_path / FOLDER / name)
    with pytest.raises(DamagedUnitError, match="checksum"):
        store.read(KEY)


def test_without_its_tokens_a_unit_is_damaged_and_without_its_rows_there_is_none(store, tmp_path):
    (tmp_path / f"{FOLDER}/tokens.safetensors").unlink()
    with pytest.raises(DamagedUnitError, match="missing"):
        store.read(KEY)
    (tmp_path / f"{FOLDER}/rows.json").unlink()
    assert store.read(KEY) is None


def test_a_store_may_live_where_fsspec_reaches():
    store = Store(f"memory://{uuid.uuid4().hex}")
    store.write(KEY, TENSORS, ROWS)
    store.write_plan("study", {"cells": [], "seeds": []})
    store.remove_partial_files()
    store.log({"nothing": "kept"})
    assert store.inspect(KEY)[0] is not None
    assert store.read_plan("study") == {"cells": [], "seeds": []}
    with pytest.raises(LimpetError, match="holds no run of other: run the study first"):
        store.read_plan("other")


def test_partial_files_of_dead_runners_are_removed(store, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead, alive, far = (
        tmp_path / "partial" / f"{host}-{pid}-x" for host, pid in
        ((process_space(), child.pid), (process_space(), os.getpid()), ("elsewhere", child.pid))
    )  # fmt: skip
    for path in (dead, alive, far):
        path.write_text("half")
    store.remove_partial_files()
    assert not dead.exists()
    assert alive.exists()
    assert far.exists()


FULL = """
import resource, sys, torch
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from limpet.errors import LimpetError
from limpet.experiments.store import Store, unit_key
store, one, other = Store(sys.argv[1]), unit_key(1), unit_key(2)
store.write(one, {"tokens": torch.zeros(10, dtype=torch.int32)}, {"facts": 1})
try:
    store.write(other, {"tokens": torch.zeros(10_000, dtype=torch.int32)}, {"facts": 2})
except LimpetError as error:
    print(error)
print(store.inspect(one)[0] is not None, store.inspect(other)[0] is not None)
"""


def test_a_full_disk_loses_nothing_and_is_reported(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    message, units = done.stdout.splitlines()
    assert "cannot be written" in message
    assert "every finished unit is kept" in message
    assert units == "True False"
    assert not list(tmp_path.glob("partial/*"))


def test_a_store_that_cannot_be_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LimpetError, match="cannot be written"):
        Store(tmp_path / "file").write_plan("study", {})
    with pytest.raises(LimpetError, match="cannot be opened"):
        Store("nowhere://bucket")


def test_plans_are_plain_json(store, tmp_path):
    store.write_plan("study", {"b": 1, "a": "é", "cells": [], "seeds": []})
    assert json.loads((tmp_path / "plans/study.json").read_text()) == {"a": "é", "b": 1, "cells": [], "seeds": []}
    (tmp_path / "plans/study.json").write_text("{")
    with pytest.raises(LimpetError, match="holds no run of study: run the study first"):
        store.read_plan("study")


# Files that the store did not write


def forged(store, root, rows, tokens=b"x"):
    """Rows with a true checksum and digest, whatever else they hold."""
    rows = {"key": KEY, "data_digest": digest(tokens), "facts": FACTS, **rows}
    (root / FOLDER / "rows.json").write_bytes(_with_checksum(rows))
    (root / FOLDER / "tokens.safetensors").write_bytes(tokens)


DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
HOSTILE_ROWS = {
    "nan": b'{"checksum": "x", "a": NaN}',
    "surrogates": b'{"checksum": "x", "a": "\\ud800"}',
    "deep": DEEP,
    "a list": b'["checksum"]',
    "a text": b'"checksum"',
    "a long number": b'{"checksum": 1, "a": ' + b"9" * 5000 + b"}",
    "no text": b"\xff\xfe",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", HOSTILE_ROWS)
def test_foreign_rows_are_damaged_and_replaced(store, tmp_path, kind):
    (tmp_path / FOLDER / "rows.json").write_bytes(HOSTILE_ROWS[kind])
    assert store.inspect(KEY)[0] is None
    assert "rows.json" in store.inspect(KEY)[1]
    store.write(KEY, TENSORS, ROWS)
    assert store.inspect(KEY)[0] is not None


def test_facts_are_checked_against_the_key(store, tmp_path):
    """Anyone can write a true checksum. The facts of another unit under this key are refused."""
    forged(store, tmp_path, {"facts": OTHER_FACTS})
    with pytest.raises(DamagedUnitError, match="other facts"):
        store.read(KEY)
    forged(store, tmp_path, {"facts": None})
    with pytest.raises(DamagedUnitError, match="other facts"):
        store.read(KEY)


def test_partial_files_of_other_process_spaces_stay_for_a_week(store, tmp_path, monkeypatch):
    """The same host name and a process number that is not in use here: a container's process, which may be alive."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    (tmp_path / "partial").mkdir(exist_ok=True)
    theirs = tmp_path / "partial" / f"{socket.gethostname()}-{'0' * 12}-{child.pid}-x"
    plain = tmp_path / "partial" / f"{socket.gethostname()}-{child.pid}-x"
    odd = [tmp_path / "partial" / name for name in ("x", f"{process_space()}-{'9' * 30}-x", f"{process_space()}-²-x")]
    for path in (theirs, plain, *odd):
        path.write_text("half")
    store.remove_partial_files()
    assert all(path.exists() for path in (theirs, plain, *odd))
    os.utime(theirs, (0, 0))
    store.remove_partial_files()
    assert not theirs.exists()  # after a week
