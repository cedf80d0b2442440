"""`limpet sample` and `limpet compare`: arms by their own words alone, and tables that say who judged what and how."""

from __future__ import annotations

import json
import re

import pytest
import torch

import limpet
from limpet import CRS, Native, registry, samplers
from limpet.cli import common
from limpet.cli.common import arms
from limpet.cli.main import main
from limpet.errors import LimpetError
from limpet.evaluation.comparison import baselines

MINE = '''
from dataclasses import dataclass

import limpet
from limpet import Native, param


@dataclass(frozen=True)
class Mine(Native):
    """Native steps under a name of one's own."""

    depth: int = param(3, "Nothing at all.", low=1)
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return "./mine.py:Mine"


def document(capsys, *call):
    assert main([*call, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def compared(capsys, *arms, nfe=4, model="exact:words"):
    given = [word for arm in arms for word in ("--arm", arm)]
    call = ["compare", "--model", model, "--nfe", str(nfe), "--n", "2", "--shards", "1", "2"]
    return {arm["name"]: arm for arm in document(capsys, *call, *given)["arms"]}


def failed(capsys, *call):
    assert main(list(call)) == 2
    words = capsys.readouterr().err
    assert words.startswith("limpet: ")
    assert words.count("\n") == 1
    return words


# Arms


def test_an_arm_is_its_own_words_and_the_common_calls(mine):
    found = arms(["native", "crs budget=.25", "short: crs nfe=8 late-top-p=.9", f"{mine} depth=2"], 16)
    assert list(found) == ["native", "crs budget=0.25", "short", "mine.py:Mine depth=2"]
    assert found["native"] == Native(nfe=16)
    assert found["crs budget=0.25"] == CRS(nfe=16, budget=0.25)
    assert found["short"] == CRS(nfe=8, late_top_p=0.9)
    assert (found["mine.py:Mine depth=2"].nfe, found["mine.py:Mine depth=2"].depth) == (16, 2)
    assert arms(["crs"]) == {"crs": CRS()}
    assert arms([], 16) == {}


def test_arms_that_differ_in_calls_alone_say_so():
    assert arms(["crs nfe=8", "crs"], 16) == {"crs nfe=8": CRS(nfe=8), "crs nfe=16": CRS(nfe=16)}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["crs", "native", "crs nfe=16"], "the arms 'crs' and 'crs nfe=16' are both 'crs nfe=16'"),
        (["a: crs", "a: native"], "the arms 'a: crs' and 'a: native' are both 'a nfe=16'"),
        (["crs horizon=0"], "crs has horizon 0; it takes None or a whole number from 1"),
        (["crs budgt=.5"], "crs has no parameter 'budgt'; did you mean budget?"),
        (["crs .5"], "after the sampler it takes parameters such as nfe=16"),
        (["policy"], "there is no sampler 'policy'; there are native, crs"),
        ([""], "there is no sampler ''"),
        (["./none.py:Mine"], "check the path before the colon"),
        (["native top_p=often"], "native has top_p 'often'; it takes a number above 0 to 1"),
    ],
)
def test_what_is_no_arm_gets_one_sentence(texts, words):
    with pytest.raises(LimpetError) as raised:
        arms(texts, 16)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_help_names_every_sampler_with_its_knobs(capsys):
    for name, kind in samplers.available().items():
        (line,) = (line for line in common.ARM_HELP.split("\n\n") if line.split()[0] == name)
        assert [part.partition("=")[0] for part in line.split()[1:]] == [k for k in samplers.params(kind) if k != "nfe"]
    for command in ("sample", "compare"):
        with pytest.raises(SystemExit) as raised:
            main([command, "--help"])
        assert raised.value.code == 0
        shown = capsys.readouterr().out
        assert "budget=0.5" in shown
        assert f"$ limpet {command} --arm" in shown


def test_help_comes_even_where_another_packages_sampler_is_broken(monkeypatch):
    monkeypatch.setattr(registry, "installed", lambda group: {"theirs": "no_such_module:Theirs"})
    with pytest.raises(LimpetError, match="'theirs' is no_such_module:Theirs, which cannot be loaded"):
        samplers.find("theirs")
    assert common._arm_help() == common.ARM_HELP


# compare


def test_without_arms_the_baselines_are_compared(capsys):
    found = document(capsys, "compare", "--model", "exact:words", "--n", "2", "--shards", "1", "2", "--nfe", "4")
    assert [arm["name"] for arm in found["arms"]] == list(baselines(4))
    assert [arm["sampler"] for arm in found["arms"]] == [arm.to_dict() for arm in baselines(4).values()]
    assert {arm["nfe"] for arm in found["arms"]} == {4}


def test_one_arms_knobs_never_touch_anothers(capsys):
    """`compare --top-p 0.5` once changed the native row with it."""
    alone = compared(capsys, "native")["native"]
    beside = compared(capsys, "native", "native top_p=.5", "crs top_p=.5 final_step=sample nfe=6")
    assert beside["native"] == alone
    assert [arm["nfe"] for arm in beside.values()] == [4, 4, 6]
    assert beside["native top_p=0.5"]["nll"] != alone["nll"]
    for name, arm in beside.items():
        assert arm["sampler"] == arms([name], arm["nfe"])[name].to_dict()
        again = limpet.compare(limpet.load("exact:words"), {name: arms([name], arm["nfe"])[name]}, 2, (1, 2))
        assert again.arms[0].to_dict()["nll"] == arm["nll"]


def test_the_old_flags_are_gone(capsys):
    for flag in (["--top-p", "0.5"], ["--horizon", "0"], ["--budget", "1"]):
        with pytest.raises(SystemExit) as raised:
            main(["compare", "--model", "exact:words", *flag])
        assert raised.value.code == 2


def test_a_crs_that_selects_nothing_is_an_error(capsys):
    """With `--horizon 0` the row named CRS once committed nothing."""
    words = failed(capsys, "compare", "--model", "exact:words", "--arm", "crs horizon=0")
    assert "crs has horizon 0; it takes None or a whole number from 1" in words
    assert compared(capsys, "crs horizon=1")["crs horizon=1"]["committed"] > 0


def test_a_sampler_in_a_file_is_an_arm_like_others(capsys, mine):
    found = compared(capsys, "native", mine)
    assert found["mine.py:Mine"]["nll"] == found["native"]["nll"]
    assert found["mine.py:Mine"]["sampler"]["depth"] == 3
    assert found["mine.py:Mine"]["nll_against_first"]["mean"] == 0


def test_a_table_says_who_judged_how_and_over_what(capsys):
    call = [
        "compare",
        "--n",
        "2",
        "--shards",
        "1",
        "2",
        "--nfe",
        "2",
        "--texts",
        "0",
        "--arm",
        "native",
        "--device",
        "cpu",
    ]
    digest = r"\([0-9a-f]{12}\)"
    for extra, caption in (
        (
            ["--model", "exact:words"],
            rf"true distribution of exact:words {digest} in float64, by exact, 640 tokens counted an arm; exact:words in float64",
        ),
        (
            ["--model", "exact:words", "--judge", "mini-judge"],
            rf"mini-judge {digest} in float32, by text, \d+ tokens counted an arm; exact:words in float64",
        ),
        (
            ["--model", "mini", "--precision", "float32"],
            rf"mini-judge {digest} in float32, by ids, 1,020 tokens counted an arm; mini in float32",
        ),
    ):
        assert main([*call, *extra]) == 0
        shown = capsys.readouterr()
        assert re.search(caption, shown.out), shown.out
        assert "NLL: " in shown.err
        assert ("true NLL" in shown.out) == ("by exact" in caption)


def test_a_prompt_is_given_and_not_counted(capsys):
    call = ["compare", "--model", "exact:words", "--n", "2", "--shards", "1", "--nfe", "2", "--arm", "crs"]
    found = document(capsys, *call, "--prompt", "sand ")
    assert found["arms"][0]["counted"] == 2 * 155
    assert found["data"] is None
    assert main([*call, "--prompt", "sand "]) == 0
    assert "160 tokens, 5 of them given and not counted" in " ".join(capsys.readouterr().out.split())


# sample


def test_samples_come_from_the_arm(capsys, tmp_path):
    call = ["sample", "--model", "exact:words", "--n", "2", "--seed", "7"]
    for extra, sampler in (
        ([], CRS()),
        (["--nfe", "4"], CRS(nfe=4)),
        (["--nfe", "4", "--arm", "crs nfe=6 budget=.25"], CRS(nfe=6, budget=0.25)),
        (["--nfe", "4", "--arm", "native top_p=.9"], Native(nfe=4, top_p=0.9)),
    ):
        assert main([*call, *extra, "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        model = limpet.load("exact:words")
        wanted = limpet.sample(model, sampler, n=2, seed=7)
        assert rows == json.loads(json.dumps(list(wanted.rows())))
        assert rows[0]["tokenizer"] == model.tokenizer.digest


def test_samples_go_where_they_are_told(capsys, tmp_path):
    call = ["sample", "--model", "exact:words", "--n", "2", "--nfe", "3"]
    assert main([*call, "--out", str(tmp_path / "a.jsonl"), "--record", str(tmp_path / "a.limpet")]) == 0
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "a.limpet").stat().st_size > 0
    assert len(capsys.readouterr().out.splitlines()) == 2  # also printed
    words = failed(capsys, *call, "--out", str(tmp_path / "no" / "a.jsonl"))
    assert "does not exist" in words
    assert main(call) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert "3 calls" in shown.err


def test_words_and_ids_are_fixed_where_they_are_told(capsys, tmp_path):
    call = ["sample", "--model", "exact:words", "--n", "2", "--nfe", "3", "--json"]
    assert main([*call, "--fix", "5=sand salt", "--fix", "20=3", "--fix", "30=19,5,1", "--prompt", "ro"]) == 0
    for row in map(json.loads, capsys.readouterr().out.splitlines()):
        assert row["text"][5:14] == "sand salt"
        assert (row["tokens"][20], row["tokens"][30:33]) == (3, [19, 5, 1])
        assert (row["prefix"], row["prefix_text"], row["text"][:2]) == (2, "ro", "ro")
        assert [at for at, _ in row["fixed"]] == [*range(5, 14), 20, 30, 31, 32]
        assert all(row["tokens"][at] == token for at, token in row["fixed"])
    for wrong, words in (
        (["12"], "it takes POSITION=WORDS"),
        (["12="], "it takes POSITION=WORDS"),
        (["-1=a"], "it takes POSITION=WORDS"),
        (["1=a", "1=b"], "position 1 is fixed twice"),
        (["1=ab", "2=b"], "position 2 is given twice: move 'b'"),
        (["158=sand"], "'sand' takes 4 tokens from position 158, past the 160 of the sequence"),
        (["160=a"], "fixed position 160 is outside a sequence of 160 tokens"),
        (["1=27"], "token 27 is outside the vocabulary of 27"),
        (['1="27"'], "it was given '27'"),  # in quotes, digits are words
    ):
        assert words in failed(capsys, *call, *(word for one in wrong for word in ("--fix", one)))


def test_progress_needs_no_mark(capsys, mine):
    assert main(["sample", "--model", "exact:words", "--arm", mine, "--nfe", "3", "--n", "1"]) == 0
    assert "3 calls · 0 committed" in capsys.readouterr().err


def test_baselines_share_all_randomness():
    model = limpet.load("exact:words")
    result = limpet.compare(model, {"a": Native(nfe=4), "b": Native(nfe=4)}, 2, (1,))
    assert torch.equal(result.arms[0].samples[0].tokens, result.arms[1].samples[0].tokens)
    for wrong in ({"arms": {}}, {"shards": ()}, {"shards": (1, 1)}):
        with pytest.raises(LimpetError):
            limpet.compare(model, **{"n": 1, **wrong})
