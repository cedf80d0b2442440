"""Options as users meet them: help of one screen and a half, files of options, forgiving names, plain refusals."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest

import limpet
from examples import COMMANDS
from limpet.cli import main
from limpet.errors import LimpetError
from limpet.evaluation.judges import builtin_fits, default_judge
from limpet.models import tokenizer_digest
from limpet.server.scheduler import Limits
from limpet.training import recipe
from terminal import fits, in_terminal

COLUMNS, LINES = 80, 60
TINY = ["--model", "exact:words", "--nfe", "3", "--n", "2"]


def output(capsys, *call: str, code: int = 0) -> str:
    assert main.main(list(call)) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def words(text: str) -> set[str]:
    """The words of a help text, without its boxes."""
    return set(re.findall(r"[a-zA-Z]{2,}", text))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal_and_breaks_no_word(name, capsys, monkeypatch):
    """In a terminal of 80 columns. A word that is broken is no word of the help in a wide one."""
    shown = in_terminal(*name.split(), "--help", columns=COLUMNS)
    lines = shown.rstrip("\n").split("\n")
    assert len(lines) <= LINES, f"{len(lines)} lines"
    fits(shown, COLUMNS)
    assert not [line for line in lines if "default: None" in line or "{None}" in line or "--no-" in line]
    assert "--config FILE" in " ".join(shown.split())
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as stop:
        main.main([*name.split(), "--help"])
    assert stop.value.code == 0
    assert words(shown) <= words(capsys.readouterr().out)


def test_help_wraps_at_words_in_a_terminal():
    shown = re.sub(r"[│╭╮╰╯─\s]+", " ", in_terminal("sample", "--help"))
    assert "text that stands from that token on; digits are ids (12=345,6) unless they are in double quotes" in shown


def test_the_parameters_of_a_sampler_have_a_help_of_their_own(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    shown = words(output(capsys, "samplers", "mend"))
    assert all(words(name) <= shown for name in limpet.samplers.params(limpet.Mend))


def test_help_of_serve_names_every_limit_and_its_default(capsys):
    with pytest.raises(SystemExit):
        main.main(["serve", "--help"])
    about = " ".join(capsys.readouterr().out.partition("What requests may take")[2].partition("Options may")[0].split())
    for name, default in asdict(Limits()).items():
        assert f"{name} {default:g}" in about


# Files of options


def test_a_file_of_options_is_the_command_line_and_the_command_line_comes_first(tmp_path, capsys):
    options = tmp_path / "options.toml"
    options.write_text('model = "exact:words"\nnfe = 3\nn = 2\njson = true\nseeds = [1, 2]\n'
                       'sampler = ["native", "crs"]\n')  # fmt: skip
    by_file = json.loads(output(capsys, "compare", "--config", str(options)))
    words = ["--seeds", "1", "2", "--sampler", "native", "--sampler", "crs", "--json"]
    assert by_file == json.loads(output(capsys, "compare", *TINY, *words))
    changed = json.loads(output(capsys, "compare", "--sampler", "psi", f"--config={options}", "--nfe", "4"))
    assert [(one["name"], one["nfe"]) for one in changed["samplers"]] == [("psi", 4)]
    options.write_text("nfee = 3\n")
    with pytest.raises(SystemExit):
        main.main(["sample", "--config", str(options)])
    assert "--nfee" in capsys.readouterr().err
    for call in (["--config"], ["--config", "--nfe"]):
        assert "--config takes a TOML file" in output(capsys, "sample", *call, code=2)


# Names


def test_names_that_tables_print_are_read_whatever_their_case(capsys):
    result = limpet.compare(limpet.load("exact:words"), ["crs nfe=3 final_step=argmax", "mend nfe=4"], n=1)
    for name, one in zip(result.row_names, result.samplers, strict=True):
        again = limpet.samplers.as_sampler(name)
        assert again == one.sampler
    assert limpet.samplers.as_sampler("MEND nfe=4") == limpet.Mend(nfe=4)
    assert "did you mean mend" in output(capsys, "sample", "--sampler", "mnd", code=2)


def test_an_unknown_option_names_the_nearest_and_this_commands_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["sample", "--modell", "mini"])
    shown = capsys.readouterr().err
    assert stop.value.code == 2
    assert "--model" in shown
    assert "limpet sample --help" in shown


def test_an_unknown_judge_offers_judges_and_an_unknown_model_models(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = output(capsys, "score", __file__, "--judge", "mini-jugde", code=2)
    assert "a judge is mini-judge, exact:NAME, a folder, or a causal language model on the hub" in words
    assert "did you mean molecules?" in output(capsys, "info", "moleculs", code=2)


def test_a_recipe_is_found_from_anywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert {recipe.read(name).name for name in recipe.shipped()} >= {"small", "mini", "molecules", "sudoku"}
    words = output(capsys, "train", "smal", code=2)
    assert "name a TOML file, or one of" in words
    assert "small-judge" in words


@pytest.mark.parametrize("option", ["--nfe", "--batches", "--threads", "--runs"])
def test_bench_takes_whole_numbers_from_one(option, capsys):
    assert "it takes whole numbers from 1" in output(capsys, "bench", option, "0", code=2)


# Infilling


def test_infill_draws_between_two_texts(capsys):
    model = limpet.load("mini")
    found = limpet.infill(model, "The sea", " went home.", 12, "crs nfe=3", n=2, seed=5)
    assert all(text.startswith("The sea") and text.endswith(" went home.") for text in found.texts)
    assert (found.fixed < 0).sum(1).tolist() == [12, 12]
    call = ["infill", "The sea", " went home.", "--gap", "12", "--sampler", "crs nfe=3", "--n", "2", "--seed", "5"]
    lines = output(capsys, *call, "--json").splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == found.tokens.tolist()
    for gap in (0, 1.5):
        with pytest.raises(LimpetError, match="whole number of tokens"):
            limpet.infill(model, "a", "b", gap)
    with pytest.raises(LimpetError, match="prompt of its own form"):
        limpet.infill(limpet.load("sudoku"), "1", "2", 3)


# No silent wrong number


def test_piped_texts_are_scored_as_the_samples_that_they_are(tmp_path, capsys):
    texts, lines = tmp_path / "m.txt", tmp_path / "m.jsonl"
    call = ["sample", "--model", "mini", "--n", "3", "--nfe", "3", "--length", "48"]
    texts.write_text(output(capsys, *call))
    lines.write_text(output(capsys, *call, "--json"))
    measured = [
        json.loads(output(capsys, "score", str(file), "--judge", "mini-judge", "--convention", "text", "--json"))
        for file in (texts, lines)
    ]
    (from_text,), (from_json,) = (one["files"] for one in measured)
    for name in ("nll", "perplexity"):
        assert from_text["measures"][name]["mean"] == pytest.approx(from_json["measures"][name]["mean"], rel=1e-6)
    assert texts.read_text().count("\f\n") == 3


def test_a_judge_that_may_not_fit_is_asked_for_by_name(tmp_path, capsys):
    latex = tmp_path / "page.txt"
    latex.write_text("\\begin{equation} e^{i\\pi} + 1 = 0 \\end{equation}\n")
    assert main.main(["score", str(latex), "--json"]) == 0
    shown = capsys.readouterr()
    (scored,) = json.loads(shown.out)["files"]
    assert scored["judge"] is None
    assert "perplexity" not in scored["measures"]
    assert "name one with --judge" in shown.err
    mini = limpet.load("mini")
    assert builtin_fits([tokenizer_digest(mini.tokenizer)])
    assert default_judge(mini).name == "mini-judge"
    assert not builtin_fits([None])
    assert not builtin_fits([tokenizer_digest(mini.tokenizer), None])
    mini.tokenizer = limpet.load("sudoku").tokenizer
    with pytest.warns(match="no judge is known to fit mini"):
        assert default_judge(mini) is None


def test_a_wrong_type_is_one_sentence():
    words = limpet.load("exact:words")
    calls = {
        "load it first, with limpet.load": lambda: limpet.sample("mini"),
        "a text: load it first": lambda: limpet.compare("mini", ["native"]),
        "a sampler is a limpet.Sampler or a text": lambda: limpet.sample(words, 5),
        "a model is named by a text": lambda: limpet.load(5),
        "a judge is named by a text": lambda: limpet.load_judge(5),
        "n is '4'; it takes a whole number": lambda: limpet.sample(words, n="4"),
        "n is 2.5": lambda: limpet.sample(words, n=2.5),
        "seed is 'a'": lambda: limpet.sample(words, seed="a"),
        "length is 'a'": lambda: limpet.sample(words, length="a"),
        "seeds is 5; it takes a list": lambda: limpet.compare(words, "crs nfe=2", seeds=5),
    }
    for sentence, call in calls.items():
        with pytest.raises(LimpetError, match=re.escape(sentence)):
            call()


def test_the_digest_of_weights_does_not_depend_on_precision(capsys):
    about = [
        json.loads(output(capsys, "info", model, "--precision", precision, "--json"))
        for model, precision in (("sudoku", "float32"), ("sudoku", "bfloat16"), ("molecules", "float32"))
    ]
    single, half, other = (one["weights digest"] for one in about)
    assert single == half != other
    assert about[0]["digest"] != about[1]["digest"]  # of everything that decides the output
