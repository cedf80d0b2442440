"""Studies from files: a good one runs, and every mistake is named with its line before any work."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from study_cases import result_files
from limpet.errors import LimpetError
from limpet.experiments import ModelCache, Store, collect, report, run, study_files, units
from limpet.experiments.executors import local
from limpet.files import Toml
from limpet.samplers import CRS, Native

GOOD = """\
# Budgets on the source of words
title = "Budgets"
model = "exact:words"
shards = [1, 2]
samples = 2
metrics = ["entropy", "rep-4"]

[common]
nfe = 4
budget = 0.1

[arms]
native = "native"

[arms."CRS, small"]
sampler = "crs"
horizon = inf
count = 7

[arms.second]
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
    made = study_files.load(write(tmp_path, GOOD), models)
    assert made.name == "budgets"
    assert [cell.sampler for cell in made.cells] == [
        Native(nfe=4), CRS(nfe=4, budget=0.1, count=7), CRS(nfe=4, budget=0.1, values="second"),
    ]  # fmt: skip
    assert made.cell("second").replay == "CRS, small"
    run(made, store, local(models=models), models)
    results = collect(made, store)
    page = made.build_report(results)
    assert [contrast.name for contrast in page.contrasts] == [
        "nll: CRS, small less native", "entropy: second less CRS, small",
    ]  # fmt: skip
    assert page.contrasts[0].estimate.mean == pytest.approx(results.contrast("CRS, small", "native").mean)
    html = report.write_report(results, tmp_path / "report").read_text()
    assert "CRS, small" in html


def test_several_models_cross_the_arms(tmp_path):
    text = GOOD.replace('model = "exact:words"', 'models = ["exact:words", "exact:chain"]')
    made = study_files.load(write(tmp_path, text), ModelCache())
    assert len(made.cells) == 6
    assert made.cell("exact:chain/second").replay == "exact:chain/CRS, small"


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("samples = 2", "sampels = 2", 5, "no field 'sampels'; did you mean samples?"),
        ("samples = 2", 'samples = "two"', 5, "samples is 'two'; it takes a whole number"),
        ("samples = 2", "samples = 0", 12, "at least one"),
        ("shards = [1, 2]", "shards = 1", 4, "it takes a list"),
        ("shards = [1, 2]", "shards = [1, true]", 4, "it takes a list"),
        ("shards = [1, 2]", "shards = [1, 1]", 12, "there twice"),
        ("nfe = 4", "nfe = 1", 9, "native has nfe 1; it takes a whole number from 2"),
        ("nfe = 4", "nfe = 4.5", 9, "native has nfe 4.5; it takes a whole number from 2"),
        ("nfe = 4", "nef = 4", 9, "no arm has a parameter 'nef'; did you mean nfe?"),
        ("budget = 0.1", "budget = -1", 10, "crs has budget -1; it takes a number from 0"),
        ("budget = 0.1", "budget = nan", 10, "crs has budget nan; it takes a number from 0"),
        ('native = "native"', "native = {nfe = 4}", 13, "arm native names no sampler; it takes native, crs"),
        ('native = "native"', "native = 4", 13, "arm native names no sampler; it takes native, crs"),
        ('native = "native"', 'native = "natvie"', 13, "there is no sampler 'natvie'; there are native, crs"),
        ('native = "native"', 'native = "native top_p=2"', 13, "native has top_p 2.0; it takes a number above 0 to 1"),
        ('native = "native"', 'native = "native budget=.1"', 13, "native has no parameter 'budget'"),
        ('sampler = "crs"', "", 15, "arm CRS, small names no sampler"),
        ('sampler = "crs"', 'sampler = "cvs"', 16, "there is no sampler 'cvs'"),
        ('sampler = "crs"', 'sampler = "./none.py:None"', 16, "none.py cannot be read"),
        ("count = 7", "counts = 7", 18, "crs has no parameter 'counts'; did you mean count?"),
        ('values = "second"', 'values = "third"', 22, "crs has values 'third'; it takes one of argmax, second"),
        ('replay = "CRS, small"', 'replay = "CRS"', 23, "arm second replays 'CRS'"),
        ('against = "native"', 'against = "natvie"', 27, "against is 'natvie'"),
        ('measure = "entropy"', 'metric = "entropy"', 32, "no field 'metric'; it takes of, against, measure"),
        ('metrics = ["entropy", "rep-4"]', 'metrics = ["beauty"]', 12, "no metric 'beauty'"),
        ('model = "exact:words"', 'model = "exact:prose"', 3, "no exact source 'exact:prose'"),
        ('model = "exact:words"', 'model = "no-such-model"', 3, "no-such-model"),
        ('model = "exact:words"', "", 1, "either model, one name, or models"),
        ('title = "Budgets"', 'judges = ["no-such-judge"]', 2, "no-such-judge"),
        ('title = "Budgets"', 'judges = [{name = "mini-judge", convention = "ids"}]', 2, "where both have one"),
        ('title = "Budgets"', 'judges = [{name = "mini-judge", way = "ids"}]', 2, "no field 'way'; it takes name,"),
        ('title = "Budgets"', 'prompts = {texts = "a.txt", each = 2, token = 3}', 2, "'token'; did you mean tokens?"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(tmp_path, monkeypatch, old, new, line, says):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(LimpetError) as caught:
        study_files.load(path, ModelCache())
    assert f"{path}, line {line}: " in str(caught.value)
    assert says in str(caught.value)
    assert result_files(tmp_path) == {}


def test_a_file_whose_name_cannot_be_a_folders_needs_another(tmp_path):
    path = tmp_path / "my study.toml"
    path.write_text(GOOD)
    with pytest.raises(LimpetError, match="name is 'my study'; it takes letters"):
        study_files.load(path)
    path.write_text(f'name = "mine"\n{GOOD}')
    assert study_files.load(path).name == "mine"


def test_what_is_not_toml_is_said_with_its_line(tmp_path):
    with pytest.raises(LimpetError, match=r"not TOML.*line 3"):
        study_files.load(write(tmp_path, "samples = 2\nshards = [1\n = 3"))
    with pytest.raises(LimpetError, match="cannot be read"):
        study_files.load(tmp_path / "none.toml")


MINE = """
from dataclasses import dataclass
from limpet.samplers import Native, parameter

@dataclass(frozen=True)
class Mine(Native):
    push: float = parameter(0.0, "How far.", low=0)
"""


def test_a_sampler_stands_beside_the_file(tmp_path, monkeypatch):
    """Also where the study is run from elsewhere; its key is the same wherever both stand."""
    text = GOOD.replace('native = "native"', 'native = "./mine.py:Mine push=0.5"\nother = "native"')
    keys = []
    for folder in ("a", "b c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(MINE)
        made = study_files.load(write(tmp_path / folder, text))
        assert (made.cell("native").sampler.push, made.cell("native").sampler.nfe) == (0.5, 4)
        keys.append([unit.key for unit in units.resolve(made, ModelCache()).units])
    assert keys[0] == keys[1]
    (tmp_path / "a/mine.py").write_text(MINE.replace("How far.", "How far, in words."))
    changed = [unit.key for unit in units.resolve(study_files.load(tmp_path / "a/budgets.toml"), ModelCache()).units]
    assert [one == other for one, other in zip(changed, keys[0], strict=True)] == [False, True, True, True] * 2


def test_prompts_stand_beside_the_file(tmp_path):
    (tmp_path / "prompts.txt").write_text("sand salt\nmoon mood\nwind wing\nrose rain\n")
    text = GOOD.replace('title = "Budgets"', 'prompts = {texts = "prompts.txt", tokens = 5, each = 2}')
    models, store = ModelCache(), Store(tmp_path / "store")
    made = study_files.load(write(tmp_path, text), models)
    run(made, store, local(models=models), models)
    plan = store.read_plan(units.plan_name(made))
    tokens = [store.read(key).tensors["tokens"] for key in plan["cells"][0]["keys"]]
    texts = [models.model("exact:words").tokenizer.decode(row[:5].tolist()) for shard in tokens for row in shard]
    assert texts == ["sand ", "sand ", "moon ", "moon "]
    short = text.replace("tokens = 5", "tokens = 50")
    made = study_files.load(write(tmp_path, short), models)
    with pytest.raises(LimpetError, match="of 50 tokens or more; 'sand salt' is shorter"):
        run(made, store, local(models=models), models)


@dataclass(frozen=True)
class Part:
    size: int
    share: float = 0.5

    def __post_init__(self):
        if self.size < 1:
            raise LimpetError(f"size is {self.size}; it takes one or more")


@dataclass(frozen=True)
class Whole:
    kind: Literal["one", "two"]
    parts: dict[str, tuple[float, ...]]
    first: Part
    more: list[Part] = field(default_factory=list)
    last: Part | None = None


WHOLE = """\
kind = "one"
parts = {a = [1, 0.5]}
first = {size = 1, share = 1}

[[more]]
size = 2
"""


def test_toml_is_read_as_dataclasses(tmp_path):
    made = Toml(write(tmp_path, WHOLE), "").build(Whole)
    assert made == Whole("one", {"a": (1, 0.5)}, Part(1, 1), [Part(2)])


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('"one"', '"three"', 1, "kind is 'three'; it takes one of one, two"),
        ("[1, 0.5]", "[1, true]", 2, "a is [1, True]; it takes a list, each a number"),
        ("share = 1", 'share = "1"', 3, "share is '1'; it takes a number"),
        ("share = 1", "shre = 1", 3, "first has no field 'shre'; did you mean share?"),
        ("{size = 1, share = 1}", "{share = 1}", 3, "first has {'share': 1}; it takes size, of size, share"),
        ("first =", "firs =", 1, "it takes kind and parts and first, of kind, parts, first, more, last"),
        ("[[more]]\n", "\n\n", 7, "the file has no field 'size'"),
        ("size = 2", "size = 0", 5, "size is 0; it takes one or more"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_line(tmp_path, old, new, line, says):
    path = write(tmp_path, WHOLE.replace(old, new, 1))
    with pytest.raises(LimpetError) as caught:
        Toml(path, "").build(Whole)
    assert f"{path}, line {line}: " in str(caught.value)
    assert says in str(caught.value)
