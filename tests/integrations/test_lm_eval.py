"""lm-evaluation-harness's own evaluator and command line, on a task in a folder, without any hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import limpet
from gemma_cases import CANVAS, SEED, folder_of
from limpet import LimpetError
from limpet.generation import reply, split_text
from limpet.models.diffusion_gemma import Gemma

pytest.importorskip("lm_eval", minversion="0.4.13")
import lm_eval
from lm_eval.tasks import TaskManager

from limpet.integrations import lm_eval as ours

pytestmark = pytest.mark.usefixtures("offline")
QUESTIONS = ["The sea ", "One day ", "She said that the little old man by the river "]
SETTINGS = {"sampler": "mend nfe=6", "seed": 7, "length": 48}
TOKENS = 12


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Tasks whose right answer is what limpet.sample draws, for the first two of three questions."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    answers = [*expected(QUESTIONS)[:2], "wrong"]
    lines = [json.dumps({"question": q, "answer": a}) for q, a in zip(QUESTIONS, answers, strict=True)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    task = f"""
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {folder / "rows.jsonl"}}}}}
        test_split: test
        doc_to_text: "{{{{question}}}}"
        doc_to_target: "{{{{answer}}}}"
        target_delimiter: ""
    """
    generate = f"""
        task: tiny
        output_type: generate_until
        generation_kwargs: {{until: ["."], max_gen_toks: {TOKENS}}}
        metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
    """
    likelihood = """
        task: likely
        output_type: loglikelihood
        metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]
    """
    for name, own in (("tiny", generate), ("likely", likelihood)):
        (folder / f"{name}.yaml").write_text("\n".join(line.strip() for line in (task + own).splitlines()))
    return folder


def expected(questions: list[str]) -> list[str]:
    """The answers by limpet.sample, one at a time."""
    model, answers = limpet.load("mini", device="cpu"), []
    assert model.tokenizer is not None
    for number, question in enumerate(questions):
        ids = model.tokenizer.encode(question)
        out = limpet.sample(model, "mend nfe=6", n=1, seed=7, first=number, length=48, prompt=ids)
        kept = out.tokens[0, : len(ids) + TOKENS].tolist()
        answers.append(split_text(model.tokenizer.decode, kept, len(ids))[1].partition(".")[0])
    return answers


def test_the_harness_evaluates_a_limpet_model(tasks: Path) -> None:
    ours.register()
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    out = lm_eval.simple_evaluate(
        model="limpet", model_args={"pretrained": "mini", **SETTINGS}, tasks=["tiny"], task_manager=manager,
        bootstrap_iters=0, device="cpu",
    )  # fmt: skip
    assert out["results"]["tiny"]["exact_match,none"] == pytest.approx(2 / 3)
    answers = [one["filtered_resps"][0] for one in sorted(out["samples"]["tiny"], key=lambda one: one["doc_id"])]
    assert answers == expected(QUESTIONS)
    assert out["config"]["sampler"]["nfe"] == 6
    with pytest.raises(LimpetError, match="no exact likelihood: choose tasks of the type generate_until"):
        lm_eval.simple_evaluate(model="limpet", model_args={"pretrained": "mini"}, tasks=["likely"],
                                task_manager=manager, device="cpu")  # fmt: skip


@pytest.mark.long  # the harness reads the files of all its own tasks first
def test_the_command(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "--model": "limpet",
        "--model_args": "pretrained=mini,sampler=mend nfe=6,seed=7,length=48",
        "--tasks": "tiny",
        "--include_path": str(tasks),
        "--output_path": str(tmp_path / "out"),
        "--device": "cpu",
        "--batch_size": "2",
    }
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", *(word for pair in options.items() for word in pair)])
    ours.main()
    (file,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(file.read_text())["results"]["tiny"]["exact_match,none"] == pytest.approx(2 / 3)


def requests(*contexts: str, **settings: Any) -> list[Any]:
    return [SimpleNamespace(args=(context, settings)) for context in contexts]


def test_answers_stop_are_limited_and_leave_room() -> None:
    lm = ours.LimpetLM(**SETTINGS, device="cpu")
    (whole,) = lm.generate_until(requests("The sea ", until=[], max_gen_toks=12))
    (cut,) = lm.generate_until(requests("The sea ", until=[whole[3:6], whole[5:9]], max_gen_toks=12))
    assert cut == whole.partition(whole[3:6])[0]
    (one,) = lm.generate_until(requests("The sea ", until=whole[3:6], max_gen_toks=12))
    assert one == cut
    tokenizer = lm.denoiser.tokenizer
    assert tokenizer is not None
    long = "and so the king went on " * 30
    (answer,) = lm.generate_until(requests(long, until=[], max_gen_toks=12))
    assert 0 < len(tokenizer.encode(answer)) <= 13  # a text may be encoded in another way
    assert lm.generate_until(requests("", until=[], max_gen_toks=4))[0]
    with pytest.raises(LimpetError, match="no exact likelihood"):
        lm.loglikelihood_rolling([])


def test_a_canvas_model_answers_with_its_replies(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", 0.5)
    lm = ours.LimpetLM(str(folder), "crs nfe=5", seed=SEED, device="cpu")
    model = lm.denoiser
    assert isinstance(model, Gemma)
    assert model.tokenizer is not None
    answers = lm.generate_until(requests("Why?", "How?", until=[], max_gen_toks=CANVAS + 3))
    for number, (question, answer) in enumerate(zip(("Why?", "How?"), answers, strict=True)):
        tokens = reply(model, "crs nfe=5", 1, SEED, CANVAS + 3, question, first=number).tokens[0, : CANVAS + 3]
        kept = tokens[~torch.isin(tokens, torch.tensor([*model.ends, model.pad]))].tolist()
        assert answer == model.tokenizer.decode(kept)
