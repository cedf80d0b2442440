"""Every example of the README, of docs and of the commands' own help: all can be read, and all are run, on less than is
written, but those that a table names with the reason. (tests/test_outside.py runs those of write-a-sampler,
bring-a-model and samplers, and tests/test_schedulers.py that of diffusers, on a small model.)"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import tyro
from test_duo import random_network

import limpet
from examples import EVERY, FENCED, HERE, PAGES, PROGRAM
from limpet.cli import main, reproduce
from limpet.models.model_files import MINIS
from limpet.paper.studies import hidden
from limpet.recording import record
from test_files import lightning

OUTSIDE = {"write-a-sampler", "bring-a-model", "samplers", "diffusers"}
SMALLEST = {'"cuda", "bfloat16"': '"cpu"', "mini-gpu": "smoke"}  # what stands for what in a page's Python
SMALLER = {  # and in a command, in this order; for every other name, `checkout` holds a small thing
    r"--device cuda": "--device cpu",
    r"s3://bucket|/shared": "bucket",
    r"\$SLURM_ARRAY_TASK_ID": "3",
    r"--n (?:16|1000+)\b": "--n 2",
    r"--workers 8": "--workers 1",
    r"--host 0\.0\.0\.0": "--host 127.0.0.1",
    r"recipes/minis/mini\.toml": "recipes/small/duo.toml",
    r"^limpet sample (?!.*(?:nfe|--verify)).*": r"\g<0> --nfe 4",
    r"^limpet compare(?!.* (?:exact:|--n )).*": r"\g<0> --n 1 --shards 1 2",
    r"^limpet tune mini": "limpet tune exact:words",
    r"--entropy 4\.4": "--entropy 2.4",  # of words, not of mini
    r"^(limpet tune .*) --n 32": r"\1",
    r"late_top_p=\.9,\.8": "late_top_p=1,.9",
    r"^(limpet tune (?!.*--n ).*) --nfe 16": r"\1",
    r"^limpet tune (?!.*--n ).*": r"\g<0> --nfe 6 --n 4 --shards 2 --arms 4",
    r"^(limpet bench.*) --batches [\d ]*\d": r"\1",
    r"^(limpet bench.*) --nfe [\d ]*\d": r"\1",
    r"^limpet bench(?!.*--arithmetic).*": r"\g<0> --batches 1 --nfe 2 --runs 1",
    r"^python benchmarks/body.py .*": r"\g<0> --tiny",
    r"^python benchmarks/large.py --floor": r"\g<0> --tiny --out large.json",
    r"^python benchmarks/stopping.py .*": r"\g<0> --nfe 8 --n 1",
    r"^(limpet (?:study|audit) .*) --preset (?:paper|mini-gpu|mini)": r"\1",
    r"^limpet (?:study (?!list)|audit )(?!.*(?:\.toml|--preset)).*": r"\g<0> --preset smoke",
}

CLUSTER = "asks for a Ray cluster that runs; tests/test_cluster.py starts one"
HOURS = "hours, most of them on a GPU; the rehearsal runs the same studies in the same order"
HUB = "fetches from the hub"
INSTALLS = "installs packages, as tools/wheels.py does"
NOT_RUN = {
    "make demo": "installs packages, and runs `limpet compare --precision auto`",
    "make test": "installs packages, and runs these tests",
    "pip install 'limpet[lab,figures]'": INSTALLS,
    "pip install 'limpet[lab,judges,figures]'": INSTALLS,
    "hf download s-sahoo/duo-distilled model.safetensors config.json": HUB,
    "hf download openai-community/gpt2 tokenizer.json": HUB,
    "limpet sample --n 1000000 --out s3://bucket/million --on ray --address auto": CLUSTER,
    "limpet sample --n 16 --prompts prompts.jsonl --out s3://bucket/made --on ray": CLUSTER,
    "limpet study run all --preset paper --on ray --address auto": CLUSTER,
    "limpet study run all --preset paper --on ray --address auto --store s3://bucket/store": CLUSTER,
    'srun ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" -- '
    "limpet study run all --preset paper --on ray --address auto --store /shared/store": CLUSTER,
    "limpet reproduce --prompts openwebtext-prompts.txt": HOURS,
    "limpet reproduce --prompts openwebtext-prompts.txt --on processes": HOURS,
    "limpet reproduce --preset mini-gpu --precision bfloat16": HOURS,
    "python benchmarks/gpu.py --out benchmarks/results/h200.json --batches 64 16 1 256": "asks for a GPU",
    "python benchmarks/gpu.py --out benchmarks/results/h200.json --samplers --batches 64": "asks for a GPU",
    """curl -H 'Content-Type: application/json' -d '{"arm": {"sampler": "crs", "nfe": 16}, "n": 2}' """
    "http://127.0.0.1:8787/api/sample": "asks a playground that runs; tests/test_server.py does",
}


@pytest.mark.parametrize("where", [where for where, lines in EVERY.items() if lines])
def test_every_command_can_be_read(where):
    for line in EVERY[where]:
        if PROGRAM.match(line)[1] != "limpet":
            continue
        name, *arguments = shlex.split(line.partition("limpet ")[2].partition(" > ")[0])
        command = import_module(f"limpet.cli.{name}").run
        told = functools.wraps(command)(lambda *given, **named: (given, named))
        try:
            tyro.cli(told, args=arguments)
        except SystemExit as error:
            raise AssertionError(f"{where}: {line}") from error


def test_there_are_examples_of_every_command():
    lines = [line for lines in EVERY.values() for line in lines]
    assert {found[1] for line in lines if (found := re.search(r"\blimpet (\w+)", line))} >= set(main.COMMANDS)
    assert len(lines) > 100


def test_what_is_not_run_stands_somewhere_and_is_little():
    lines = [line for where, lines in EVERY.items() for line in lines if where not in OUTSIDE]
    assert set(NOT_RUN) <= set(lines)
    assert len(NOT_RUN) < 0.2 * len(set(lines))


@pytest.fixture
def checkout(here):
    """A folder that looks like a clone's root to a command and is written to alone, with a small thing for every name
    of the examples."""
    for name in ("recipes", "src", "tools"):
        (here / name).symlink_to(HERE / name)
    for name in ("docs", "benchmarks"):
        shutil.copytree(HERE / name, here / name)
    reproduce.stand_ins(here)
    gemma_cases = pytest.importorskip("gemma_cases")
    (here / "google").mkdir()
    gemma_cases.folder_of(here / "google/diffusiongemma-26B-A4B-it")
    for name in ("runs/duo", "path/to/folder"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).symlink_to(MINIS / "mini")
    lightning(random_network(), here / "runs/duo.ckpt")
    final_step = here / "docs/reports/mini/readout.toml"
    final_step.write_text(final_step.read_text().replace("samples = 256", "samples = 1").replace("nfe = 64", "nfe = 2"))
    shutil.copy(HERE / "recipes/small/duo.toml", here / "recipe.toml")
    (here / "stories.txt").write_text("A limpet holds its place on the rock.\nThe sea goes out, and comes in again.\n")
    shutil.copy(MINIS / "heldout.txt.xz", here / "stories.txt.xz")
    (here / "prompts.jsonl").write_text('{"prompt": "The sea"}\n')
    (here / "mine.py").write_text("import limpet\n\n\nclass Mine(limpet.Native):\n    pass\n")
    (here / "my.py").write_text(
        "import limpet\n\n\ndef factory(folder=None, *, device=None, precision=None):\n"
        '    return limpet.load("exact:words")\n'
    )
    (here / "tuned.toml").write_text('arm = "mend nfe=16"\n')
    (here / "my-study.toml").write_text(
        'model = "exact:words"\nshards = [1, 2]\nsamples = 2\n[arms]\nnative = "native nfe=2"\nCRS = "crs nfe=2"\n'
    )
    for name in ("native", "crs", "words", "samples"):
        arm = limpet.CRS(nfe=4) if name == "crs" else limpet.Native(nfe=4)
        limpet.sample(limpet.load("exact:words"), arm, n=2).save(here / f"{name}.jsonl")
        record(limpet.load("exact:words"), arm).save(here / f"{name}.limpet")
    return here


def smaller(line: str) -> str:
    """A command as it is run: the same on less."""
    return functools.reduce(lambda line, rule: re.sub(*rule, line), SMALLER.items(), line)


def to_run() -> dict[str, list[str]]:
    """By page in its order, what is run; of a command's help, what stands on no page."""
    paged = {line for page in PAGES for line in EVERY[page.stem]}
    kept = {
        where: [line for line in lines if line not in NOT_RUN and (line not in paged or not where.startswith("help"))]
        for where, lines in EVERY.items() if where not in OUTSIDE
    }  # fmt: skip
    return {where: lines for where, lines in kept.items() if lines}


@pytest.mark.long
@pytest.mark.parametrize("where", to_run())
def test_the_commands_run(where, checkout, unserved, capsys):
    for line in to_run()[where]:
        call, _, file = line.partition(" > ")
        call = smaller(call.removeprefix("HF_HUB_OFFLINE=1 "))
        program, *words = shlex.split(call)
        if program == "limpet":
            assert main.main(words) == 0, call
        else:
            assert program == "python", call
            subprocess.run([sys.executable, *words], check=True)
        if file:
            Path(file).write_text(capsys.readouterr().out)
        capsys.readouterr()


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in OUTSIDE], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, checkout, monkeypatch):
    """In the order of the page, at the smallest size."""
    monkeypatch.setitem(hidden.PRESETS, "mini", replace(hidden.PRESETS["smoke"], name="mini"))
    space = {"limpet": limpet}
    for kind, block in FENCED.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            for words, small in SMALLEST.items():
                block = block.replace(words, small)
            exec(compile(block, page.name, "exec"), space)


def test_links_of_the_pages_lead_somewhere():
    for page in (*PAGES, HERE / "CHANGELOG.md"):
        for link in re.findall(r"\]\((?!\w+:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_page_of_times_is_what_was_measured():
    spec = importlib.util.spec_from_file_location("times", HERE / "tools/times.py")
    times = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(times)
    kept = json.loads(times.KEPT.read_text())
    assert list(kept["seconds"]) == times.COMMANDS
    assert times.PAGE.read_text() == times.page(kept, kept["seconds"])
    named = {shlex.split(line)[1] for line in times.COMMANDS}
    assert named == {*main.COMMANDS, "--help"} - {"serve", "reproduce"}


def test_the_guide_to_training_names_every_field():
    from dataclasses import fields

    from limpet.training import recipe

    text = (HERE / "docs/train.md").read_text()
    for table, kind in (("data", recipe.Data), ("sizes", recipe.Sizes), ("run", recipe.Run), ("distil", recipe.Distil)):
        for one in fields(kind):
            assert f"`{table}.{one.name}`" in text, one.name
    for one in fields(recipe.Recipe):
        assert f"`{one.name}`" in text or f"`[{one.name}]`" in text, one.name
