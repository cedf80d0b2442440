"""A sampler and a model from outside the package, as a file and as an installed package, in every command.

The files are those of docs/write-a-sampler.md and docs/bring-a-model.md, extracted from the pages."""

from __future__ import annotations

import base64
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import limpet
from limpet import conformance, samplers
from limpet.cli import main
from limpet.evaluation.judges import load_judge
from limpet.generation import Samples
from limpet.recording.trajectory import Trajectory
from limpet.samplers import CRS, Native
from limpet.samplers.builtin import BUILTIN
from model_cases import features

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"write-a-sampler": "anneal.py", "bring-a-model": "bigram.py"}
PARAMS = {"nfe": 8, "cool": 0.3}


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.S | re.M)


@dataclass
class Name:
    """The names of the sampler and the model."""

    sampler: str  # for --sampler
    model: str  # for --model
    served: str  # of the sampler in the playground


@pytest.fixture(params=["a file", "a package"])
def name(request, here, package):
    for page, file in PAGES.items():
        (here / file).write_text(blocks(page, "python")[0])
    if request.param == "a file":
        return Name("./anneal.py:Anneal", "./bigram.py:Bigram", "Anneal")
    package(
        "[limpet.samplers]\nannealed = mypkg:Anneal\n[limpet.models]\nbigram = mymodel:Bigram\n",
        mypkg=(here / "anneal.py").read_text(),
        mymodel=(here / "bigram.py").read_text(),
    )
    (here / "anneal.py").unlink()
    (here / "bigram.py").unlink()
    return Name("annealed", "bigram", "annealed")


def run(*arguments: str, code: int = 0) -> None:
    assert main.main([str(argument) for argument in arguments]) == code


def printed(capsys, *arguments: str) -> str:
    capsys.readouterr()
    run(*arguments)
    return capsys.readouterr().out


def configured(name: Name) -> str:
    """The sampler with parameters, as a command line has it."""
    return f"{name.sampler} nfe=8 cool=.3"


@pytest.fixture
def playground(unserved):
    """A client of what `limpet serve` would have served."""
    from starlette.testclient import TestClient

    def serve(*arguments: str) -> TestClient:
        run("serve", *arguments)
        return TestClient(unserved[-1], base_url="http://localhost")

    return serve


# In Python


def test_a_sampler_in_python(name):
    kind = samplers.find(name.sampler)
    model = limpet.load("exact:words")
    out = limpet.sample(model, kind(**PARAMS), n=3, prompt="sand ")
    assert out.nfe == 8
    assert all(text.startswith("sand ") for text in out.texts)
    assert samplers.from_dict(out.sampler.to_dict()) == kind(**PARAMS)
    (changes,) = out.memory
    assert changes[:, 5:].float().mean() > 1
    assert not changes[:, :5].any()  # the prompt
    result = limpet.compare(model, {"native": Native(nfe=8), "mine": kind(**PARAMS)}, n=16)
    assert [one.nfe for one in result.samplers] == [8, 8]
    assert result.delta_nll(result.samplers[1]).mean < 0  # a lower temperature gives more probable text


def test_a_model_in_python(name):
    model = limpet.load(name.model)
    out = limpet.sample(model, CRS(nfe=8), n=2, prompt="the tide ")
    assert (out.model, out.nfe) == ("bigram", 8)
    assert all(text.startswith("the tide ") for text in out.texts)
    result = limpet.compare(model, {"native": Native(nfe=8), "CRS": CRS(nfe=8)}, n=4, judge=load_judge(device="cpu"))
    assert result.judge["convention"] == "text"  # its ids are not the judge's
    assert result.digest == model.digest


def test_its_prediction_is_the_bigrams(name):
    """Computed separately for the middle of three letters, from the pairs of its text and its noisy neighbours."""
    model = limpet.load(name.model)
    encode, pairs = model.tokenizer.encode, model.pairs.double()
    signal = float(model.schedule.signal(0.3))
    probs = model.logits(torch.tensor([encode("txe")]), 0.3)[0, 1].double().softmax(-1)
    channel = signal * torch.eye(27).double() + (1 - signal) / 27
    expected = torch.stack([
        sum(channel[encode("t")[0], a] * pairs[a, x] for a in range(27))
        * sum(pairs[x, b] / pairs[x].sum() * channel[encode("e")[0], b] for b in range(27)) for x in range(27)
    ])  # fmt: skip
    torch.testing.assert_close(probs, expected / expected.sum(), rtol=1e-4, atol=1e-6)


# In every command: the sampler on the model


def drawn(name: Name, **how: Any) -> Samples:
    return limpet.sample(limpet.load(name.model), samplers.find(name.sampler)(**PARAMS), **how)


def test_in_sample_and_compare(name, capsys):
    options, judged = ("--model", name.model, "--sampler", configured(name), "--json"), ("--judge", "mini-judge")
    row = json.loads(printed(capsys, "sample", *options, "--n", "1"))
    expected = drawn(name, n=1)
    assert (row["model"], row["digest"]) == ("bigram", expected.digest)
    assert (row["tokens"], row["text"]) == (expected.tokens[0].tolist(), expected.texts[0])
    result = json.loads(printed(capsys, "compare", *options, "--sampler", "mine: native nfe=8", "--n", "2", *judged))
    assert [one["sampler"]["nfe"] for one in result["samplers"]] == [8, 8]
    assert result["samplers"][0]["sampler"] == samplers.find(name.sampler)(**PARAMS).to_dict()
    assert (result["judge"]["name"], result["judge"]["convention"]) == ("mini-judge", "text")


@pytest.mark.parametrize("on", [("--on", "local"), ("--on", "processes", "--workers", "1")])
def test_in_a_study(name, on):
    Path("study.toml").write_text(
        f'models = ["{name.model}", "exact:words"]\nsamples = 2\nseeds = [1, 2]\njudges = ["mini-judge"]\n'
        f'[common]\nnfe = 8\n[samplers]\nnative = "native"\nmine = {{sampler = "{name.sampler}", cool = 0.3}}\n'
        f'other = "{name.sampler}"\n'
    )
    run("study", "run", "study.toml", *on)
    run("study", "report", "study.toml")
    (report,) = Path("limpet-reports").rglob("report.md")
    rows = {row.split("|")[1].strip(): row for row in report.read_text().splitlines() if row.count("|") > 3}
    for model in (name.model, "exact:words"):
        assert rows[f"{model}/mine"].split("|")[2:] != rows[f"{model}/other"].split("|")[2:]


def test_it_is_watched_recorded_and_viewed(name, capsys):
    own, two = ("--model", name.model, "--sampler", configured(name)), ("--sampler", "native nfe=8")
    assert drawn(name, n=1).texts[0].strip() in printed(capsys, "watch", *own)
    assert "native" in printed(capsys, "watch", *own, *two)
    run("sample", *own, "--n", "1", "--record", "mine.limpet")
    trajectory = Trajectory.load(Path("mine.limpet"))
    assert trajectory.frames[-1].tokens.tolist() == drawn(name, n=1).tokens[0].tolist()
    assert trajectory.header.digest == limpet.load(name.model).digest
    assert "restless" in trajectory.header.masks
    assert "restless" in printed(capsys, "watch", "mine.limpet")
    run("view", "mine.limpet", "--out", "page.html")
    page = Path("page.html").read_text()
    assert base64.b64encode(trajectory.to_bytes()).decode() in page
    assert "bigram" in page


def test_it_is_served(name, playground):
    options = ("--judge", "none", "--sampler", "native", "--sampler", name.sampler)
    client = playground("--models", name.model, "exact:words", *options)
    request = {"model": name.model, "sampler": {"sampler": name.served, **PARAMS}, "n": 2, "seed": 7, "prompt": "the "}
    rows = client.post("/api/sample", json={**request, "score": False}).json()["samples"]
    expected = drawn(name, n=2, seed=7, prompt="the ")
    assert [row["tokens"] for row in rows] == expected.tokens.tolist()
    assert client.get("/api/models").json()["models"][0]["digest"] == expected.digest
    document = client.get("/api/openapi.json").json()
    assert name.model in json.dumps(document)
    cool = document["components"]["schemas"][name.served]["properties"]["cool"]
    assert (cool["description"], cool["maximum"]) == ("Temperature of the last call.", 10)
    assert "Temperature of the last call." in client.get("/").text
    bad = client.post("/api/sample", json={"sampler": {"sampler": name.served, "cool": 11.0}})
    assert bad.status_code == 422
    assert "cool" in bad.json()["error"]


def test_it_is_checked_and_described(name, capsys):
    checks = printed(capsys, "check", name.model, "--sampler", "native", "--sampler", configured(name))
    assert checks.strip().splitlines()[-1].endswith(" checks, 0 failed")
    assert "restless" in checks
    described = json.loads(printed(capsys, "samplers", name.sampler, "--json"))
    assert [param["name"] for param in described[0]["parameters"]] == ["nfe", "warm", "cool"]
    listed = [one["name"] for one in json.loads(printed(capsys, "samplers", "--json"))]
    assert listed == [*BUILTIN] + (["annealed"] if name.sampler == "annealed" else [])
    about = json.loads(printed(capsys, "info", name.model, "--json"))
    assert (about["name"], about["vocab_size"], about["text"]) == ("bigram", 27, True)


# The pages


@pytest.mark.parametrize("page", PAGES)
def test_a_file_of_the_pages_is_short(page):
    assert len(blocks(page, "python")[0].splitlines()) < 40


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_line_of_the_pages_runs(page, here, monkeypatch, playground):
    file, *pieces = blocks(page, "python")
    (here / PAGES[page]).write_text(file)
    (here / "study.toml").write_text(blocks(page, "toml")[0])
    monkeypatch.syspath_prepend(here)
    commands = [shlex.split(line) for block in blocks(page, "sh") for line in block.splitlines()]
    assert {words[1] for words in commands} >= {"check", "sample", "compare", "watch", "view", "serve", "study"}
    for program, command, *arguments in commands:
        assert program == "limpet"
        playground(*arguments) if command == "serve" else run(command, *arguments)
    for piece in pieces:
        exec(compile(piece, page, "exec"), {})


def test_the_model_with_a_cache_keeps_the_contract(here, monkeypatch):
    """The first letter after the prompt is predicted by the bigram, at any level of noise."""
    (here / "bigram.py").write_text(blocks("bring-a-model", "python")[0])
    monkeypatch.syspath_prepend(here)
    exec(compile(blocks("bring-a-model", "python")[-1], "page", "exec"), namespace := {})
    model = namespace["Prompted"]()
    assert all(row.ok for row in conformance.model_rows(model))
    assert all(row.ok for row in conformance.sampler_rows(model, "crs"))
    encode = model.tokenizer.encode
    tokens = torch.tensor([encode("th")])
    values = features(model, tokens, 1.0, lambda: None, torch.tensor([[True, False]]))[0, 1]
    torch.testing.assert_close(values / values.sum(), model.pairs[encode("t")[0]] / model.pairs[encode("t")[0]].sum())


def test_every_command_of_the_page_of_samplers_runs(here, capsys):
    commands = [shlex.split(line) for block in blocks("samplers", "sh") for line in block.splitlines()]
    assert {words[1] for words in commands} == {"samplers", "compare", "sample", "watch"}
    for program, *command in commands:
        assert program == "limpet"
        assert printed(capsys, *command)


@pytest.mark.parametrize("page", PAGES)
def test_the_entry_points_of_the_pages_are_the_ones_that_are_read(page, here, package):
    """The last block of each page, with the page's file as the package's module."""
    (group, offered, target) = re.fullmatch(
        r'\[project\.entry-points\."(.*)"\]\n(\w+) = "(.*)"\n', blocks(page, "toml")[-1]
    ).groups()
    module = {f"my_package/{PAGES[page].removesuffix('.py')}": blocks(page, "python")[0]}
    package(f"[{group}]\n{offered} = {target}\n", **module)
    if page == "write-a-sampler":
        assert samplers.find(offered)(nfe=4).to_dict()["sampler"] == offered
        assert offered in samplers.available()
        return
    (here / "folder").mkdir()
    (here / "folder" / "config.json").write_text(json.dumps({"model_type": offered}))
    (here / "folder" / "text.txt").write_text("abababab")
    plain, read = limpet.load(offered), limpet.load("folder")
    assert (plain.name, read.name, read.info["source"]) == ("bigram", "folder", "folder")
    assert plain.digest != read.digest
    text = limpet.sample(read, Native(nfe=4, top_p=0.5, final_step="argmax"), n=1).texts[0]
    assert set(text) <= set("ab ")  # its first letter may be a space
