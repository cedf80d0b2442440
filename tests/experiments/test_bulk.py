"""A million samples: killed, raced, grown, spread and on full disks, an order leaves the bytes of one quiet run."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import limpet
from limpet import CRS, Native
from limpet.cli.main import main
from limpet.errors import LimpetError
from limpet.experiments import ModelCache, Store, RunSummary, bulk
from limpet.experiments.bulk import Order
from limpet.experiments.executors import local
from limpet.experiments.executors.processes import processes
from limpet.experiments.executors.ray import on_ray

FORK = multiprocessing.get_context("fork")  # a runner that starts at once, so that kills fall into its work
QUICK = CRS(nfe=2)
ORDER = Order("exact:words", QUICK, 150, per_shard=32)  # four shards and a part of one


def make(path, order=ORDER, on_progress=lambda pace: None):
    models = ModelCache("cpu")
    return bulk.make(order, Store(path), local(models=models), models, on_progress=tell)


def result_files(folder):
    """Every file that the samples rest on, and anything left half-written."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.parent.name != "log"
    }


def rows(folder):
    return b"".join(path.read_bytes() for path in sorted(Path(folder).glob("shard-*.jsonl")))


def wrong(folder):
    return {shard.name: shard.wrong for shard in bulk.verify(Store(folder)) if shard.wrong}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """One undisturbed run."""
    folder = tmp_path_factory.mktemp("quiet")
    summary = make(folder)
    assert (summary.found, summary.computed, summary.failed, summary.damaged) == (0, 5, {}, {})
    return result_files(folder)


# The same rows


def test_the_rows_are_those_that_sample_gives(tmp_path, quiet):
    model = limpet.load("exact:words")
    assert b"".join(data for name, data in quiet.items() if name.endswith(".jsonl")) == bulk.json_lines(
        limpet.sample(model, QUICK, 150)
    )
    for i, (batch, shard) in enumerate([(1, 64), (7, 10), (150, 150), (None, 32)]):
        make(tmp_path / str(i), Order("exact:words", QUICK, 150, per_shard=shard, batch_size=batch))
        assert rows(tmp_path / str(i)) == b"".join(data for name, data in quiet.items() if name.startswith("shard"))


def test_a_batch_decides_no_byte(tmp_path, quiet):
    make(tmp_path, replace(ORDER, batch_size=5))
    assert result_files(tmp_path) == quiet


def test_processes_leave_the_same_bytes_also_when_one_is_killed(tmp_path, quiet):
    killed = []

    def kill(pace):
        if pace.event is not None and not killed:
            victim = multiprocessing.active_children()[0]
            os.kill(victim.pid, signal.SIGKILL)
            killed.append(victim)

    summary = bulk.make(ORDER, Store(tmp_path), processes(["cpu", "cpu"]), ModelCache("cpu"), threads=1, on_progress=kill)
    assert killed
    assert summary.failed == {}
    assert result_files(tmp_path) == quiet


@pytest.mark.long
def test_ray_leaves_the_same_bytes(tmp_path, quiet):
    bulk.make(ORDER, Store(tmp_path), on_ray(workers=2, device="cpu"), ModelCache("cpu"), threads=1)
    assert result_files(tmp_path) == quiet


def test_any_address_of_fsspec_will_do(quiet):
    store = Store(f"memory://{uuid.uuid4().hex}")
    bulk.make(ORDER, store, local("cpu", ModelCache("cpu")), ModelCache("cpu"))  # a worker opens the store by its address
    files = fsspec.filesystem("memory")
    root = store.path.removeprefix("memory:/")
    assert {name.removeprefix(root + "/"): files.cat_file(name) for name in files.find(root)} == quiet
    assert not [shard for shard in bulk.verify(store) if shard.wrong]


def test_parquet_holds_the_same_rows(tmp_path, quiet):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'limpet[parquet]'")
    order = replace(ORDER, format="parquet", fixed={3: "sand"}, prompts=("re", "win"), n=40)
    assert make(tmp_path / "a", order).failed == make(tmp_path / "b", replace(order, batch_size=3)).failed == {}
    assert result_files(tmp_path / "a") == result_files(tmp_path / "b")
    make(tmp_path / "c", replace(order, format="jsonl"))
    found = [row for path in sorted((tmp_path / "a").glob("*.parquet")) for row in parquet.read_table(path).to_pylist()]
    assert [{**row, "sampler": json.loads(row["sampler"])} for row in found] == [
        json.loads(line) for line in rows(tmp_path / "c").splitlines()
    ]


# After anything


def killed_and_resumed(folder, order, kills, seed):
    """Lives that end by SIGKILL at random moments, the last one left to its end; and the folder of a quiet run."""
    begun = time.monotonic()
    make(folder / "quiet", order)
    whole = time.monotonic() - begun
    moments, count, stores = random.Random(seed), 0, 1
    while count < kills:
        child = FORK.Process(target=make, args=(folder / str(stores), order))
        child.start()
        child.join(moments.uniform(0, 2.5 * whole / kills))
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            count += 1
        else:  # it got to the end: go on in a fresh folder
            stores += 1
        child.join()
    left = [len(list((folder / str(store)).glob("seals/*"))) for store in range(1, stores + 1)]
    for store in range(1, stores + 1):
        make(folder / str(store), order)
        assert result_files(folder / str(store)) == result_files(folder / "quiet")
        assert not wrong(folder / str(store))
    return left


def test_killed_five_times_over_two_thousand_samples_it_ends_the_same(tmp_path):
    assert max(killed_and_resumed(tmp_path, Order("exact:chain", QUICK, 2000), 5, seed=1)) > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "order", [Order("exact:chain", QUICK, 20_000), Order("mini", QUICK, 400, length=64)], ids=lambda order: order.model
)
def test_killed_twenty_times_at_random_moments_it_ends_the_same(tmp_path, order):
    assert max(killed_and_resumed(tmp_path, order, 20, seed=2)) > 0


def test_two_runners_at_once_leave_one_result(tmp_path, quiet):
    runners = [FORK.Process(target=make, args=(tmp_path,)) for _ in range(2)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
        assert runner.exitcode == 0
    assert result_files(tmp_path) == quiet


def test_what_another_runner_made_meanwhile_is_found_and_counted(tmp_path, quiet):
    told = []

    def tell(pace):
        if not told:
            make(tmp_path)
        told.append(pace)

    summary = make(tmp_path, on_progress=tell)
    assert (summary.found, summary.computed) == (5, 0)
    assert (told[-1].done, told[-1].total) == (150, 150)
    assert result_files(tmp_path) == quiet


class Tight(MemoryFileSystem):
    """A disk of a size that a test can change."""

    protocol = "tight"
    store: dict = {}  # noqa: RUF012  as its parent has one
    pseudo_dirs = [""]  # noqa: RUF012
    room = 0
    cachable = False

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if sum(file.size for file in self.store.values()) + len(value) > Tight.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().pipe_file(path, value, mode, **kwargs)


def test_a_full_disk_loses_nothing_and_a_larger_one_is_gone_on_with(quiet, monkeypatch):
    fsspec.register_implementation("tight", Tight, clobber=True)
    store, models = Store("tight://full"), ModelCache("cpu")
    monkeypatch.setattr(Tight, "room", sum(map(len, quiet.values())) // 2)
    with pytest.raises(LimpetError, match=r"No space left on device\): every finished unit is kept; make room or name"):
        bulk.make(ORDER, store, local(models=models), models)
    there = [shard.name for shard in bulk.verify(store) if not shard.wrong]
    assert 0 < len(there) < 5
    monkeypatch.setattr(Tight, "room", 10**9)
    assert bulk.make(ORDER, store, local(models=models), models).found == len(there)
    files = fsspec.filesystem("tight")
    root = files._strip_protocol("tight://full")
    assert {name.removeprefix(root + "/"): files.cat_file(name) for name in files.find(root)} == quiet


def test_a_full_folder_too(tmp_path, quiet, monkeypatch):
    honest, room = Path.write_bytes, [sum(map(len, quiet.values())) // 2]

    def fills_up(path, data):
        room[0] -= len(data)
        if room[0] < 0:
            honest(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(path, data)

    monkeypatch.setattr(Path, "write_bytes", fills_up)
    with pytest.raises(LimpetError, match="No space left on device"):
        make(tmp_path)
    monkeypatch.undo()
    there = 5 - len(wrong(tmp_path))
    assert 0 < there < 5
    assert make(tmp_path).found == there
    assert result_files(tmp_path) == quiet


@pytest.mark.parametrize("name", ["shard-000003.jsonl", "seals/shard-000003.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "gone", "another's"])
def test_a_damaged_shard_is_told_and_made_again(tmp_path, quiet, capsys, name, harm):
    for path, data in quiet.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    assert main(["sample", "--verify", str(tmp_path)]) == 0
    assert "150 samples in 5 of 5 shards are as they were written" in capsys.readouterr().out
    raw = bytearray(quiet[name])
    raw[len(raw) // 2] ^= 4
    bad = {"cut": quiet[name][:-9], "flip": bytes(raw), "another's": quiet[name.replace("3", "2")], "gone": b""}[harm]
    (tmp_path / name).write_bytes(bad)
    if harm == "gone":
        (tmp_path / name).unlink()
    assert main(["sample", "--verify", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert list(found["wrong"]) == ["shard-000003.jsonl"]
    assert (found["samples"], found["shards"]) == (118, 5)
    summary = make(tmp_path)
    assert (summary.found, summary.computed) == (4, 1)
    assert result_files(tmp_path) == quiet


def test_a_shard_that_fails_is_told_and_the_rest_is_made(tmp_path, quiet, monkeypatch):
    honest = bulk.sample

    def sick(*how, first):
        if first == 64:
            raise RuntimeError("no memory left")
        return honest(*how, first=first)

    monkeypatch.setattr(bulk, "sample", sick)
    summary = make(tmp_path)
    assert (summary.computed, summary.failed) == (4, {"shard 2": "RuntimeError: no memory left"})
    monkeypatch.undo()
    assert make(tmp_path).found == 4
    assert result_files(tmp_path) == quiet


# What is asked for


def test_more_samples_go_on_where_fewer_ended(tmp_path, quiet):
    make(tmp_path, replace(ORDER, n=70))
    summary = make(tmp_path, replace(ORDER, per_shard=None))
    assert (summary.found, summary.computed, summary.damaged) == (2, 3, {})
    assert result_files(tmp_path) == quiet
    prompted = replace(ORDER, prompts=("sand",), n=40)
    make(tmp_path / "prompted", prompted)
    assert make(tmp_path / "prompted", replace(prompted, n=70)).found == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "seed 8200, and not 1"),
        ({"sampler": CRS(nfe=2, budget=0.25)}, "budget 0.5, and not 0.25"),
        ({"sampler": Native(nfe=2)}, "sampler 'crs', and not 'native'"),
        ({"model": "exact:chain"}, "name 'exact:words', and not 'exact:chain'"),
        ({"n": 149}, "n 150, and not 149"),
        ({"per_shard": 16}, "per_shard 32, and not 16"),
        ({"fixed": {0: "a"}}, "other prompts or fixed words"),
        ({"prompts": ("sand",)}, "other prompts or fixed words"),
        ({"format": "parquet"}, "format 'jsonl', and not 'parquet'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_another_order_is_not_mixed_into_a_folder(tmp_path, quiet, change, words):
    for path, data in quiet.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    with pytest.raises(LimpetError) as caught:
        make(tmp_path, replace(ORDER, **change))
    assert f"was begun with {words}: ask for the same, or name another folder" in str(caught.value)
    assert result_files(tmp_path) == quiet


def test_what_cannot_be_ordered_is_a_sentence(tmp_path):
    for wrong, words in (
        ({"n": 0}, "n is 0; it takes one or more"),
        ({"per_shard": 0}, "per_shard is 0"),
        ({"format": "csv"}, "format is 'csv'; it takes jsonl or parquet"),
    ):
        with pytest.raises(LimpetError, match=words):
            replace(ORDER, **wrong)
    with pytest.raises(LimpetError, match="prompt 1 of 1 and what is fixed differ at position 3"):
        make(tmp_path, replace(ORDER, prompts=("wind",), fixed={3: "sand"}))
    with pytest.raises(LimpetError, match="prompt 2 of 2 has 200 tokens, the sequence 160"):
        make(tmp_path, replace(ORDER, prompts=("a", "b" * 200), n=1))
    with pytest.raises(LimpetError, match="seed is -1 and first 0"):
        make(tmp_path, replace(ORDER, seed=-1))
    assert not list(tmp_path.iterdir())
    with pytest.raises(LimpetError, match="holds no samples in shards"):
        list(bulk.verify(Store(tmp_path / "none")))


def test_shards_by_the_number_of_samples(tmp_path):
    models, store = ModelCache("cpu"), Store(tmp_path)
    for n, size in ((1, 32), (64, 32), (400, 32), (20_000, 256), (1_000_000, 1024)):
        draws, plan = bulk.resolve(Order("exact:words", QUICK, n), store, models)
        assert plan["per_shard"] == size
        assert sum(draw.n for draw in draws) == plan["samples"] == n
        assert [draw.first for draw in draws] == [*range(0, n, size)]


# The command


def call(*words):
    return ["sample", "--model", "exact:words", "--nfe", "2", "--device", "cpu", *map(str, words)]


def test_the_command_fills_a_folder_and_says_so(tmp_path, capsys, quiet):
    words = call("--n", 150, "--per-shard", 32, "--out", tmp_path / "samples")
    assert main(words) == 0
    assert "5 shards made, 0 found, in " in capsys.readouterr().err
    assert result_files(tmp_path / "samples") == quiet
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"made": 0, "found": 5, "damaged": {}, "failed": {}}


def test_a_run_without_a_terminal_says_how_far_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("limpet.cli.bulk.QUIET", 0.0)
    assert main(call("--n", 64, "--out", f"{tmp_path}/")) == 0
    assert "32 of 64 samples · " in capsys.readouterr().err


def test_a_million_is_not_for_a_file(tmp_path, capsys):
    for extra in (["--on", "processes"], ["--format", "parquet"], ["--per-shard", "8"]):
        assert main(call("--out", tmp_path / "a.jsonl", *extra)) == 2
        assert "are for shards in a folder" in capsys.readouterr().err
    assert main(call("--out", tmp_path / "samples", "--record", tmp_path / "a.limpet")) == 2
    assert "record writes one path" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_prompts_of_a_file_are_continued_each_n_times(tmp_path, capsys):
    (tmp_path / "p.txt").write_text("sand \n\nre\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "sand "}\n"re"\n')
    made = {}
    for name in ("p.txt", "p.jsonl"):
        assert main(call("--n", 3, "--prompts", tmp_path / name, "--json")) == 0
        made[name] = capsys.readouterr().out
    assert made["p.txt"] == made["p.jsonl"]
    assert main(call("--n", 3, "--prompts", tmp_path / "p.txt", "--out", tmp_path / "folder", "--per-shard", 4)) == 0
    assert rows(tmp_path / "folder").decode() == made["p.txt"]
    found = [json.loads(line) for line in made["p.txt"].splitlines()]
    assert [(row["sample"], row["prefix"], row["prefix_text"]) for row in found] == [
        *((i, 5, "sand ") for i in range(3)), *((i, 2, "re") for i in range(3, 6)),
    ]  # fmt: skip
    assert all(row["text"].startswith(row["prefix_text"]) for row in found)
    assert main(call("--prompt", "a", "--prompts", tmp_path / "p.txt")) == 2
    assert "both prompt and prompts" in capsys.readouterr().err


def test_a_folder_is_scored_like_a_file(tmp_path, capsys):
    for out in (tmp_path / "folder", tmp_path / "a.jsonl"):
        assert main(call("--n", 40, "--prompt", "sand ", "--out", out)) == 0
    capsys.readouterr()
    found = []
    for path in (tmp_path / "folder", tmp_path / "a.jsonl"):
        assert main(["score", str(path), "--judge", "exact:words", "--json"]) == 0
        (document,) = json.loads(capsys.readouterr().out)["files"]
        found.append({**document, "file": ""})
    assert found[0] == found[1]
    assert found[0]["samples"] == 40


def test_what_the_page_says_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/bulk.md").read_text("utf-8")
    first, *others = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    for line in first.splitlines():
        assert main(shlex.split(line)[2:]) == 0, line
    assert "200 samples in 7 of 7 shards" in capsys.readouterr().out
    (tmp_path / "prompts.jsonl").write_text('"The sea"\n')
    made = []
    monkeypatch.setattr(bulk, "make", lambda order, *rest, **how: made.append(order) or RunSummary())
    for line in "".join(others).splitlines():
        assert main([word.replace("s3:", "memory:") for word in shlex.split(line)[2:]]) == 0, line
    assert [(order.n, len(order.prompts), order.fixed) for order in made] == [
        (1_000_000, 0, {}), (1_000_000, 0, {}), (16, 1, {}), (1000, 0, {12: " sea", 20: " the sand"}),
    ]  # fmt: skip
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found = {}
    exec(compile(block, "docs/bulk.md", "exec"), found)
    assert (found["summary"].found, found["summary"].made) == (
        6,
        7,
    )  # of 200 made above, which end in a part of a shard


# On a bare machine

BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tyro", "rich", "scipy", "matplotlib", "fsspec", "pyarrow", "ray"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_benchmark_needs_nothing_but_torch(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "bulk.py"
    words = [
        "--model",
        "exact:chain",
        "--nfe",
        "2",
        "--n",
        "64",
        "--per-shard",
        "32",
        "--threads",
        "1",
        "--repeats",
        "1",
        "--device",
        "cpu",
    ]
    done = subprocess.run(
        [sys.executable, "-c", BARE, script, *words, "--out", tmp_path / "bulk.json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "bulk.json").read_text())
    assert found["ratio"] > 0
    assert found["same_rows"] is True


@pytest.mark.parametrize(("name", "least", "device"), [("bulk", 0.95, "cpu"), ("bulk-h200", 0.97, "NVIDIA H200")])
def test_bulk_sampling_keeps_the_rate_of_sampling(name, least, device):
    """As it was measured, by the clock and in processor seconds, which tell more where others use the machine too; the
    page on it says so."""
    root = Path(__file__).parents[2]
    found = json.loads((root / f"benchmarks/results/{name}.json").read_text())
    assert min(found["ratio"], found["work"]) >= least
    assert found["machine"]["device"].startswith(device)
    assert found["threads"] == (2 if device == "cpu" else 1)
    assert found["same_rows"] is True
    assert f"{found['ratio']:.3f} " in (root / "docs/bulk.md").read_text()
