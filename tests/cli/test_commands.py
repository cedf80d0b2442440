"""`limpet sample` and `limpet compare`: each sampler has its own parameters, and tables name judge and convention."""

from __future__ import annotations

import json
import re

import pytest

import limpet
from limpet import CRS, Native, registry
from limpet.cli.main import main
from limpet.errors import LimpetError
from limpet.evaluation.comparison import SAMPLERS
from limpet.samplers import named_samplers
from limpet.samplers.recommended import SHARPNESS

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


def compared(capsys, *texts, nfe=4, model="exact:words"):
    options = [word for text in texts for word in ("--sampler", text)]
    call = ["compare", "--model", model, "--nfe", str(nfe), "--n", "2", "--seeds", "1", "2"]
    return {one["name"]: one for one in document(capsys, *call, *options)["samplers"]}


def failed(capsys, *call):
    assert main(list(call)) == 2
    words = capsys.readouterr().err
    assert words.startswith("limpet: ")
    assert words.count("\n") == 1
    return words


# Samplers by their texts


def test_a_sampler_has_its_own_parameters_and_the_common_calls(mine):
    found = named_samplers(["native", "crs budget=.25", "short: crs nfe=8 late-top-p=.9", f"{mine} depth=2"], 16)
    assert list(found) == ["native", "crs budget=0.25", "short", "mine.py:Mine depth=2"]
    assert found["native"] == Native(nfe=16)
    assert found["crs budget=0.25"] == CRS(nfe=16, budget=0.25)
    assert found["short"] == CRS(nfe=8, late_top_p=0.9)
    assert (found["mine.py:Mine depth=2"].nfe, found["mine.py:Mine depth=2"].depth) == (16, 2)
    assert named_samplers(["crs"]) == {"crs": CRS()}
    assert named_samplers([], 16) == {}


def test_samplers_that_differ_in_calls_alone_say_so():
    assert named_samplers(["crs nfe=8", "crs"], 16) == {"crs nfe=8": CRS(nfe=8), "crs nfe=16": CRS(nfe=16)}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["crs", "native", "crs nfe=16"], "the samplers 'crs' and 'crs nfe=16' are both 'crs nfe=16'"),
        (["a: crs", "a: native"], "the samplers 'a: crs' and 'a: native' are both 'a nfe=16'"),
        (["crs horizon=0"], "crs has horizon 0; it takes None or a whole number from 1"),
        (["crs budgt=.5"], "crs has no parameter 'budgt'; did you mean budget?"),
        (["crs .5"], "after the sampler it takes parameters such as nfe=16"),
        (["policy"], "there is no sampler 'policy'; there are native, crs"),
        ([""], "there is no sampler ''"),
        (["./none.py:Mine"], "check the path before the colon"),
        (["native top_p=often"], "native has top_p 'often'; it takes a number above 0 to 1"),
    ],
)
def test_a_wrong_sampler_gets_one_sentence(texts, words):
    with pytest.raises(LimpetError) as raised:
        named_samplers(texts, 16)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("command", ["sample", "compare"])
def test_help_says_where_samplers_are_listed_and_loads_no_package(capsys, monkeypatch, command):
    monkeypatch.setattr(registry, "installed", lambda group: pytest.fail("help asked for other packages"))
    with pytest.raises(SystemExit) as raised:
        main([command, "--help"])
    assert raised.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "`limpet samplers` lists them" in shown
    assert f"$ limpet {command} --sampler" in shown


# compare


def test_without_samplers_the_defaults_are_compared(capsys):
    found = document(capsys, "compare", "--model", "exact:words", "--n", "2", "--seeds", "1", "2", "--nfe", "4")
    wanted = {**named_samplers(SAMPLERS, 4), f"sharpness={SHARPNESS:g}": limpet.recommended(4)}
    assert [one["name"] for one in found["samplers"]] == list(wanted)
    assert [one["sampler"] for one in found["samplers"]] == [one.to_dict() for one in wanted.values()]
    assert {one["nfe"] for one in found["samplers"]} == {4}


def test_one_samplers_parameters_never_touch_anothers(capsys):
    """`compare --top-p 0.5` once changed the native row with it."""
    alone = compared(capsys, "native")["native"]
    beside = compared(capsys, "native", "native top_p=.5", "crs top_p=.5 final_step=sample nfe=6")
    assert beside["native"] == alone
    assert [one["nfe"] for one in beside.values()] == [4, 4, 6]
    assert beside["native top_p=0.5"]["measures"]["nll"] != alone["measures"]["nll"]
    for name, one in beside.items():
        assert one["sampler"] == named_samplers([name], one["nfe"])[name].to_dict()
        again = limpet.compare(
            limpet.load("exact:words"), {name: named_samplers([name], one["nfe"])[name]}, n=2, seeds=(1, 2)
        )
        assert again.samplers[0].to_dict()["measures"]["nll"] == one["measures"]["nll"]


def test_the_old_flags_are_gone(capsys):
    for flag in (["--top-p", "0.5"], ["--horizon", "0"], ["--budget", "1"]):
        with pytest.raises(SystemExit) as raised:
            main(["compare", "--model", "exact:words", *flag])
        assert raised.value.code == 2


def test_a_crs_that_selects_nothing_is_an_error(capsys):
    """With `--horizon 0` the row named CRS once committed nothing."""
    words = failed(capsys, "compare", "--model", "exact:words", "--sampler", "crs horizon=0")
    assert "crs has horizon 0; it takes None or a whole number from 1" in words
    assert compared(capsys, "crs horizon=1")["crs horizon=1"]["committed"] > 0


def test_a_sampler_in_a_file_is_one_like_others(capsys, mine):
    found = compared(capsys, "native", mine)
    assert found["mine.py:Mine"]["measures"]["nll"] == found["native"]["measures"]["nll"]
    assert found["mine.py:Mine"]["sampler"]["depth"] == 3
    assert found["mine.py:Mine"]["delta_nll"]["mean"] == 0


@pytest.mark.parametrize(
    ("options", "judge"),
    [
        (["--model", "exact:words"], "true distribution of exact:words (DIGEST) in float64, convention exact, 640"),
        (["--model", "exact:words", "--judge", "mini-judge"], "mini-judge (DIGEST) in float32, convention text, \\d+"),
        (["--model", "mini", "--precision", "float32"], "mini-judge (DIGEST) in float32, convention ids, 1,020"),
    ],
)
def test_a_table_says_who_judged_how_and_over_what(capsys, options, judge):
    call = ["compare", "--n", "2", "--seeds", "1", "2", "--nfe", "2", "--texts", "0", "--sampler", "native"]
    assert main([*call, "--device", "cpu", *options]) == 0
    shown = capsys.readouterr()
    pattern = judge.replace("(DIGEST)", r"\([0-9a-f]{12}\)") + " tokens counted per sampler"
    assert re.search(pattern, " ".join(shown.out.split())), shown.out
    assert "nll: " in shown.err
    assert ("true NLL" in shown.out) == ("convention exact" in judge)


def test_a_prompt_is_not_counted(capsys):
    call = ["compare", "--model", "exact:words", "--n", "2", "--seeds", "1", "--nfe", "2", "--sampler", "crs"]
    found = document(capsys, *call, "--prompt", "sand ")
    assert found["samplers"][0]["counted"] == 2 * 155
    assert found["data"] is None
    assert main([*call, "--prompt", "sand "]) == 0
    assert "the first 5 tokens are the prompt and not counted" in " ".join(capsys.readouterr().out.split())


# sample


def test_samples_come_from_the_sampler(capsys, tmp_path):
    call = ["sample", "--model", "exact:words", "--n", "2", "--seed", "7"]
    for extra, sampler in (
        ([], limpet.recommended()),
        (["--nfe", "4", "--sharpness", "0.5"], limpet.recommended(4, 0.5)),
        (["--nfe", "4", "--sampler", "crs"], CRS(nfe=4)),
        (["--nfe", "4", "--sampler", "crs nfe=6 budget=.25"], CRS(nfe=6, budget=0.25)),
        (["--nfe", "4", "--sampler", "native top_p=.9"], Native(nfe=4, top_p=0.9)),
    ):
        assert main([*call, *extra, "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        model = limpet.load("exact:words")
        wanted = limpet.sample(model, sampler, n=2, seed=7)
        assert rows == json.loads(json.dumps([one.to_dict() for one in wanted]))
        assert rows[0]["tokenizer"] == model.tokenizer.digest


def test_samples_go_into_a_file(capsys, tmp_path):
    call = ["sample", "--model", "exact:words", "--n", "2", "--nfe", "3"]
    assert main([*call, "--out", str(tmp_path / "a.jsonl"), "--record", str(tmp_path / "a.limpet")]) == 0
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "a.limpet").stat().st_size > 0
    assert capsys.readouterr().out.count("\n\f\n") == 2  # also printed
    before = (tmp_path / "a.jsonl").read_text()
    assert "exists: name another file, or overwrite it with --force" in failed(
        capsys, *call, "--seed", "5", "--out", str(tmp_path / "a.jsonl")
    )
    assert (tmp_path / "a.jsonl").read_text() == before
    assert main([*call, "--seed", "5", "--out", str(tmp_path / "a.jsonl"), "--force"]) == 0
    assert (tmp_path / "a.jsonl").read_text() != before
    capsys.readouterr()
    words = failed(capsys, *call, "--out", str(tmp_path / "no" / "a.jsonl"))
    assert "does not exist" in words
    assert main(call) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n\f\n") == 2
    assert "3 calls" in shown.err


def test_words_and_ids_are_fixed_at_their_positions(capsys, tmp_path):
    call = ["sample", "--model", "exact:words", "--n", "2", "--sampler", "mend nfe=3", "--json"]
    assert main([*call, "--fix", "5=sand salt", "--fix", "20=3", "--fix", "30=19,5,1", "--prompt", "ro"]) == 0
    for row in map(json.loads, capsys.readouterr().out.splitlines()):
        assert row["text"][5:14] == "sand salt"
        assert (row["tokens"][20], row["tokens"][30:33]) == (3, [19, 5, 1])
        assert (row["prompt_length"], row["prompt"], row["text"][:2]) == (2, "ro", "ro")
        assert [at for at, _ in row["fixed"]] == [*range(5, 14), 20, 30, 31, 32]
        assert all(row["tokens"][at] == token for at, token in row["fixed"])
    for wrong, words in (
        (["12"], "it takes POSITION=WORDS"),
        (["12="], "it takes POSITION=WORDS"),
        (["-1=a"], "it takes POSITION=WORDS"),
        (["1=a", "1=b"], "position 1 is fixed twice"),
        (["1=ab", "2=b"], "position 2 is fixed twice: move 'b'"),
        (["158=sand"], "'sand' takes 4 tokens from position 158, past the 160 of the sequence"),
        (["160=a"], "fixed position 160 is outside a sequence of 160 tokens"),
        (["1=27"], "token 27 is outside the vocabulary of 27"),
        (['1="27"'], "it was given '27'"),  # in quotes, digits are words
    ):
        assert words in failed(capsys, *call, *(word for one in wrong for word in ("--fix", one)))


def test_a_sampler_that_commits_nothing_says_so(capsys, mine):
    assert main(["sample", "--model", "exact:words", "--sampler", mine, "--nfe", "3", "--n", "1"]) == 0
    assert "3 calls · 0 committed" in capsys.readouterr().err
