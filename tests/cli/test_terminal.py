"""The command line as users meet it: in a terminal of eighty columns, and in a pipe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import limpet
from examples import COMMANDS, helped, written
from limpet.cli import common, main
from limpet.models.duo import Duo, DuoNetwork, DuoShape
from terminal import COLUMNS, LINES, fits, in_terminal, piped

SMALL = ["--model", "exact:words", "--nfe", "3", "--n", "2"]


# Help


def test_help_is_one_screen_and_names_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert main.main(arguments) == 0
        shown = capsys.readouterr().out
        assert shown.count("\n") <= LINES
        fits(shown)
        assert [line.split()[0] for line in shown.splitlines() if re.match(r"  [a-z]+  ?", line)][
            : len(main.COMMANDS)
        ] == [*main.COMMANDS]
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"limpet {limpet.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_of_itself_that_fit(name, capsys, monkeypatch):
    """Each is shown as it is written: what does not fit, a terminal would break in the middle of a word."""
    assert any(line.startswith(f"limpet {name}") for line in helped(name))
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with pytest.raises(SystemExit):
        main.main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    for example in written(name):
        fits(example)
        assert f"\n{example}\n" in shown


def test_the_papers_commands_have_a_help_of_their_own(capsys):
    assert main.main(["paper"]) == 0
    shown = capsys.readouterr().out
    fits(shown)
    assert all(f"  {name} " in shown for name in main.PAPER)
    assert main.main(["paper", "study2"]) == 2
    assert "limpet paper has no command 'study2'; did you mean study?" in capsys.readouterr().err


def test_the_examples_of_help_are_the_same_in_a_terminal():
    shown = in_terminal("sample", "--help")
    assert any("\\\n" in example for example in written("sample"))
    assert all(f"\n{example}\n" in shown for example in written("sample"))


def test_an_unknown_command_suggests_the_nearest(capsys):
    assert main.main(["compair"]) == 2
    assert capsys.readouterr().err == "limpet: limpet has no command 'compair'; did you mean compare?\n"


MODELS = ("sample", "compare", "watch", "serve", "bulk", "tune", "study", "paper audit", "check", "info", "bench")


@pytest.mark.parametrize("name", MODELS)
def test_where_a_model_is_named_so_are_its_weights_revision_and_device(name, capsys):
    with pytest.raises(SystemExit):
        main.main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    for option in ("--weights", "--revision", "--device", "--precision"):
        assert option in shown, option


def test_options_of_the_weights_reach_the_loader(capsys):
    assert main.main(["sample", "--revision", "main", *SMALL[2:], "--model", "mini"]) == 2
    assert "revision 'main' is for names on the hub" in capsys.readouterr().err
    for option in (["--revision", "main"], ["--weights", "raw"]):
        assert main.main(["compare", *SMALL, *option]) == 2
        assert f"it has no {option[0][2:]}, leave that out" in capsys.readouterr().err
    assert main.main(["paper", "audit", "singleton", "--preset", "smoke", "--revision", "main", "--store", "none"]) == 2
    assert "revision 'main' is for names on the hub" in capsys.readouterr().err


# In eighty columns and in a pipe


def test_a_comparison_fits_and_a_pipe_has_a_line_for_each_sampler():
    call = [
        "compare",
        *SMALL,
        "--seeds",
        "1",
        "2",
        "--sampler",
        "native",
        "--sampler",
        "crs budget=.25 spacing=8 final_step=keep",
    ]
    shown = in_terminal(*call)
    fits(shown)
    assert "± 0." in shown
    out, err = piped(*call, "--texts", "0")
    assert re.search(r"│ native +│ +\d\.\d{4} ± \d\.\d{4} │", out)
    assert re.findall(r"^(.+): \d+\.\d s$", err, re.M) == ["native", "crs final_step=keep budget=0.25 spacing=8"]
    for value in re.findall(r"\d\.\d{4}", out)[:2]:
        assert value in shown  # the same numbers


def test_a_prompt_is_compared_in_a_terminal():
    shown = in_terminal("compare", *SMALL, "--seeds", "1", "--sampler", "crs", "--prompt", "sand ")
    fits(shown)
    assert "sand " in shown


def test_scores_fit_with_their_conventions_as_footnotes(tmp_path, capsys):
    files = [str(tmp_path / f"{seed}.jsonl") for seed in (1, 2)]
    for seed, file in enumerate(files, 1):
        assert main.main(["sample", *SMALL, "--seed", str(seed), "--out", file]) == 0
    capsys.readouterr()
    assert main.main(["score", files[0], "--judge", "exact:words", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["files"]
    shown = in_terminal("score", *files, "--judge", "exact:words")
    fits(shown)
    measures = document["measures"]
    rows = re.findall(r"^│ ([a-z0-9-]+) +│ +(-?\d\S+) ", shown, re.M)
    assert rows[: len(measures)] == [(name, f"{one['mean']:.4f}") for name, one in measures.items()]
    notes = " ".join(shown.split())
    assert all(f"{name}: {' '.join(one['convention'].split())}" in notes for name, one in measures.items())


@pytest.mark.parametrize(
    "call",
    [["doctor"], ["samplers", "crs"], ["paper", "study", "list"], ["paper", "theory", "separated-modes"],
     ["paper", "audit", "risk", "--preset", "smoke", "--model", "exact:words"]],
    ids=" ".join,
)  # fmt: skip
def test_the_rest_fits(call, tmp_path):
    fits(in_terminal(*call, cwd=tmp_path))


def test_a_study_says_in_a_pipe_which_cell_it_is_at(tmp_path):
    (tmp_path / "small.toml").write_text(
        'title = "Small"\nmodel = "exact:words"\nseeds = [1, 2]\nsamples = 2\n'
        '[samplers]\nnative = "native nfe=2"\nCRS = "crs nfe=2"\n'
    )
    _, err = piped("study", "run", "small.toml", cwd=tmp_path)
    assert sorted(re.findall(r"^(\w+): \d of 4 units$", err, re.M)) == ["CRS", "native"]
    assert err.count("\n") == 3


# Messages


def message(capsys, *call: str, code: int = 2) -> str:
    assert main.main(list(call)) == code
    return capsys.readouterr().err


def test_doctor_knows_every_extra(capsys, monkeypatch):
    from limpet.cli import doctor

    assert main.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"judges", "figures", "lab", "ray", "serve"} <= set(found["extras"])
    assert "transformers" in found["extras"]["judges"]
    assert {"torch", "numpy", "tyro", "rich"} <= set(found["versions"])
    monkeypatch.setattr(doctor, "version", lambda package: None if package == "matplotlib" else "1")
    assert main.main(["doctor"]) == 0
    assert "[figures]        lacks matplotlib: pip install 'limpet[figures]'" in capsys.readouterr().out


def test_an_unknown_device_is_one_sentence_everywhere(capsys):
    for model in ("exact:words", "mini"):
        words = message(capsys, "sample", "--model", model, "--device", "abacus")
        assert words.startswith("limpet: device 'abacus' cannot be used here")
        assert words.count("\n") == 1


def test_two_equal_seeds_are_one_sentence(capsys):
    words = message(capsys, "compare", *SMALL, "--seeds", "3", "3")
    assert words == "limpet: the seeds are 3, 3: each counts once, so give different ones\n"


def test_a_length_beyond_the_models_is_remarked(capsys, tiny):
    words = message(capsys, "sample", "--model", tiny, "--length", "12", "--n", "1", "--nfe", "2", "--json", code=0)
    assert f"limpet: length is 12, and {tiny} was trained on 8: it has learnt nothing of the rest\n" in words


def test_an_unfamiliar_key_of_a_config_is_remarked(capsys, tiny):
    path = Path(tiny, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5, "torch_dtype": "float32"}))
    words = message(capsys, "info", tiny, code=0)
    assert words.count("\n") == 1
    assert f"limpet: {path} has rope_theta, which a Duo model does not use here" in words


@pytest.fixture
def tiny(tmp_path) -> str:
    """A folder with a network of eight positions."""
    network = DuoNetwork(DuoShape(vocab_size=11, length=8, width=16, blocks=1, heads=2, cond=8, hidden=32))
    Duo(network, name="tiny").save(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_a_prompt_against_fixed_is_one_sentence():
    model = limpet.load("exact:words")
    with pytest.raises(limpet.LimpetError, match="prompt and fixed give position 1 different tokens"):
        limpet.sample(model, "native nfe=2", n=1, prompt=[3, 4], fixed={1: 5, 7: 1})
    samples = limpet.sample(model, "native nfe=2", n=1, prompt=[3, 4], fixed={1: 4, 7: 1})
    assert samples.tokens[0, [0, 1, 7]].tolist() == [3, 4, 1]


def test_a_command_and_python_draw_the_same(capsys):
    """mini, whose rounding would show in another precision."""
    assert common.DEFAULT_LOADING.precision == common.DEFAULT_LOADING.resolved == "float32"
    assert (
        main.main(["sample", "--model", "mini", "--n", "2", "--nfe", "4", "--seed", "7", "--length", "24", "--json"])
        == 0
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    samples = limpet.sample(limpet.load("mini"), limpet.recommended(4), n=2, seed=7, length=24)
    assert [row["text"] for row in rows] == samples.texts
    assert {row["precision"] for row in rows} == {"float32"}
