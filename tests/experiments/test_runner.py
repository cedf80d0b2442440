"""Runs: resumed, killed, in parts, in parallel or distributed, a study leaves the same bytes."""

import json
import math
import multiprocessing
import os
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from limpet.errors import LimpetError
from limpet.experiments import (
    Cell,
    JudgeSpec,
    ModelCache,
    Results,
    Store,
    Study,
    collect,
    executors,
    local,
    on_ray,
    processes,
    report,
    resolve,
    run,
    status,
    worker,
)
from limpet.experiments import units as units_module
from limpet.experiments.store import StoreWriteError
from limpet.experiments.worker import UnitEvent
from limpet.models.exact_sources import source
from study_cases import BASE, NATIVE, PROBE, Settings, no_report, result_files, small_study

FORK = multiprocessing.get_context("fork")  # a runner that starts at once, with this process's patches
UNITS = 14  # of the small study


def run_study(path, study=None, **options):
    models = ModelCache()
    return run(study or small_study(), Store(path), local(models=models), models, **options)


def keys_of(path, study):
    plan = Store(path).read_plan(units_module.plan_name(study))
    return {cell["name"]: cell["keys"] for cell in plan["cells"]}


def write_files(folder, files):
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The files of one undisturbed run."""
    path = tmp_path_factory.mktemp("undisturbed")
    summary = run_study(path)
    assert (summary.found, summary.computed, summary.failed) == (0, UNITS, {})
    return result_files(path)


# Finished units


def test_a_finished_study_is_read_once_and_not_computed_again(tmp_path, expected, monkeypatch):
    """Each file is read once before the work, and no worker reads it again."""
    run_study(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "units").rglob("*.*")}
    reads, read = Counter(), Store.content
    monkeypatch.setattr(Store, "content", lambda store, name: (reads.update([name]), read(store, name))[1])
    summary = run_study(tmp_path)
    assert (summary.found, summary.computed) == (UNITS, 0)
    unit_files = {name: count for name, count in reads.items() if name.startswith("units/")}
    assert len(unit_files) == 2 * UNITS
    assert set(unit_files.values()) == {1}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "units").rglob("*.*")} == times
    assert result_files(tmp_path) == expected


def test_a_resumed_run_reads_no_finished_unit_in_its_workers(tmp_path, expected, monkeypatch):
    """But for the source of a replay, of which the worker needs the memory."""
    write_files(tmp_path, expected)
    keys = keys_of(tmp_path, small_study())
    for key in (keys["native"][0], keys["second"][1]):
        (tmp_path / f"units/{key[:2]}/{key}/rows.json").unlink()
    reads, read = Counter(), Store.content
    monkeypatch.setattr(Store, "content", lambda store, name: (reads.update([name]), read(store, name))[1])
    assert run_study(tmp_path).computed == 2
    again = {name for name, count in reads.items() if count > 1 and name.startswith("units/")}
    assert {name.split("/")[2] for name in again} <= {keys["CRS"][1]}
    assert result_files(tmp_path) == expected


def test_samples_from_an_index_on_are_those_of_a_longer_run(tmp_path):
    """Samples 2 and 3 of a seed are the same alone and after the first two, and are a unit of their own."""
    cells = [Cell(name, "exact:words", BASE, n, first=first) for name, n, first in (("all", 4, 0), ("late", 2, 2))]
    again = Cell("again", "exact:words", BASE.replace(values="second"), 2, replay="late", first=2)
    study = Study("indices", "indices", (*cells, Cell("early", "exact:words", BASE, 2), again), (1,), no_report)
    assert not run_study(tmp_path, study).failed
    keys = {name: own[0] for name, own in keys_of(tmp_path, study).items()}
    tokens = {name: Store(tmp_path).read(key).tensors["tokens"] for name, key in keys.items()}
    assert torch.equal(tokens["late"], tokens["all"][2:])
    assert torch.equal(tokens["early"], tokens["all"][:2])
    assert len(set(keys.values())) == 4
    with pytest.raises(LimpetError, match="must agree on model, samples"):
        Study("indices", "indices", (cells[1], replace(again, first=0)), (1,), no_report)


def test_studies_share_their_units(tmp_path):
    run_study(tmp_path)
    assert run_study(tmp_path, small_study({"elsewhere": (NATIVE, None)}, name="other")).found == 2


@pytest.mark.parametrize("name", ["rows.json", "tokens.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_damaged_unit_is_reported_and_computed_again(tmp_path, expected, name, damage):
    write_files(tmp_path, expected)
    key = keys_of(tmp_path, small_study())["CRS"][1]  # which two other units replay
    path = tmp_path / f"units/{key[:2]}/{key}/{name}"
    raw = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        raw[len(raw) // 2] ^= 4
        path.write_bytes({"cut": bytes(raw[: len(raw) // 2]), "flip": bytes(raw), "empty": b""}[damage])
    found = status(Store(tmp_path), small_study())
    summary = run_study(tmp_path)
    assert (summary.found, summary.computed) == (UNITS - 1, 1)
    assert list(summary.damaged) == ([] if (name, damage) == ("rows.json", "gone") else ["CRS, seed 2"])
    assert (found["done"], found["damaged"]) == (UNITS - 1, summary.damaged)
    assert result_files(tmp_path) == expected


# Interrupted and parallel runs


def run_until_killed(path, writes):
    """A run that is killed by SIGKILL when it has written so many files, the next one half."""
    honest, left = Path.write_bytes, [writes]

    def write(file, data):
        if left[0] == 0:
            honest(file, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return honest(file, data)

    Path.write_bytes = write
    run_study(path)


def test_a_run_that_is_killed_again_and_again_leaves_the_same_files(tmp_path, expected):
    """In one store each run gets a little further; each is killed in another write."""
    for writes in (0, 1, 2, 3, 5, 8, 40):
        child = FORK.Process(target=run_until_killed, args=(tmp_path, writes))
        child.start()
        child.join()
        assert child.exitcode in (-signal.SIGKILL, 0)
    run_study(tmp_path)
    assert result_files(tmp_path) == expected


def test_four_runners_at_once_compute_each_unit_once(tmp_path, expected):
    barrier, results = FORK.Barrier(4), FORK.SimpleQueue()

    def runner():
        barrier.wait()
        summary = run_study(tmp_path)
        results.put((summary.computed, summary.found, summary.failed))

    runners = [FORK.Process(target=runner) for _ in range(4)]
    for one in runners:
        one.start()
    computed, found, failed = zip(*(results.get() for _ in runners), strict=True)
    for one in runners:
        one.join()
    assert sum(computed) == UNITS
    assert [a + b for a, b in zip(computed, found, strict=True)] == [UNITS] * 4
    assert failed == ({},) * 4
    assert result_files(tmp_path) == expected


def test_parts_are_disjoint_and_make_the_whole(tmp_path, expected):
    assert sum(run_study(tmp_path, part=(i, 3)).computed for i in (3, 1, 2)) == UNITS
    assert result_files(tmp_path) == expected
    with pytest.raises(LimpetError, match="i from 1 to n"):
        run_study(tmp_path, part=(4, 3))


def test_an_interrupted_run_is_resumed(tmp_path, expected):
    def interrupt(progress):
        if progress.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(tmp_path, on_progress=interrupt)
    assert status(Store(tmp_path), small_study())["done"] == 4
    with pytest.raises(LimpetError, match="10 units of small are missing"):
        collect(small_study(), Store(tmp_path))
    assert run_study(tmp_path).computed == 10
    assert result_files(tmp_path) == expected


def test_progress_is_reported(tmp_path):
    reported = []
    run_study(tmp_path, on_progress=reported.append)
    assert [progress.done for progress in reported] == list(range(UNITS + 1))
    assert {progress.total for progress in reported} == {UNITS}
    assert reported[-1].seconds_left == 0
    assert all(progress.seconds_left > 0 for progress in reported[1:-1])
    assert "seconds" in "".join(path.read_text() for path in (tmp_path / "log").glob("*.jsonl"))


def test_processes_leave_the_same_files_also_when_one_is_killed(tmp_path, expected):
    killed = []

    def kill(progress):
        if progress.done == 3 and not killed:
            victim = multiprocessing.active_children()[0]
            os.kill(victim.pid, signal.SIGKILL)
            killed.append(victim)

    executor = processes([None, None])
    summary = run(small_study(), Store(tmp_path), executor, ModelCache(), threads=1, on_progress=kill)
    assert killed
    assert summary.failed == {}
    assert result_files(tmp_path) == expected
    assert not multiprocessing.active_children()


# Failures


def test_a_failure_is_reported_and_the_rest_is_computed(tmp_path, monkeypatch):
    study = small_study({"native": (NATIVE, None), "CRS": (BASE, None)}, seeds=(1,))
    run_study(tmp_path / "well", study)
    honest, calls = worker.evaluate, []  # called without and with the judge for each unit

    def fails_once(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no memory left")
        return honest(*arguments, **options)

    monkeypatch.setattr(worker, "evaluate", fails_once)
    summary = run_study(tmp_path / "ill", study)
    assert summary.computed == 1
    assert list(summary.failed.values()) == ["RuntimeError: no memory left"]
    assert run_study(tmp_path / "ill", study).computed == 1
    assert result_files(tmp_path / "ill") == result_files(tmp_path / "well")


def test_an_impossible_sample_leaves_a_missing_value_with_its_reason(tmp_path, monkeypatch):
    """Its score is infinite: its seed has no value, nor has the mean, and the other seed keeps its own."""
    study = small_study({"native": (NATIVE, None)})
    run_study(tmp_path / "well", study)
    honest, first = worker.evaluate, keys_of(tmp_path / "well", study)["native"][0]
    tokens = Store(tmp_path / "well").read(first).tensors["tokens"].tolist()

    def with_infinite(samples, *arguments, **options):
        scores = honest(samples, *arguments, **options)
        if scores.judged and [rest for _, rest in samples.ids] == tokens:
            scores.judged[0].nll[0] = math.inf
        return scores

    monkeypatch.setattr(worker, "evaluate", with_infinite)
    run_study(tmp_path / "ill", study)
    well, ill = (collect(study, Store(tmp_path / name)) for name in ("well", "ill"))
    for results in (ill, Results.from_dict(study, json.loads(json.dumps(ill.to_dict(), allow_nan=False)))):
        for measure in ("nll", "ppl"):
            estimate = results("native", measure)
            assert math.isnan(estimate.mean)
            assert math.isnan(estimate.values[0])
            assert estimate.values[1] == well("native", measure).values[1]
            assert estimate.reasons == ("a sample is impossible under true distribution", None)
        assert results("native", "entropy").values.tolist() == well("native", "entropy").values.tolist()
    assert well("native", "nll").reasons == ()
    report.write_report(ill, tmp_path / "report")


def test_a_store_that_cannot_be_written_stops_the_run(tmp_path, monkeypatch):
    honest, written = Store.write, []

    def fills_up(store, key, *arguments):
        if len(written) == 5:
            raise StoreWriteError("the store cannot be written (No space left on device)")
        written.append(key)
        honest(store, key, *arguments)

    monkeypatch.setattr(Store, "write", fills_up)
    with pytest.raises(LimpetError, match="No space left"):
        run_study(tmp_path)
    monkeypatch.undo()
    assert status(Store(tmp_path), small_study())["done"] == 5
    assert run_study(tmp_path).found == 5


# Keys


def keys(study):
    return [unit.key for unit in resolve(study, ModelCache()).units]


def test_a_key_depends_on_everything_that_decides_a_result():
    """Any change of the study makes other units; another name of the cell does not."""
    one = {"a": (BASE, None)}
    studies = [
        small_study(one, seeds=(1,)),
        small_study(one, seeds=(2,)),
        small_study(one, seeds=(1,), n=4),
        small_study(one, seeds=(1,), metrics=("entropy",)),
        small_study({"a": (BASE.replace(spacing=3), None)}, seeds=(1,)),
        small_study({"a": (BASE.replace(budget=0.4), None)}, seeds=(1,)),
    ]
    found = [key for study in studies for key in keys(study)]
    assert len(set(found)) == len(found)
    assert keys(small_study({"other name": (BASE, None)}, seeds=(1,))) == found[:1]


def test_the_key_of_a_probe_depends_on_its_function_and_settings(tmp_path):
    """The content of its text counts, not its path; a unit knows how many seeds there are."""

    def probe_keys(probe, seeds=(1, 2)):
        return keys(Study("probe", "probe", (probe,), seeds, no_report))

    for folder, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text").write_text(text)
    texts = {folder: replace(PROBE, settings=Settings(text=str(tmp_path / folder / "text"))) for folder in "abc"}
    first = probe_keys(PROBE)
    assert probe_keys(replace(PROBE, name="other name")) == first
    others = [
        probe_keys(replace(PROBE, settings=Settings(draws=3))),
        probe_keys(replace(PROBE, models=PROBE.models[::-1])),
        probe_keys(replace(PROBE, function=no_report)),
        probe_keys(PROBE, (1, 2, 3)),
        probe_keys(PROBE, (2, 1)),
        probe_keys(texts["a"]),
        probe_keys(texts["c"]),
    ]
    assert len({key for some in (first, *others) for key in some}) == 2 * 8 + 1
    assert probe_keys(texts["a"]) == probe_keys(texts["b"])
    with pytest.raises(LimpetError, match="cannot be read"):
        probe_keys(replace(PROBE, settings=Settings(text=str(tmp_path / "none"))))


def test_studies_of_one_name_have_their_own_plans(tmp_path):
    studies = [small_study(), small_study(n=2), small_study({"native": (NATIVE, None)}), small_study(seeds=(1, 3))]
    for study in studies:
        run_study(tmp_path, study)
    for study in studies:
        assert status(Store(tmp_path), study)["done"] == len(study.cells) * 2
        found = collect(study, Store(tmp_path))
        assert found.provenance["samples per seed"] == [study.sample_cells[0].n]
        assert found.provenance["seeds"] == list(study.seeds)
    with pytest.raises(LimpetError, match="holds no run of small: run the study first"):
        collect(small_study(n=4), Store(tmp_path))


def test_the_values_of_probes_are_collected_over_seeds(tmp_path):
    study = small_study(seeds=(5, 6, 7))
    run_study(tmp_path, study)
    results = collect(study, Store(tmp_path))
    rows = results.rows()
    places = [
        ("exact:words", "mean token"),
        ("exact:chain", "mean token"),
        ("exact:words", "late"),
        ("exact:chain", "late"),
    ]
    assert [(row.model, row.quantity) for row in rows] == places
    words = source("exact:words")
    assert rows[0].estimate.values.tolist() == [float(words.draw(2, seed).double().mean()) for seed in (5, 6, 7)]
    assert (rows[0].unit, rows[0].events) == ("ids", 3 * 2 * words.length)
    assert list(rows[0].at) == ["t", "p"]  # in the probe's order
    assert (rows[2].events, len(rows[2].estimate.values)) == (None, 3)
    assert math.isnan(rows[2].estimate.mean)
    assert results.rows("probe") == rows
    assert results.find("mean token", "exact:chain", t=0.5) == rows[1:2]
    assert results.find("mean token", t=0.4) == []
    document = json.loads(json.dumps(results.to_dict(), allow_nan=False))
    again = Results.from_dict(study, document)
    assert again.to_dict() == document
    assert again("CRS", "ppl").values.tolist() == results("CRS", "ppl").values.tolist()


def test_an_impossible_study_is_refused():
    for match, create in {
        "there twice": lambda: small_study(seeds=(1, 1)),
        "no cell that selects": lambda: small_study({"a": (BASE, "b")}),
        "native cannot replay": lambda: small_study({"b": (BASE, None), "a": (NATIVE, "b")}),
        "must agree": lambda: small_study({"b": (BASE, None), "a": (BASE.replace(warmup=0.9), "b")}),
        "must agree on": lambda: small_study({"b": (BASE, None), "a": (BASE.replace(nfe=7), "b")}),
        "no metric": lambda: small_study(metrics=("beauty",)),
        "at least one": lambda: small_study(n=0),
        "which cell it replays": lambda: small_study({"a": (BASE.replace(values="recorded"), None)}),
        "needs a judge": lambda: keys(replace(small_study(), cells=(Cell("a", "mini", BASE, 1),))),
    }.items():
        with pytest.raises(LimpetError, match=match):
            create()


def test_the_convention_of_a_judge_is_settled_for_each_model_before_any_work():
    """Ids where model and judge have one tokenizer, else text; ids of another tokenizer are refused."""
    cells = Cell("own", "mini", NATIVE, 1), Cell("foreign", "exact:words", NATIVE, 1)

    def plan(convention):
        judges = (JudgeSpec("mini-judge", convention),)
        return resolve(Study("judged", "judged", cells, (1,), no_report, judges), ModelCache())

    found = plan("auto")
    assert [unit.facts["judges"][0]["convention"] for unit in found.units] == ["ids", "text"]
    assert [one["convention"] for one in found.document["judges"]] == ["ids", "text"]
    assert {"ids", "text"} <= set(found.document["conventions"])
    with pytest.raises(LimpetError, match="mini-judge cannot score exact:words by the convention 'ids'"):
        plan("ids")


# Ray


@pytest.mark.long
def test_a_ray_cluster_leaves_the_same_files_also_when_a_worker_is_killed(tmp_path):
    import ray

    study = small_study(seeds=tuple(range(1, 9)))
    run_study(tmp_path / "here", study)
    here = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}}  # of the probe's function
    ray.init(num_cpus=2, log_to_driver=False, runtime_env=here)
    killed = []

    def kill(progress):
        if progress.event is not None and not killed:
            pid = int(next((tmp_path / "ray/log").glob("*.jsonl")).stem.rpartition("-")[2])
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    try:
        executor = on_ray(workers=2)
        summary = run(study, Store(tmp_path / "ray"), executor, ModelCache(), threads=1, on_progress=kill)
    finally:
        ray.shutdown()
    assert killed
    assert summary.failed == {}
    assert result_files(tmp_path / "ray") == result_files(tmp_path / "here")


class Died(Exception):
    pass


class Unavailable(Died):
    pass


class FakeRay:
    """A Ray cluster of two nodes: the first dies over its first group, and returns or does not."""

    exceptions = SimpleNamespace(RayActorError=Died, ActorUnavailableError=Unavailable)

    def __init__(self, returns):
        self.returns, self.actors = returns, 0

    def cluster_resources(self):
        return {"CPU": 2}

    def remote(self, **options):
        return lambda kind: SimpleNamespace(remote=self.actor)

    def actor(self, config, device):
        self.actors += 1
        is_first, state = self.actors == 1, {"has died": False}

        def work_all(group):
            if is_first and not state["has died"]:
                state["has died"] = True
                return partial(self.die, Died)
            if is_first and not self.returns:
                return lambda: pytest.fail("a dead actor was given a group")
            return lambda: [UnitEvent(unit) for unit in group]

        ready = {True: lambda: None, False: self.never, None: partial(self.die, Died)}[self.returns]
        return SimpleNamespace(
            work_all=SimpleNamespace(remote=work_all), __ray_ready__=SimpleNamespace(remote=lambda: ready)
        )

    def die(self, error):
        raise error

    def never(self):
        raise AssertionError

    def wait(self, futures, num_returns):
        return [next(one for one in futures if one != self.never)], []

    def get(self, future):
        return future()


@pytest.mark.parametrize("returns", [True, False, None], ids=["returns", "pends", "is lost"])
def test_a_group_does_not_wait_for_a_dead_node(returns):
    groups = resolve(small_study(), ModelCache()).groups()
    events = list(executors._distribute(FakeRay(returns), None, groups, 2, None))
    assert sorted(event.unit.key for event in events) == sorted(unit.key for group in groups for unit in group)
    assert not [event for event in events if event.error]


def test_a_cluster_without_workers_is_an_error_for_each_unit():
    groups = resolve(small_study(), ModelCache()).groups()
    events = list(executors._distribute(FakeRay(None), None, groups, 1, None))
    assert {event.error for event in events} == {"no worker is left"}
    assert len(events) == sum(map(len, groups))


@pytest.mark.parametrize(
    ("address", "message"), [(None, "Ray could not be started"), ("far:1", "no Ray cluster answers at far:1")]
)
def test_a_ray_that_does_not_start_is_one_sentence(monkeypatch, address, message):
    def init(**options):
        raise ConnectionError("nobody")

    absent = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(executors, "import_extra", lambda module, name: absent)
    with pytest.raises(LimpetError, match=rf"^{message}.* \(nobody\): check --address"):
        next(on_ray(address)(None, []))
