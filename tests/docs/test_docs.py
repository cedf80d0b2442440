"""Every example of the README, of docs and of the commands' help can be read, and runs on less than is written.

NOT_RUN names the examples that do not run here, with the reason. tests/models/test_outside.py runs those of
write-a-sampler, bring-a-model and samplers; tests/integrations/test_schedulers.py runs those of diffusers;
tests/server/test_openai.py runs those of serve."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
import tyro

import limpet
import reference
import times
import trajectory_picture
from examples import BY_PAGE, COMMANDS, FENCED, PAGES, PROGRAM, ROOT, saved
from limpet.cli import main
from limpet.cli.paper import reproduce
from limpet.cli.parsing import with_config
from limpet.models.model_files import BUILTIN_FOLDER, copy_builtin
from limpet.paper.studies import hidden
from limpet.recording import record
from limpet.samplers.builtin import BUILTIN
from limpet.training import recipe
from model_cases import lightning, random_network

ELSEWHERE = {"write-a-sampler", "bring-a-model", "samplers", "diffusers", "serve"}  # see above
RESEARCH = {"frontier", "truth", "reproduce", "audits", "theory", "speed", "cache"}
SMALLER_PYTHON = {  # in a page's Python: what -> its replacement
    '"cuda", "bfloat16"': '"cpu"',
    "mini-gpu": "smoke",
    "range(2000)": "range(2)",
}
SMALLER = {  # in a command, in this order; for every other name the checkout holds something small
    r"^HF_HUB_OFFLINE=1 ": "",
    r"--device cuda": "--device cpu",
    r"s3://bucket|/shared": "bucket",
    r"\$SLURM_ARRAY_TASK_ID": "3",
    r"--n (?:16|\d000+)\b": "--n 2",
    r"--workers 8": "--workers 1",
    r"--host 0\.0\.0\.0": "--host 127.0.0.1",
    r"^limpet train mini\b": "limpet train small",
    r"^limpet sample (?!.*nfe).*": r"\g<0> --nfe 4",
    r"^limpet bulk (?!.*(?:nfe|--verify)).*": r"\g<0> --nfe 4",
    r"^(limpet bulk (?!.*--(?:n|verify)\b).*)": r"\1 --n 2",
    r"^limpet (?:tune|bulk(?!.*--verify)|sample .*--(?:out|record)).*": r"\g<0> --force",
    r"^limpet compare(?!.* (?:exact:|--n )).*": r"\g<0> --n 1 --seeds 1 2",
    r"^limpet tune mini": "limpet tune exact:words",
    r"^limpet tune sudoku.*": "limpet tune exact:grammar --nfe 4 --n 2 --n-seeds 2",
    r"--entropy 4\.4": "--entropy 2.4",  # of words, not of mini
    r"^(limpet tune .*) --n 32": r"\1",
    r"late_top_p=\.9,\.8": "late_top_p=1,.9",
    r"^(limpet tune (?!.*--n ).*) --nfe 16": r"\1",
    r"^limpet tune (?!.*--n ).*": r"\g<0> --nfe 6 --n 4 --n-seeds 2 --candidates 4",
    r"^(limpet bench.*) --batches [\d ]*\d": r"\1",
    r"^(limpet bench.*) --nfe [\d ]*\d": r"\1",
    r"^limpet bench(?!.*--arithmetic).*": r"\g<0> --batches 1 --nfe 2 --runs 1",
    r"^python benchmarks/body.py .*": r"\g<0> --tiny",
    r"^python benchmarks/large.py --floor": r"\g<0> --tiny --out large.json",
    r"^python benchmarks/stopping.py .*": r"\g<0> --nfe 8 --n 1",
    r"^(limpet paper (?:study|audit) .*) --preset (?:paper|mini-gpu|mini-cpu|mini)": r"\1",
    r"^limpet paper (?:study (?!list)|audit )(?!.*--preset).*": r"\g<0> --preset smoke",
}

CLUSTER = "needs a Ray cluster; tests/experiments/test_cluster.py starts one"
HOURS = "hours, most of them on a GPU; the rehearsal runs the same studies in the same order"
HUB = "fetches from the hub"
JUDGE = "fetches a judge from the hub; its other options run on other pages"
INSTALLS = "installs packages, as tools/wheels.py does"
GPU = "needs a GPU"
NOT_RUN = {  # pattern of a command -> why it does not run here
    r"make (demo|test)": INSTALLS,
    r"pip install ": INSTALLS,
    r"hf download ": HUB,
    r"limpet compare .*--judge gpt2-large": JUDGE,
    r"(limpet|srun) .*--on ray": CLUSTER,
    r"limpet paper reproduce (?!--rehearse|.*--from)": HOURS,
    r"python benchmarks/(gpu|pareto)\.py": GPU,
    r"python benchmarks/dial\.py": "an hour on one core",
    r"curl ": "needs a running playground; tests/server has them",
}


@pytest.mark.parametrize("page", [page for page, commands in BY_PAGE.items() if commands])
def test_every_command_can_be_read(page, monkeypatch):
    monkeypatch.chdir(ROOT)  # for the files of options that examples name
    for line in BY_PAGE[page]:
        if PROGRAM.match(line)[1] != "limpet":
            continue
        name, *arguments = shlex.split(line.partition("limpet ")[2].partition(" > ")[0])
        if name == "paper":
            name, *arguments = f"paper.{arguments[0]}", *arguments[1:]
        function = import_module(f"limpet.cli.{name}").run
        reader = functools.wraps(function)(lambda *args, **options: (args, options))
        try:
            tyro.cli(reader, args=with_config(arguments, get_type_hints(function, include_extras=True)))
        except SystemExit as error:
            raise AssertionError(f"{page}: {line}") from error


def test_there_are_examples_of_every_command():
    lines = [line for commands in BY_PAGE.values() for line in commands]
    assert {found[1] for line in lines if (found := re.search(r"\blimpet (paper \w+|\w+)", line))} >= set(COMMANDS)
    assert len(lines) > 100


def skipped(line: str) -> str | None:
    """Why a command does not run here."""
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, line)), None)


def test_few_examples_do_not_run_and_each_reason_is_needed():
    lines = {line for page, commands in BY_PAGE.items() for line in commands if page not in ELSEWHERE}
    assert sum(skipped(line) is not None for line in lines) < 0.25 * len(lines)
    assert all(any(re.match(pattern, line) for line in lines) for pattern in NOT_RUN)


LETTERS = "abcdefghijklmnopqrstuvwxyz.,"
WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "the"]


def tiny_bert(folder: Path) -> None:
    """A BERT with random weights and few word pieces, as on the hub."""
    transformers = pytest.importorskip("transformers")
    vocabulary = folder.parent / "vocab.txt"
    folder.mkdir(parents=True)
    vocabulary.write_text("\n".join(WORD_PIECES))
    transformers.BertTokenizer(str(vocabulary)).save_pretrained(folder)
    torch.manual_seed(0)
    transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=len(WORD_PIECES), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64)).save_pretrained(folder)  # fmt: skip


def save_files(page: Path) -> None:
    """The files that a page asks its reader to save, at the smallest size."""
    for name, content in saved(page):
        for text, small in SMALLER_PYTHON.items():
            content = content.replace(text, small)
        Path(name).write_text(content)


@pytest.fixture
def checkout(here, request, monkeypatch):
    """A folder that looks like the repository's root to a command, with a small thing for every name of an example."""
    for name in ("recipes", "src", "tools", "docker"):
        (here / name).symlink_to(ROOT / name)
    for name in ("docs", "benchmarks"):
        shutil.copytree(ROOT / name, here / name)
    reproduce.hub_replacements(here)
    gemma_cases = pytest.importorskip("gemma_cases")
    (here / "google").mkdir()
    gemma_cases.folder_of(here / "google/diffusiongemma-26B-A4B-it")
    for name in ("runs/duo", "path/to/folder"):
        copy_builtin("mini", here / name)
    lightning(random_network(), here / "runs/duo.ckpt")
    for file in (here / "docs/reports/mini").glob("*.toml"):
        text = re.sub(r"samples = \d+", "samples = 1", file.read_text())
        file.write_text(re.sub(r"nfe = \d+", "nfe = 2", text))
    shutil.copy(ROOT / "src/limpet/training/recipes/small.toml", here / "recipe.toml")
    (here / "stories.txt").write_text(
        "A limpet holds its place on the rock.\nThe sea goes out, and comes in again.\n" * 2
    )
    shutil.copy(BUILTIN_FOLDER / "heldout.txt.xz", here / "stories.txt.xz")
    (here / "prompts.jsonl").write_text('{"prompt": "The sea"}\n')
    (here / "mine.py").write_text("import limpet\n\n\nclass Mine(limpet.Native):\n    pass\n")
    (here / "my.py").write_text(
        "import limpet\n\n\ndef factory(folder=None, *, device=None, precision=None):\n"
        '    return limpet.load("exact:words")\n'
    )
    (here / "tuned.toml").write_text('sampler = "mend nfe=16"\n')
    (here / "my-study.toml").write_text(times.STUDY)
    words = limpet.load("exact:words")
    for name in ("native", "crs", "words", "samples"):
        sampler = limpet.CRS(nfe=4) if name == "crs" else limpet.Native(nfe=4)
        limpet.sample(words, sampler, n=2).save(here / f"{name}.jsonl")
        record(words, sampler).save(here / f"{name}.limpet")
    page = request.node.callspec.params["page"]
    page = page if isinstance(page, Path) else ROOT / "docs" / f"{page}.md"
    if page.stem == "hugging-face":
        tiny_bert(here / "google-bert/bert-base-uncased")
        tiny_bert(here / "runs/bert")
    if page.exists() and page.stem != "README":
        save_files(page)
    monkeypatch.syspath_prepend(here)  # a page imports what it has saved
    return here


def to_run() -> dict[str, list[str]]:
    """The commands that run, by page in its order; of a command's help, those on no page."""
    on_pages = {line for page in PAGES for line in BY_PAGE[page.stem]}
    chosen = {
        page: [line for line in lines if not skipped(line) and not (page.startswith("help") and line in on_pages)]
        for page, lines in BY_PAGE.items()
        if page not in ELSEWHERE
    }
    return {page: lines for page, lines in chosen.items() if lines}


@pytest.mark.long
@pytest.mark.parametrize("page", to_run())
def test_the_commands_run(page, checkout, unserved, capsys):
    for line in to_run()[page]:
        call, _, file = line.partition(" > ")
        call = functools.reduce(lambda text, rule: re.sub(*rule, text), SMALLER.items(), call)
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
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in {"README", *ELSEWHERE}], ids=lambda page: page.stem
)
def test_the_python_of_a_page_runs(page, checkout, monkeypatch):
    """In the order of the page, at the smallest size."""
    monkeypatch.setitem(hidden.PRESETS, "mini", replace(hidden.PRESETS["smoke"], name="mini"))
    names = {"limpet": limpet}
    for kind, block in FENCED.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            for text, small in SMALLER_PYTHON.items():
                block = block.replace(text, small)
            exec(compile(block, page.name, "exec"), names)


def test_links_and_named_files_of_the_pages_exist():
    for page in (*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!\w+:|#)([^)#]+)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
        for name in re.findall(r"`((?:tests|tools|benchmarks|recipes)/[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_says_what_to_read_next(page):
    """Research pages may be long."""
    text = page.read_text(encoding="utf-8")
    if page.stem not in RESEARCH:
        assert len(text.split()) <= 2000
    if page.stem != "README":
        first = text.split("\n\n")[1]
        assert first[0].isalpha() or first[0] in "`*", f"{page.name} does not open with a sentence"
        assert re.search(r"^Next: .*\.$", text.rstrip().split("\n\n")[-1], re.S | re.M), page.name


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"], ids=lambda page: page.stem)
def test_lines_of_a_page_are_short(page):
    """Lines of prose and code; tables, links, pictures and generated blocks may be longer."""
    text = re.sub(r"<!-- .*?<!-- end", "", page.read_text(encoding="utf-8"), flags=re.S)
    long = [line for line in text.split("\n") if len(line) > 120 and not line.startswith(("|", "!", "["))]
    assert long == []


def test_generated_parts_are_current():
    """`python tools/reference.py` and `python tools/trajectory_picture.py` write them."""
    assert reference.outdated() == []
    assert trajectory_picture.FILE.read_text() == trajectory_picture.picture(trajectory_picture.recorded())


def test_the_navigation_has_every_page_once():
    in_navigation = [page for _, page in reference.pages()]
    assert len(in_navigation) == len(set(in_navigation))
    assert set(in_navigation) == {page.name for page in PAGES[1:]} | set(reference.SOURCES)


def test_the_reference_has_every_command_and_every_sampler_once():
    commands, kinds = (
        " ".join(pages.values()).split() for pages in (reference.COMMAND_PAGES, reference.PARAMETER_PAGES)
    )
    assert sorted(commands) == sorted(main.COMMANDS)
    assert sorted(kinds) == sorted(BUILTIN)


def test_the_page_of_times_is_what_was_measured():
    results = json.loads(times.RESULTS.read_text())
    assert list(results["seconds"]) == times.COMMANDS
    assert times.PAGE.read_text() == times.page(results)
    timed = {re.match(r"limpet (paper \w+|\S+)", line)[1] for line in times.COMMANDS}
    assert timed == {*COMMANDS, "--help"} - {"serve", "paper reproduce"}


def test_the_guide_to_training_names_every_field():
    text = (ROOT / "docs/train.md").read_text()
    tables = {"data": recipe.Data, "sizes": recipe.Sizes, "run": recipe.Run, "distil": recipe.Distil}
    for table, kind in tables.items():
        for field in fields(kind):
            assert f"`{table}.{field.name}`" in text, field.name
    for field in fields(recipe.Recipe):
        assert f"`{field.name}`" in text or f"`[{field.name}]`" in text, field.name
