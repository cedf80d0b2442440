"""Studies from files: a good file runs, and every mistake is reported with its place before any work."""

import pytest

from limpet.errors import LimpetError
from limpet.experiments import ModelCache, Store, collect, local, report, resolve, run, study_files
from limpet.experiments.units import plan_name
from limpet.samplers import CRS, Native
from study_cases import result_files

GOOD = """\
# Budgets on the source of words
title = "Budgets"
model = "exact:words"
seeds = [1, 2]
samples = 2
metrics = ["entropy", "rep-4"]

[common]
nfe = 4
budget = 0.1

[samplers]
native = "native"

[samplers."CRS, small"]
sampler = "crs"
horizon = inf
count = 7

[samplers.second]
sampler = "crs"
values = "second"
replay = "CRS, small"

[[contrasts]]
of = "CRS, small"
against = "native"

[[contrasts]]
of = "second"
against = "CRS, small"
measure = "entropy"
"""


def write(tmp_path, text):
    path = tmp_path / "budgets.toml"
    path.write_text(text)
    return path


def test_a_file_is_a_study(tmp_path):
    models, store = ModelCache(), Store(tmp_path / "store")
    study = study_files.load(write(tmp_path, GOOD), models)
    assert study.name == "budgets"
    assert [cell.sampler for cell in study.cells] == [
        Native(nfe=4),
        CRS(nfe=4, budget=0.1, count=7),
        CRS(nfe=4, budget=0.1, values="second"),
    ]
    assert study.cell("second").replay == "CRS, small"
    run(study, store, local(models=models), models)
    results = collect(study, store)
    content = study.build_report(results)
    names = ["nll: CRS, small minus native", "entropy: second minus CRS, small"]
    assert [contrast.name for contrast in content.contrasts] == names
    assert content.contrasts[0].estimate.mean == pytest.approx(results.contrast("CRS, small", "native").mean)
    assert all(len(table.head) <= 1 + study_files.COLUMNS for table in content.tables)
    html = report.write_report(results, tmp_path / "report").read_text()
    assert "CRS, small" in html
    assert "lower is better" in html


def test_several_models_have_every_sampler(tmp_path):
    text = GOOD.replace('model = "exact:words"', 'models = ["exact:words", "exact:chain"]')
    study = study_files.load(write(tmp_path, text), ModelCache())
    assert len(study.cells) == 6
    assert study.cell("exact:chain/second").replay == "exact:chain/CRS, small"


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ("samples = 2", "sampels = 2", "sampels", "no field 'sampels'; did you mean samples?"),
        ("samples = 2", 'samples = "two"', "samples", "samples is 'two'; it takes a whole number"),
        ("samples = 2", "samples = 0", "[samplers]", "at least one"),
        ("seeds = [1, 2]", "seeds = 1", "seeds", "it takes a list"),
        ("seeds = [1, 2]", "seeds = [1, true]", "seeds", "it takes a list"),
        ("seeds = [1, 2]", "seeds = [1, 1]", "[samplers]", "there twice"),
        ("nfe = 4", "nfe = 1", "[common] nfe", "native has nfe 1; it takes a whole number from 2"),
        ("nfe = 4", "nef = 4", "[common] nef", "no sampler has a parameter 'nef'; did you mean nfe?"),
        ("budget = 0.1", "budget = nan", "[common] budget", "crs has budget nan; it takes a number from 0"),
        ('native = "native"', "native = {nfe = 4}", "[samplers.native]", "native names no sampler; it takes native"),
        ('native = "native"', "native = 4", "[samplers] native", "native names no sampler; it takes native, crs"),
        (
            'native = "native"',
            'native = "natvie"',
            "[samplers",
            "no sampler 'natvie', did you mean native? there are",
        ),
        ('native = "native"', 'native = "native top_p=2"', "[samplers", "native has top_p 2.0; it takes a number"),
        ('native = "native"', 'native = "native budget=.1"', "[samplers", "native has no parameter 'budget'"),
        ('sampler = "crs"', "", "[samplers.'CRS, small']", "CRS, small names no sampler"),
        ('sampler = "crs"', 'sampler = "./none.py:None"', "[samplers.'CRS, small'] sampler", "none.py cannot be read"),
        ("count = 7", "counts = 7", "[samplers.'CRS, small'] counts", "no parameter 'counts'; did you mean count?"),
        ('values = "second"', 'values = "third"', "[samplers.second] values", "it takes one of argmax, second"),
        ('replay = "CRS, small"', 'replay = "CRS"', "[samplers.second] replay", "sampler second replays 'CRS'"),
        ('against = "native"', 'against = "natvie"', "[contrasts #1] against", "against is 'natvie'"),
        ('measure = "entropy"', 'metric = "entropy"', "[contrasts #2] metric", "no field 'metric'; it takes of"),
        ('metrics = ["entropy", "rep-4"]', 'metrics = ["beauty"]', "[samplers]", "no metric 'beauty'"),
        ('model = "exact:words"', 'model = "exact:prose"', "model", "no exact source 'exact:prose'"),
        ('model = "exact:words"', 'model = "no-such-model"', "model", "no-such-model"),
        ('model = "exact:words"', "", "model", "either model, one name, or models"),
        ('title = "Budgets"', 'judges = ["no-such-judge"]', "judges", "no-such-judge"),
        ('title = "Budgets"', 'judges = [{name = "mini-judge", convention = "ids"}]', "judges", "cannot score"),
        (
            'title = "Budgets"',
            'judges = [{name = "mini-judge", way = "ids"}]',
            "[judges #1] way",
            "no field 'way'; it takes name",
        ),
        ('title = "Budgets"', 'prompts = {texts = "a", token = 3}', "[prompts] token", "'token'; did you mean tokens?"),
    ],
)
def test_a_mistake_is_reported_with_its_place(tmp_path, monkeypatch, old, new, place, message):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(LimpetError) as caught:
        study_files.load(path, ModelCache())
    assert str(caught.value).startswith(f"{path}, {place}")
    assert message in str(caught.value)
    assert result_files(tmp_path) == {}


def test_a_file_name_that_cannot_name_a_folder_needs_another_name(tmp_path):
    path = tmp_path / "my study.toml"
    path.write_text(GOOD)
    with pytest.raises(LimpetError, match="name is 'my study'; it takes letters"):
        study_files.load(path)
    path.write_text(f'name = "mine"\n{GOOD}')
    assert study_files.load(path).name == "mine"


def test_a_syntax_error_is_reported_with_its_line(tmp_path):
    with pytest.raises(LimpetError, match=r"not TOML.*line 3"):
        study_files.load(write(tmp_path, "samples = 2\nseeds = [1\n = 3"))
    with pytest.raises(LimpetError, match="cannot be read"):
        study_files.load(tmp_path / "none.toml")


MINE = """
from dataclasses import dataclass
from limpet.samplers import Native, param

@dataclass(frozen=True)
class Mine(Native):
    push: float = param(0.0, "How far.", low=0)
"""


def test_a_samplers_file_stands_beside_the_study(tmp_path):
    """Also if the study is run from another folder. Its key does not depend on where both are."""
    text = GOOD.replace('native = "native"', 'native = "./mine.py:Mine push=0.5"\nother = "native"')
    keys = []
    for folder in ("a", "b c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(MINE)
        study = study_files.load(write(tmp_path / folder, text))
        assert (study.cell("native").sampler.push, study.cell("native").sampler.nfe) == (0.5, 4)
        keys.append([unit.key for unit in resolve(study, ModelCache()).units])
    assert keys[0] == keys[1]
    (tmp_path / "a/mine.py").write_text(MINE.replace("How far.", "How far, in words."))
    study = study_files.load(tmp_path / "a/budgets.toml")
    changed = [unit.key for unit in resolve(study, ModelCache()).units]
    assert [one == other for one, other in zip(changed, keys[0], strict=True)] == [False, True, True, True] * 2


def test_a_prompt_file_stands_beside_the_study(tmp_path):
    (tmp_path / "prompts.txt").write_text("sand salt\nmoon mood\nwind wing\nrose rain\n")
    text = GOOD.replace('title = "Budgets"', 'prompts = {texts = "prompts.txt", tokens = 5, each = 2}')
    models, store = ModelCache(), Store(tmp_path / "store")
    study = study_files.load(write(tmp_path, text), models)
    run(study, store, local(models=models), models)
    plan = store.read_plan(plan_name(study))
    tokens = [store.read(key).tensors["tokens"] for key in plan["cells"][0]["keys"]]
    decode = models.model("exact:words").tokenizer.decode
    assert [decode(row[:5].tolist()) for part in tokens for row in part] == ["sand ", "sand ", "moon ", "moon "]
    study = study_files.load(write(tmp_path, text.replace("tokens = 5", "tokens = 50")), models)
    with pytest.raises(LimpetError, match="of 50 tokens or more; 'sand salt' is shorter"):
        run(study, store, local(models=models), models)
