"""Runs of a tiny model: they learn, they resume bit for bit, they refuse what they do not know."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

from limpet.cli import train as command
from limpet.errors import LimpetError
from limpet.evaluation.judges import load_judge
from limpet.integrations import tensorboard
from limpet.models import duo, loading, tensor_files
from limpet.training import data, heldout, loop, recipe

CPU = torch.device("cpu")
LOGS = Path(__file__).parents[2] / "recipes" / "logs"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> data.Text:
    """A corpus of counting: easy to learn, and over in a moment."""
    folder = tmp_path_factory.mktemp("text")
    lines = [" ".join(str(i * k % 100) for i in range(1, 200)) for k in range(1, 60)]
    (folder / "counting.txt").write_text("\n\n".join(lines))
    list(data.prepare([folder / "counting.txt"], folder, 280, 0.1, 0.1))
    opened = data.open_text(folder, {})
    assert opened is not None
    return opened


def plan(kind: str = "duo", **changes: Any) -> recipe.Recipe:
    run = {
        "batch": 8,
        "rate": 3e-3,
        "warmup": 5,
        "steps": 12,
        "validate_every": 6,
        "validate_rows": 16,
        "save_every": 5,
    }
    text, run_table = recipe.Data([], "unused", vocab_size=280, length=32), recipe.Run(**{**run, **changes})
    if kind == "distil":
        taught = recipe.Distil("replaced", [0.01, 0.02, 0.04])
        return recipe.Recipe("tiny", "unused", "distil", text, run_table, seed=4, distil=taught)
    sizes = recipe.Sizes(width=32, blocks=2, heads=2, hidden=64, cond=16, dropout=0.1)
    return recipe.Recipe(
        "tiny", "unused", "causal" if kind == "causal" else "duo", text, run_table, seed=4, sizes=sizes
    )


def parameters(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in network.named_parameters()}


def test_a_run_learns_and_its_folder_loads(text: data.Text, tmp_path: Path) -> None:
    reports: list[loop.Progress] = []
    network = loop.train(plan(steps=60), text, tmp_path / "model", CPU, reports.append)
    assert reports[-1].step == 60
    assert reports[-1].fraction == 1
    held = [now.validation for now in reports if now.validation is not None]
    assert held[-1] < held[0] < math.log(280) + 0.1
    assert held[-1] < math.log(280) - 0.5
    loaded = loading.load(tmp_path / "model", device="cpu")
    for name, p in parameters(network).items():
        assert torch.equal(dict(loaded.network.named_parameters())[name], p)
    assert loaded.length == 32
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("1 2 3")) == "1 2 3"
    assert not (tmp_path / "model" / "checkpoint.safetensors").exists()


def test_a_judge_learns_and_loads(text: data.Text, tmp_path: Path) -> None:
    reports: list[loop.Progress] = []
    loop.train(plan("causal", steps=40), text, tmp_path / "judge", CPU, reports.append)
    assert reports[-1].validation is not None
    assert reports[-1].validation < math.log(280) - 0.5
    judge = load_judge(str(tmp_path / "judge"), device="cpu")
    rows = text.splits["validation"].rows(torch.arange(4), 32)
    nats = heldout.token_nats(judge.network, rows).double().sum(-1)  # type: ignore[attr-defined]
    assert [float(row.sum()) for row in judge.nll(rows.tolist())] == pytest.approx(nats.tolist(), rel=1e-5)


@pytest.fixture(scope="module")
def teacher(text: data.Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    loop.train(plan(), text, folder, CPU, lambda now: None)
    return folder


class Stopped(Exception):
    pass


@pytest.mark.parametrize("kind", ["duo", "causal", "distil"])
def test_a_stopped_run_resumes_bit_for_bit(kind: str, text: data.Text, teacher: Path, tmp_path: Path) -> None:
    chosen = plan(kind)
    if chosen.distil is not None:
        chosen = replace(chosen, distil=replace(chosen.distil, teacher=str(teacher)))
    whole = loop.train(chosen, text, tmp_path / "whole", CPU, lambda now: None)

    def stop(now: loop.Progress) -> None:
        if now.step == 6:  # one step after the checkpoint: that step is run again
            raise Stopped

    with pytest.raises(Stopped):
        loop.train(chosen, text, tmp_path / "parts", CPU, stop)
    assert (tmp_path / "parts" / "checkpoint.safetensors").exists()
    torch.manual_seed(999)  # the state outside must not matter
    parts = loop.train(chosen, text, tmp_path / "parts", CPU, lambda now: None)
    for name, p in parameters(whole).items():
        assert torch.equal(parameters(parts)[name], p), name
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()


def test_a_checkpoint_is_whole_and_its_own(text: data.Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = loop.Trainer(plan(), text, CPU)
    trainer.step()
    file = tmp_path / "checkpoint.safetensors"
    trainer.save(file)
    before = file.read_bytes()
    trainer.step()

    def fail(*arguments: Any, **named: Any) -> None:
        Path(arguments[1]).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(tensor_files, "save_file", fail)
    with pytest.raises(
        LimpetError, match=r"checkpoint.safetensors could not be written \(disk full\): free some space"
    ):
        trainer.save(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(LimpetError, match="another recipe"):
        loop.Trainer(plan(rate=1e-3), text, CPU).load(file)
    file.write_bytes(before[:1000])
    with pytest.raises(LimpetError, match="not a whole checkpoint"):
        loop.Trainer(plan(), text, CPU).load(file)


def test_each_epoch_shows_every_chunk_once() -> None:
    stream = data.Stream(torch.arange(1, 1001), bytes=0, end=0)
    per_epoch = stream.count(12, 9) // 8
    epochs = [
        torch.cat([stream.batch(12, 8, 1, epoch * per_epoch + step) for step in range(per_epoch)]) for epoch in range(2)
    ]
    for rows in epochs:
        assert rows[:, 1:-1].unique().numel() == per_epoch * 8 * 10  # no token twice
    assert sorted(epochs[0].tolist()) != sorted(epochs[1].tolist())  # cut at another offset
    with pytest.raises(LimpetError, match="do not fill"):
        stream.batch(12, 10**6, 1, 0)


def test_the_rate_rises_holds_and_falls() -> None:
    chosen = plan(warmup=10, steps=100, rate=1.0, decay=0.2)
    rates = [loop.rate_at(chosen, step, step / 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:81] == pytest.approx([1.0] * 72)
    assert rates[90] == pytest.approx(0.5)
    assert rates[100] == 0


def test_a_run_by_the_clock_ends_with_it(text: data.Text, tmp_path: Path) -> None:
    reports: list[loop.Progress] = []
    loop.train(plan(steps=0, seconds=0.5), text, tmp_path, CPU, reports.append)
    assert reports[-1].fraction == 1
    assert reports[-1].seconds >= 0.5
    assert reports[-1].rate == 0


def test_the_average_follows_the_weights(text: data.Text) -> None:
    trainer = loop.Trainer(plan(average=0.5), text, CPU)
    expected = parameters(trainer.network)
    for step in range(4):
        trainer.step()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = {
            name: decay * old + (1 - decay) * parameters(trainer.network)[name] for name, old in expected.items()
        }
    for name, p in parameters(trainer.average).items():
        torch.testing.assert_close(p, expected[name], rtol=1e-5, atol=1e-7)


def test_distillation_moves_its_teacher_at_each_round(text: data.Text, teacher: Path) -> None:
    chosen = plan("distil")
    assert chosen.distil is not None
    trainer = loop.Trainer(replace(chosen, distil=replace(chosen.distil, teacher=str(teacher))), text, CPU)
    task = trainer.distillation
    assert task is not None
    rounds = []
    for _ in range(12):
        student = parameters(trainer.network)
        loss = trainer.step()
        rounds.append(task.round)
        if len(rounds) == 1 or rounds[-1] != rounds[-2]:  # a round has just begun: the teacher is the student as it was
            for name, p in parameters(task.teacher).items():
                assert torch.equal(p, student[name])
        assert float(loss) >= 0
    assert rounds == [0] * 4 + [1] * 4 + [2] * 4


def test_held_out_bits_are_nats_over_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = data.Stream(torch.arange(1, 61), bytes=240, end=0)
    network = duo.DuoNetwork(duo.DuoShape(61, 12, 4, 1, 1, 4, 4))
    monkeypatch.setattr(heldout, "token_nats", lambda network, rows, *noisy, prompt: rows)
    found = heldout.held_out(network, stream)
    assert found.rows == 6
    assert found.nats == pytest.approx(sum(range(1, 61)) / 6 / 12)
    assert found.bits_per_byte == pytest.approx(sum(range(1, 61)) / math.log(2) / 240)
    monkeypatch.setattr(
        heldout, "shown", lambda network, rows, noise, prompt: (torch.rand(len(rows), 1, generator=noise),)
    )
    noisy = heldout.held_out(network, stream, draws=400)
    assert noisy.error == pytest.approx((1 / 12) ** 0.5 / (6 * 400) ** 0.5, rel=0.2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"colour": 1}, "recipe.toml, colour: the file has no field 'colour'"),
        (
            {"run": {"batch": 8, "rate": 1.0, "warmup": 1, "stepz": 3}},
            r"\[run\] stepz: run has no field 'stepz'; did you mean steps",
        ),
        ({"run": {"batch": 8, "rate": 1.0, "warmup": 1}}, "steps is 0 and seconds is 0.0: give exactly one"),
        ({"run": {"batch": 8, "rate": 1.0, "warmup": 1, "steps": 3, "seconds": 2.0}}, "give exactly one"),
        ({"run": {"batch": 0, "rate": 1.0, "warmup": 1, "steps": 3}}, "batch is 0; it takes a whole number from 1"),
        ({"run": {"batch": "8", "rate": 1.0, "warmup": 1, "steps": 3}}, "batch is '8'; it takes a whole number"),
        ({"run": {"batch": 8, "rate": 1.0, "warmup": 1, "steps": 3, "decay": 0}}, "a number above 0 to 1"),
        ({"run": {"batch": 8, "rate": 1.0, "warmup": 1, "steps": 3, "betas": [0.9]}}, "takes two numbers"),
        ({"run": {"batch": 8, "rate": 1.0, "warmup": 1, "steps": 3, "precision": "half"}}, "one of float32, bfloat16"),
        ({"run": {"rate": 1.0, "warmup": 1, "steps": 3}}, "it takes rate and warmup and batch"),
        ({"run": 3}, "run has 3; it takes rate and warmup and batch"),
        ({"kind": "distil"}, r"\[distil\] alone"),
        ({"distil": {"teacher": "x", "deltas": [0.1]}}, r"\[sizes\] alone"),
        ({"distil": {"teacher": "x", "deltas": [1.5]}}, "takes one or more in"),
        ({"sizes": {"width": 30, "blocks": 1, "heads": 4, "hidden": 8}}, "heads of even width"),
        ({"data": {"files": "a.txt", "folder": "b"}}, "takes a list, each a text"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    good: dict[str, Any] = {
        "name": "a",
        "kind": "duo",
        "folder": "b",
        "data": {"files": [], "folder": "c"},
        "run": {"batch": 8, "rate": 1.0, "warmup": 1, "steps": 3},
        "sizes": {"width": 32, "blocks": 1, "heads": 2, "hidden": 8},
    }
    file = tmp_path / "recipe.toml"
    written(file, good)
    recipe.read(file)
    written(file, {**good, **change})
    with pytest.raises(LimpetError, match=sentence) as caught:
        recipe.read(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def written(file: Path, fields: dict[str, Any]) -> None:
    """A TOML file, a line for each field: what JSON and TOML write alike, and a table in braces."""

    def inline(value: Any) -> str:
        if not isinstance(value, dict):
            return json.dumps(value)
        return "{" + ", ".join(f"{name} = {inline(one)}" for name, one in value.items()) + "}"

    file.write_text("".join(f"{name} = {inline(value)}\n" for name, value in fields.items()))


def test_a_recipe_file_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would leave no room for all of the sentence
    Path("bad.toml").write_text("name = ")
    with pytest.raises(LimpetError, match=r"bad\.toml is not TOML"):
        recipe.read("bad.toml")
    with pytest.raises(LimpetError, match=r"absent\.toml cannot be read .*: name a TOML file, or one of"):
        recipe.read("absent.toml")


@pytest.mark.parametrize("name", ["mini", "mini-distilled", "mini-judge"])
def test_the_built_in_models_came_from_their_recipes(name: str) -> None:
    chosen = recipe.read(name)
    assert chosen.name == name
    log = [json.loads(line) for line in (LOGS / f"{name}.jsonl").read_text().splitlines()]
    steps = [line for line in log if "step" in line]
    assert steps[-1]["fraction"] == 1
    assert steps[-1]["seconds"] == pytest.approx(chosen.run.seconds, abs=2)


def test_the_causal_network_sees_the_past_alone(text: data.Text) -> None:
    """Logits at i do not move with tokens after i."""
    network = loop.network_of(plan("causal")).eval()
    rows = text.splits["train"].rows(torch.arange(1), 32)
    changed = rows.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 280
    with torch.no_grad():
        moved = (network(rows) - network(changed)).abs().amax(-1)[0]
    assert float(moved[:20].max()) == 0
    assert float(moved[20:].min()) > 0


def test_the_command_goes_from_text_to_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the log beside the weights, and the same numbers in an event file that TensorBoard's own reader reads."""
    lines = [" ".join(str(i * k % 100) for i in range(1, 100)) for k in range(1, 60)]
    (tmp_path / "a.txt").write_text("\n\n".join(lines))
    (tmp_path / "tiny.toml").write_text(f"""
        name = "tiny"
        kind = "duo"
        folder = "{tmp_path}/model"
        [data]
        files = ["absent.txt"]
        folder = "{tmp_path}/data"
        vocab_size = 280
        length = 32
        [sizes]
        width = 32
        blocks = 1
        heads = 2
        hidden = 32
        [run]
        steps = 3
        batch = 4
        rate = 1e-3
        warmup = 1
    """)
    arguments = [str(tmp_path / "tiny.toml"), "--files", str(tmp_path / "a.txt"), "--device", "cpu", "--json"]
    tyro.cli(command.run, args=[*arguments, "--tensorboard", str(tmp_path / "events")])
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert loading.load(tmp_path / "model", device="cpu").vocab_size == 280
    (line,) = (tmp_path / "model" / "log.jsonl").read_text().splitlines()
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = events.EventAccumulator(str(tmp_path / "events")).Reload()
    assert set(reader.Tags()["scalars"]) == {f"train/{name}" for name in tensorboard.SCALARS}
    for name in tensorboard.SCALARS:
        (event,) = reader.Scalars(f"train/{name}")
        assert (event.step, event.value) == (3, pytest.approx(json.loads(line)[name]))
    with pytest.raises(LimpetError, match="holds a finished model"):
        tyro.cli(command.run, args=arguments)
