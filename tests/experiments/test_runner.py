"""Running: resumed, killed, raced, split and spread, a study leaves the same bytes."""

import json
import math
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from study_cases import BASE, NATIVE, PROBE, Settings, result_files, no_report, small
from limpet.errors import LimpetError
from limpet.evaluation import scoring
from limpet.experiments import Cell, JudgeSpec, Results, ModelCache, Store, Study, collect, report, run, status, units
from limpet.experiments.executors import local
from limpet.experiments.executors import ray as places_ray
from limpet.experiments.executors.processes import processes
from limpet.experiments.executors.ray import on_ray
from limpet.experiments.store import StoreWriteError
from limpet.experiments.worker import UnitEvent
from limpet.models.exact_sources import source

FORK = multiprocessing.get_context("fork")  # a runner that starts at once, so that kills fall into its work


def work(path, made=None, **options):
    models = ModelCache()
    return run(made or small_study(), Store(path), local(models=models), models, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed")
    summary = work(path)
    assert (summary.found, summary.computed, summary.failed) == (0, 14, {})
    return result_files(path)


def test_a_finished_study_is_not_made_again(tmp_path, undisturbed):
    work(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "units").rglob("*.*")}
    summary = work(tmp_path)
    assert (summary.found, summary.computed) == (14, 0)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "units").rglob("*.*")} == times
    assert result_files(tmp_path) == undisturbed


def test_samples_from_an_index_on_are_those_of_a_longer_run(tmp_path):
    """Samples 2 and 3 of a seed come out the same alone and after the first two, and are a unit of their own."""
    cells = {
        name: Cell(name, "exact:words", BASE, n, first=first) for name, n, first in (("all", 4, 0), ("late", 2, 2))
    }
    early = Cell("warmup_calls", "exact:words", BASE, 2)
    made = Study("indices", "indices", (*cells.values(), early), (1,), no_report)
    work(tmp_path, made)
    store = Store(tmp_path)
    keys = {cell["name"]: cell["keys"][0] for cell in store.read_plan(units.plan_name(made))["cells"]}
    tokens = {name: store.read(key).tensors["tokens"] for name, key in keys.items()}
    assert torch.equal(tokens["late"], tokens["all"][2:])
    assert torch.equal(tokens["warmup_calls"], tokens["all"][:2])
    assert len(set(keys.values())) == 3
    replayed = Cell("second", "exact:words", BASE.replace(values="second"), 2, replay="late")
    with pytest.raises(LimpetError, match="must agree on model, samples"):
        Study("indices", "indices", (cells["late"], replayed), (1,), no_report)


def test_studies_share_their_units(tmp_path):
    work(tmp_path)
    native = small_study({"elsewhere": (NATIVE, None)}, name="other")
    assert work(tmp_path, native).found == 2


@pytest.mark.parametrize("name", ["rows.json", "tokens.safetensors"])
@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "gone"])
def test_a_damaged_unit_is_redone_and_said(tmp_path, undisturbed, name, harm):
    for path, data in undisturbed.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    plan = Store(tmp_path).read_plan(units.plan_name(small_study()))
    key = next(cell["keys"][1] for cell in plan["cells"] if cell["name"] == "CRS")  # which two others replay
    path = tmp_path / f"units/{key[:2]}/{key}/{name}"
    raw = bytearray(path.read_bytes())
    if harm == "gone":
        path.unlink()
    else:
        raw[len(raw) // 2] ^= 4
        path.write_bytes({"cut": bytes(raw[: len(raw) // 2]), "flip": bytes(raw), "empty": b""}[harm])
    summary = work(tmp_path)
    assert (summary.found, summary.computed) == (13, 1)
    assert list(summary.damaged) == ([] if (name, harm) == ("rows.json", "gone") else ["CRS, seed 2"])
    assert result_files(tmp_path) == undisturbed


def test_killed_ten_times_at_random_moments_it_ends_the_same(tmp_path, undisturbed):
    """Each life is a process killed with SIGKILL; the last run repairs what is left."""
    begun = time.monotonic()
    work(tmp_path / "timing")
    whole = time.monotonic() - begun
    moments, kills, stores = random.Random(7), 0, 1
    while kills < 10:
        path = tmp_path / str(stores)
        child = FORK.Process(target=work, args=(path,))
        child.start()
        child.join(moments.uniform(0.01, whole * 0.6))
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        else:  # it got to the end: go on in a fresh store
            stores += 1
        child.join()
    for store in range(1, stores + 1):
        work(tmp_path / str(store))
        assert result_files(tmp_path / str(store)) == undisturbed


def test_two_runners_at_once_leave_one_result(tmp_path, undisturbed):
    runners = [FORK.Process(target=work, args=(tmp_path,)) for _ in range(2)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
        assert runner.exitcode == 0
    assert result_files(tmp_path) == undisturbed


def test_parts_are_disjoint_and_make_the_whole(tmp_path, undisturbed):
    made = [work(tmp_path, part=(i, 3)).computed for i in (3, 1, 2)]
    assert sum(made) == 14
    assert result_files(tmp_path) == undisturbed
    with pytest.raises(LimpetError, match="i from 1 to n"):
        work(tmp_path, part=(4, 3))


def test_an_interrupt_leaves_a_store_to_go_on_from(tmp_path, undisturbed):
    def interrupt(progress):
        if progress.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(tmp_path, on_progress=interrupt)
    assert status(Store(tmp_path), small_study())["done"] == 4
    with pytest.raises(LimpetError, match="10 units of small are missing"):
        collect(small_study(), Store(tmp_path))
    assert work(tmp_path).computed == 10
    assert result_files(tmp_path) == undisturbed


def test_progress_is_told(tmp_path):
    told = []
    work(tmp_path, on_progress=told.append)
    assert [progress.done for progress in told] == list(range(15))
    assert {progress.total for progress in told} == {14}
    assert told[-1].left == 0
    assert all(progress.left > 0 for progress in told[1:-1])


def test_what_fails_is_said_and_the_rest_is_made(tmp_path, monkeypatch):
    honest = scoring.score

    def sick(judge, model, tokens, *rest):
        if not torch.equal(tokens, honest_native):
            raise RuntimeError("no memory left")
        return honest(judge, model, tokens, *rest)

    cells = {"native": (NATIVE, None), "CRS": (BASE, None)}
    work(tmp_path / "well", small_study(cells, seeds=(1,)))
    plan = Store(tmp_path / "well").read_plan(units.plan_name(small_study(cells, seeds=(1,))))
    honest_native = Store(tmp_path / "well").read(plan["cells"][0]["keys"][0]).tensors["tokens"].long()
    monkeypatch.setattr(scoring, "score", sick)
    summary = work(tmp_path / "sick", small_study(cells, seeds=(1,)))
    assert summary.computed == 1
    assert summary.failed == {"CRS, seed 1": "RuntimeError: no memory left"}
    monkeypatch.undo()
    assert work(tmp_path / "sick", small_study(cells, seeds=(1,))).computed == 1
    assert result_files(tmp_path / "sick") == result_files(tmp_path / "well")


def test_an_impossible_sample_leaves_a_missing_value_with_its_reason(tmp_path, monkeypatch):
    """Its score is infinite: no number of its shard, and none of the mean; the other shard keeps its own."""
    honest = scoring.score

    def scored(judge, model, tokens, *rest):
        scores = honest(judge, model, tokens, *rest)
        scores.nll[0] = math.inf if torch.equal(tokens, tokens_of_one) else scores.nll[0]
        return scores

    made = small_study({"native": (NATIVE, None)})
    work(tmp_path / "well", made)
    keys = Store(tmp_path / "well").read_plan(units.plan_name(made))["cells"][0]["keys"]
    tokens_of_one = Store(tmp_path / "well").read(keys[0]).tensors["tokens"].long()
    monkeypatch.setattr(scoring, "score", scored)
    work(tmp_path / "ill", made)
    well, ill = (collect(made, Store(tmp_path / name)) for name in ("well", "ill"))
    for results in (ill, Results.from_dict(made, json.loads(json.dumps(ill.to_dict(), allow_nan=False)))):
        for measure in ("nll", "ppl"):
            estimate = results("native", measure)
            assert math.isnan(estimate.mean)
            assert math.isnan(estimate.values[0])
            assert estimate.values[1] == well("native", measure).values[1]
            assert estimate.reasons == ("a sample is impossible under true distribution", None)
        assert results("native", "entropy").values.tolist() == well("native", "entropy").values.tolist()
    assert well("native", "nll").reasons == ()
    report.write_report(ill, tmp_path / "report")


def test_a_key_depends_on_everything_that_decides_a_result(tmp_path):
    """Any change of the study makes other units; another name for the cell does not."""
    one = {"a": (BASE, None)}
    first = small_study(one, seeds=(1,))
    changes = [
        small_study(one, seeds=(2,)),
        small_study(one, seeds=(1,), n=4),
        small_study(one, seeds=(1,), metrics=("entropy",)),
        small_study({"a": (BASE.replace(spacing=3), None)}, seeds=(1,)),
        small_study({"b": (BASE.replace(final_step="sample"), None), "a": (BASE.replace(budget=0.4), None)}, seeds=(1,)),
    ]
    keys = [unit.key for made in (first, *changes) for unit in _units(made)]
    assert len(set(keys)) == len(keys)
    assert [unit.key for unit in _units(small_study({"other name": (BASE, None)}, seeds=(1,)))] == keys[:1]


def test_a_probe_is_keyed_by_what_it_looks_at_and_how(tmp_path):
    """The content of its text counts, not where that stands; a shard knows how many there are."""

    def keys(probe, seeds=(1, 2)):
        return [unit.key for unit in _units(Study("probe", "probe", (probe,), shards, no_report))]

    for folder, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text").write_text(text)
    texts = {folder: replace(PROBE, settings=Settings(text=str(tmp_path / folder / "text"))) for folder in "abc"}
    first = keys(PROBE)
    assert keys(replace(PROBE, name="other name")) == first
    others = [
        keys(replace(PROBE, settings=Settings(paths=3))),
        keys(replace(PROBE, models=PROBE.models[::-1])),
        keys(replace(PROBE, function=no_report)),
        keys(PROBE, (1, 2, 3)),
        keys(PROBE, (2, 1)),
        keys(texts["a"]),
        keys(texts["c"]),
    ]
    assert len({key for some in (first, *others) for key in some}) == 2 * 8 + 1
    assert keys(texts["a"]) == keys(texts["b"])
    with pytest.raises(LimpetError, match="cannot be read"):
        keys(replace(PROBE, settings=Settings(text=str(tmp_path / "none"))))


def test_what_probes_saw_is_put_together_over_shards(tmp_path):
    made = small_study(seeds=(5, 6, 7))
    work(tmp_path, made)
    results = collect(made, Store(tmp_path))
    rows = results.rows()
    assert [(row.model, row.quantity) for row in rows] == [
        ("exact:words", "mean token"), ("exact:chain", "mean token"), ("exact:words", "late"), ("exact:chain", "late"),
    ]  # fmt: skip
    words = source("exact:words")
    expected = [float(words.draw(2, seed).double().mean()) for seed in (5, 6, 7)]
    assert rows[0].estimate.values.tolist() == expected
    assert (rows[0].unit, rows[0].events) == ("ids", 3 * 2 * words.length)
    assert list(rows[0].at) == ["t", "p"]  # as they were told
    assert (rows[2].events, len(rows[2].estimate.values)) == (None, 3)
    assert math.isnan(rows[2].estimate.mean)
    assert results.rows("look") == rows
    assert results.find("mean token", "exact:chain", t=0.5) == rows[1:2]
    assert results.find("mean token", t=0.4) == []
    document = json.loads(json.dumps(results.to_dict(), allow_nan=False))
    back = Results.from_dict(made, document)
    assert back.to_dict() == document
    assert back("CRS", "ppl").values.tolist() == results("CRS", "ppl").values.tolist()


def _units(made):
    return units.resolve(made, ModelCache()).units


def test_processes_make_the_same_store_also_when_one_is_killed(tmp_path, undisturbed):
    killed = []

    def kill(progress):
        if progress.done == 3 and not killed:
            victim = multiprocessing.active_children()[0]
            os.kill(victim.pid, signal.SIGKILL)
            killed.append(victim)

    summary = run(small_study(), Store(tmp_path), processes([None, None]), ModelCache(), threads=1, on_progress=kill)
    assert killed
    assert summary.failed == {}
    assert result_files(tmp_path) == undisturbed
    assert not multiprocessing.active_children()


@pytest.mark.long
def test_a_ray_cluster_makes_the_same_store_also_when_a_worker_is_killed(tmp_path):
    import ray

    made = small_study(seeds=tuple(range(1, 9)))
    work(tmp_path / "here", made)
    here = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}  # where the probe's function stands
    ray.init(num_cpus=2, log_to_driver=False, runtime_env=here)
    killed = []

    def kill(progress):
        if progress.event is not None and not killed:
            worker = int(next((tmp_path / "ray/log").glob("*.jsonl")).stem.rpartition("-")[2])
            os.kill(worker, signal.SIGKILL)
            killed.append(worker)

    try:
        summary = run(made, Store(tmp_path / "ray"), on_ray(workers=2), ModelCache(), threads=1, on_progress=kill)
    finally:
        ray.shutdown()
    assert killed
    assert summary.failed == {}
    assert result_files(tmp_path / "ray") == result_files(tmp_path / "here")


class Died(Exception):
    pass


class Unavailable(Died):
    pass


class Rays:
    """A Ray of two nodes, as far as a place needs one: the first dies over its first group, and comes back or not."""

    exceptions = SimpleNamespace(RayActorError=Died, ActorUnavailableError=Unavailable)

    def __init__(self, returns):
        self.returns, self.actors = returns, 0

    def cluster_resources(self):
        return {"CPU": 2}

    def remote(self, **options):
        return lambda kind: SimpleNamespace(remote=self.actor)

    def actor(self, job, device):
        self.actors += 1
        first, state = self.actors == 1, {"died": False}

        def worked(group):
            dies, state["died"] = first and not state["died"], True
            return (lambda: pytest.fail("handed to one that is gone")) if first and not dies and not self.returns else (
                partial(self.dies, Died) if dies else lambda: [UnitEvent(unit) for unit in group])  # fmt: skip

        def ready():
            return {True: lambda: None, False: self.never, None: partial(self.dies, Died)}[self.returns]

        return SimpleNamespace(worked=SimpleNamespace(remote=worked), __ray_ready__=SimpleNamespace(remote=ready))

    def dies(self, error):
        raise error

    def never(self):
        raise AssertionError

    def wait(self, futures, num_returns):
        return [next(one for one in futures if one != self.never)], []

    def get(self, future):
        return future()


@pytest.mark.parametrize("returns", [True, False, None], ids=["returns", "pends", "is lost"])
def test_a_group_does_not_wait_for_a_node_that_is_gone(returns):
    groups = units.resolve(small_study(), ModelCache()).groups()
    told = list(places_ray._hand_out(Rays(returns), None, groups, 2, None))
    assert sorted(event.unit.key for event in told) == sorted(unit.key for group in groups for unit in group)
    assert not [event for event in told if event.error]


def test_a_cluster_without_workers_says_so():
    groups = units.resolve(small_study(), ModelCache()).groups()
    told = list(places_ray._hand_out(Rays(None), None, groups, 1, None))
    assert {event.error for event in told} == {"no worker is left"}
    assert len(told) == sum(map(len, groups))


@pytest.mark.parametrize(("address", "said"), [(None, "Ray could not be started on this machine"),
                                              ("far:1", "no Ray cluster answers at far:1")])  # fmt: skip
def test_a_ray_that_is_not_there_is_a_sentence(monkeypatch, address, said):
    def init(**options):
        raise ConnectionError("nobody")

    absent = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(places_ray, "extra", lambda module, name: absent)
    with pytest.raises(LimpetError, match=rf"^{said} \(nobody\): check --address"):
        next(on_ray(address)(None, []))


def test_a_study_that_cannot_be_is_refused():
    with pytest.raises(LimpetError, match="there twice"):
        small_study(seeds=(1, 1))
    with pytest.raises(LimpetError, match="no cell that selects"):
        small_study({"a": (BASE, "b")})
    with pytest.raises(LimpetError, match="native replays nothing"):
        small_study({"b": (BASE, None), "a": (NATIVE, "b")})
    with pytest.raises(LimpetError, match="must agree"):
        small_study({"b": (BASE, None), "a": (BASE.replace(warmup=0.9), "b")})
    with pytest.raises(LimpetError, match="must agree"):
        small_study({"b": (BASE, None), "a": (BASE.replace(nfe=7), "b")})
    with pytest.raises(LimpetError, match="no metric"):
        small_study(metrics=("beauty",))
    with pytest.raises(LimpetError, match="at least one"):
        small_study(n=0)
    with pytest.raises(LimpetError, match="which cell it replays"):
        small_study({"a": (BASE.replace(values="recorded"), None)})
    unjudged = replace(small_study(), cells=(Cell("a", "mini", BASE, 1),))
    with pytest.raises(LimpetError, match="needs a judge"):
        units.resolve(unjudged, ModelCache())


def test_how_a_judge_reads_is_settled_for_each_model_before_any_work():
    """As ids where model and judge have one tokenizer, else as text; ids of another tokenizer are refused."""
    cells = Cell("own", "mini", NATIVE, 1), Cell("foreign", "exact:words", NATIVE, 1)

    def resolved(convention):
        judges = (JudgeSpec("mini-judge", convention),)
        return units.resolve(Study("judged", "judged", cells, (1,), no_report, judges), ModelCache())

    plan = resolved("auto")
    assert [unit.facts["judges"][0]["convention"] for unit in plan.units] == ["ids", "text"]
    assert [(one["name"], one["convention"]) for one in plan.document["judges"]] == [
        ("mini-judge", "ids"),
        ("mini-judge", "text"),
    ]
    assert {"ids", "text"} <= set(plan.document["conventions"])
    with pytest.raises(LimpetError, match="mini-judge cannot score exact:words by the convention 'ids'"):
        resolved("ids")


def test_a_store_that_takes_no_more_stops_the_run(tmp_path, monkeypatch):
    """A disk that fills up in the middle: what was made stays, no further group is begun, and the reason is said."""
    honest, written = Store.write, []

    def fills_up(store, key, *made):
        if len(written) == 5:
            raise StoreWriteError("the store cannot be written (No space left on device)")
        written.append(key)
        honest(store, key, *made)

    monkeypatch.setattr(Store, "write", fills_up)
    with pytest.raises(LimpetError, match="No space left"):
        work(tmp_path)
    monkeypatch.undo()
    assert status(Store(tmp_path), small_study())["done"] == 5
    assert work(tmp_path).found == 5


def test_studies_of_one_name_do_not_meet(tmp_path):
    """Two of them in one store, at once or one after the other, with other settings: each finds its own."""
    ones = [small_study(), small_study(n=2), small_study({"native": (NATIVE, None)}), small_study(seeds=(1, 3))]
    for made in ones:
        work(tmp_path, made)
    for made in ones:
        assert status(Store(tmp_path), made)["done"] == len(made.cells) * 2
        found = collect(made, Store(tmp_path))
        assert found.provenance["samples in a shard"] == [made.sample_cells[0].n]
        assert found.provenance["shards"] == list(made.seeds)
    with pytest.raises(LimpetError, match="holds no run of small: run the study first"):
        collect(small_study(n=4), Store(tmp_path))


def test_the_log_is_apart(tmp_path):
    work(tmp_path)
    assert list(Path(tmp_path / "log").glob("*.jsonl"))
    assert b"seconds" not in b"".join(result_files(tmp_path).values())
