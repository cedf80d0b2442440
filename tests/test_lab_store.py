"""The store: what is read is what was written, whole, or it is said to be damaged."""

import json
import os
import subprocess
import sys
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab_cases import contents
from limpet.errors import LimpetError
from limpet.lab.store import Damaged, Store, _host

KEY = "ab" * 20
TENSORS = {"tokens": torch.arange(12, dtype=torch.int32).view(3, 4), "labels": torch.zeros(3, 4, dtype=torch.int32)}
ROWS = {"nfe": 8, "columns": {"nll:é": [1.5, None, 0.1]}}


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path)
    made.write(KEY, TENSORS, ROWS)
    return made


def test_a_unit_is_read_as_written(store):
    found = store.read(KEY)
    assert torch.equal(found.tensors["tokens"], TENSORS["tokens"])
    assert {name: found.rows[name] for name in ROWS} == ROWS
    assert store.read("cd" * 20) is None
    assert store.look(KEY)[0] is not None


def test_equal_results_are_equal_bytes(store, tmp_path):
    before = contents(tmp_path)
    store.write(KEY, dict(reversed(TENSORS.items())), dict(reversed(ROWS.items())))
    assert contents(tmp_path) == before
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
    with pytest.raises(Damaged):
        store.read(KEY)
    assert store.look(KEY)[0] is None


def test_rows_of_another_unit_are_not_believed(store, tmp_path):
    other = "cd" * 20
    store.write(other, TENSORS, ROWS)
    for name in ("rows.json", "tokens.safetensors"):
        os.replace(tmp_path / f"units/cd/{other}/{name}", tmp_path / f"units/ab/{KEY}/{name}")
    with pytest.raises(Damaged, match="seal"):
        store.read(KEY)


def test_a_unit_without_its_tokens_is_damaged_and_without_its_rows_is_none(store, tmp_path):
    (tmp_path / f"units/ab/{KEY}/tokens.safetensors").unlink()
    with pytest.raises(Damaged, match="gone"):
        store.read(KEY)
    (tmp_path / f"units/ab/{KEY}/rows.json").unlink()
    assert store.read(KEY) is None


def test_a_store_may_live_where_fsspec_reaches():
    store = Store(f"memory://{uuid.uuid4().hex}")
    store.write(KEY, TENSORS, ROWS)
    store.write_plan("study", {"cells": []})
    store.sweep()
    store.log({"nothing": "kept"})
    assert store.look(KEY)[0] is not None
    assert store.read_plan("study") == {"cells": []}
    with pytest.raises(LimpetError, match="holds no run of other: run the study first"):
        store.read_plan("other")


def test_what_dead_runners_left_is_swept_and_the_living_are_left_alone(store, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead, alive, far = (
        tmp_path / "partial" / f"{host}-{pid}-x" for host, pid in
        ((_host(), child.pid), (_host(), os.getpid()), ("elsewhere", child.pid))
    )  # fmt: skip
    for path in (dead, alive, far):
        path.write_text("half")
    store.sweep()
    assert not dead.exists()
    assert alive.exists()
    assert far.exists()


FULL = """
import resource, sys, torch
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from limpet.errors import LimpetError
from limpet.lab.store import Store
store = Store(sys.argv[1])
store.write("ab" * 20, {"tokens": torch.zeros(10, dtype=torch.int32)}, {})
try:
    store.write("cd" * 20, {"tokens": torch.zeros(10_000, dtype=torch.int32)}, {})
except LimpetError as error:
    print(error)
print(store.look("ab" * 20)[0] is not None, store.look("cd" * 20)[0] is not None)
"""


def test_a_full_disk_loses_nothing_and_is_said(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    said, kept = done.stdout.splitlines()
    assert "cannot be written" in said
    assert "every finished unit is kept" in said
    assert kept == "True False"
    assert not list(tmp_path.glob("partial/*"))


def test_a_store_that_cannot_be_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LimpetError, match="cannot be written"):
        Store(tmp_path / "file").write_plan("study", {})
    with pytest.raises(LimpetError, match="cannot be opened"):
        Store("nowhere://bucket")


def test_plans_are_plain_json(store, tmp_path):
    store.write_plan("study", {"b": 1, "a": "é"})
    assert json.loads((tmp_path / "plans/study.json").read_text()) == {"a": "é", "b": 1}
    (tmp_path / "plans/study.json").write_text("{")
    with pytest.raises(LimpetError, match="holds no run of study: run the study first"):
        store.read_plan("study")
