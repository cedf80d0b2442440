"""The benchmark measures what it says: calls, rows, turns, what does not fit; and its random model sharpens."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from limpet import speed
from limpet.commands import bench
from limpet.denoisers.duo import Duo, Shape
from limpet.errors import LimpetError
from limpet.steps import dense, lazy

SMALL = Shape(vocab_size=300, length=16, width=64, blocks=2, heads=2, hidden=64)


@pytest.fixture(scope="module")
def model() -> Duo:
    return Duo(speed.trained_like(SMALL), name="small")


def test_side_by_side_names_every_contender_and_counts_its_rows(model: Duo) -> None:
    costs = speed.side_by_side(model, model.network, nfe=6, batch=3, runs=1, with_released=True)
    assert list(costs) == ["bare", "native", "top-p .9", "CRS", "released native", "released top-p .9"]
    found = {name: cost.head_rows for name, cost in costs.items() if cost is not None}
    assert found["bare"] == found["released native"] == found["released top-p .9"] == 1
    assert found["native"] == found["top-p .9"] < found["CRS"] < 1
    for cost in costs.values():
        assert cost is not None
        assert cost.peak_gib is None
        assert cost.tokens_per_second == pytest.approx(3 * 16 / cost.seconds)
    assert costs["bare"] is not None
    assert costs["bare"].ratio == 1


def test_contenders_take_turns_call_by_call_after_a_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds are those of the long runs alone, each contender's own: here a call of b takes three ticks."""
    monkeypatch.setattr(speed, "WARM", 1)
    clock = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    made = ""

    def contender(name: str, ticks: float) -> speed.Calls:
        def calls(nfe: int) -> Iterator[float]:
            nonlocal made
            for number in range(nfe):
                made += name
                clock[0] += ticks
                yield number / 2

        return calls

    costs = speed.measure({"a": contender("a", 1), "b": contender("b", 3)}, 3, 10, 2, torch.device("cpu"))
    assert made == "ab" + "ababab" * 2
    assert [(cost.seconds, cost.ratios, cost.head_rows) for cost in costs.values() if cost] == [
        (3, (1, 1), 0.5),
        (9, (3, 3), 0.5),
    ]


def test_what_does_not_fit_is_none_and_the_others_are_timed() -> None:
    def large(nfe: int) -> Iterator[float]:
        yield 1.0
        raise torch.OutOfMemoryError

    costs = speed.measure({"a": lambda nfe: iter([1.0] * nfe), "b": large}, 8, 10, 2, torch.device("cpu"))
    assert costs["b"] is None
    assert costs["a"] is not None
    assert costs["a"].head_rows == 1


def test_bare_forwards_are_as_many_as_asked(model: Duo) -> None:
    made = []
    list(speed.forwards(model, lambda tokens, sigma: made.append(model.network(tokens, sigma).shape), batch=2)(5))
    assert made == [(2, 16, 300)] * 5


def test_random_laws_sharpen_as_noise_falls(model: Duo) -> None:
    tokens = torch.randint(300, (8, 16), generator=torch.Generator().manual_seed(0))
    largest, own = [], []
    for t in (1.0, 0.67, 0.33, 0.05):
        law = model.logits(tokens, t).softmax(-1)
        largest.append(float(law.amax(-1).mean()))
        own.append(float(law.gather(-1, tokens[..., None]).mean()))
    assert largest == sorted(largest)
    assert own == sorted(own)
    assert 1 - largest[-1] < (1 - largest[0]) / 10
    assert torch.equal(speed.trained_like(SMALL).vocab_embed.embedding, model.network.vocab_embed.embedding)


def test_the_table_of_the_documentation_is_the_committed_run() -> None:
    pytest.importorskip("matplotlib")
    root = Path(__file__).parents[1]
    found = json.loads((root / "benchmarks/results/h200.json").read_text(encoding="utf-8"))
    rows = list(runpy.run_path(str(root / "benchmarks/plot.py"))["table"](found))
    assert len(rows) > 40
    assert "\n".join(rows) in (root / "docs/speed.md").read_text(encoding="utf-8")


def test_arithmetic_times_every_backend() -> None:
    taken = speed.arithmetic({"dense": dense.advance, "lazy": lazy.advance}, (1, 8, 100), steps=3)
    assert set(taken) == {"dense", "lazy"}
    assert min(taken.values()) > 0


def test_the_command_prints_one_json_document(model: Duo, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(bench, "load", lambda name, **options: model)
    bench.run(model="small", nfe=(4,), batches=(1, 2), runs=1, device="cpu", precision="float32", json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["model"] == "small"
    assert [(row["batch"], row["what"]) for row in document["rows"]] == [
        (batch, what) for batch in (1, 2) for what in ("bare", "native", "top-p .9", "CRS")
    ]


def test_the_command_prints_a_table(model: Duo, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(bench, "load", lambda name, **options: model)
    bench.run(model="small", nfe=(4,), batches=(1,), runs=1, device="cpu", precision="float32", released=True)
    printed = capsys.readouterr().out
    for word in ("of bare", "head rows", "CRS", "released native"):
        assert word in printed


def test_the_command_says_what_is_wrong() -> None:
    with pytest.raises(LimpetError, match="runs is 0"):
        bench.run(runs=0)
    with pytest.raises(LimpetError, match="exact:words is no network"):
        bench.run(model="exact:words", device="cpu")
