"""Studies from files: a good one runs, and every mistake is named with its line before any work."""

import pytest

from lab_cases import contents
from limpet.errors import LimpetError
from limpet.lab import Bench, Store, collect, files, report, run
from limpet.lab.places.local import local

GOOD = """\
# Budgets on the source of words
title = "Budgets"
model = "exact:words"
shards = [1, 2]
samples = 2
metrics = ["entropy", "rep-4"]

[policy]
nfe = 4
horizon = 0

[arms.native]

[arms."CRS, small"]
horizon = inf
budget = 0.1

[arms.second]
horizon = inf
budget = 0.1
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
    bench, store = Bench(), Store(tmp_path / "store")
    made = files.load(write(tmp_path, GOOD), bench)
    assert made.name == "budgets"
    assert [cell.policy.horizon for cell in made.cells] == [0, None, None]
    assert made.cell("second").replay == "CRS, small"
    assert made.cell("second").policy.nfe == 4
    run(made, store, local(bench=bench), bench)
    results = collect(made, store)
    page = made.show(results)
    assert [contrast.name for contrast in page.contrasts] == [
        "nll: CRS, small less native", "entropy: second less CRS, small",
    ]  # fmt: skip
    assert page.contrasts[0].estimate.mean == pytest.approx(results.contrast("CRS, small", "native").mean)
    html = report.write(results, tmp_path / "report").read_text()
    assert "CRS, small" in html


def test_several_models_cross_the_arms(tmp_path):
    text = GOOD.replace('model = "exact:words"', 'models = ["exact:words", "exact:chain"]')
    made = files.load(write(tmp_path, text), Bench())
    assert len(made.cells) == 6
    assert made.cell("exact:chain/second").replay == "exact:chain/CRS, small"


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("samples = 2", "sampels = 2", 5, "no field 'sampels' here; did you mean samples?"),
        ("samples = 2", 'samples = "two"', 5, "samples is 'two'; it takes a whole number"),
        ("samples = 2", "samples = 0", 12, "at least one"),
        ("shards = [1, 2]", "shards = 1", 4, "it takes a list"),
        ("shards = [1, 2]", "shards = [1, true]", 4, "it takes a list"),
        ("shards = [1, 2]", "shards = [1, 1]", 12, "there twice"),
        ("nfe = 4", "nfe = 1", 9, "policy field nfe is 1"),
        ("nfe = 4", "nef = 4", 9, "no field 'nef'; did you mean nfe?"),
        ("budget = 0.1\n\n", "budget = -1\n\n", 16, "policy field budget is -1"),
        ('values = "second"', 'values = "third"', 21, "policy field values is 'third'"),
        ('replay = "CRS, small"', 'replay = "CRS"', 22, "arm second replays 'CRS'"),
        ('against = "native"', 'against = "natvie"', 26, "against is 'natvie'"),
        ('measure = "entropy"', 'metric = "entropy"', 31, "no field 'metric' here; it takes of, against, measure"),
        ('metrics = ["entropy", "rep-4"]', 'metrics = ["beauty"]', 12, "no metric 'beauty'"),
        ('model = "exact:words"', 'model = "exact:prose"', 3, "no exact source 'exact:prose'"),
        ('model = "exact:words"', 'model = "no-such-model"', 3, "no-such-model"),
        ('model = "exact:words"', "", 1, "either model, one name, or models"),
        ('title = "Budgets"', 'judges = ["no-such-judge"]', 2, "no-such-judge"),
        ('title = "Budgets"', 'judges = [{name = "mini-judge", way = "ids"}]', 2, "no field 'way' here"),
        ('title = "Budgets"', 'prompts = {texts = "a.txt", each = 2, token = 3}', 2, "no field 'token' here"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(tmp_path, monkeypatch, old, new, line, says):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(LimpetError) as caught:
        files.load(path, Bench())
    assert f"{path}, line {line}: " in str(caught.value)
    assert says in str(caught.value)
    assert contents(tmp_path) == {}


def test_what_is_not_toml_is_said_with_its_line(tmp_path):
    with pytest.raises(LimpetError, match=r"not TOML.*line 3"):
        files.load(write(tmp_path, "samples = 2\nshards = [1\n = 3"))
    with pytest.raises(LimpetError, match="cannot be read"):
        files.load(tmp_path / "none.toml")


def test_prompts_stand_beside_the_file(tmp_path):
    (tmp_path / "prompts.txt").write_text("sand salt\nmoon mood\nwind wing\nrose rain\n")
    text = GOOD.replace('title = "Budgets"', 'prompts = {texts = "prompts.txt", tokens = 5, each = 2}')
    bench, store = Bench(), Store(tmp_path / "store")
    made = files.load(write(tmp_path, text), bench)
    run(made, store, local(bench=bench), bench)
    plan = store.read_plan("budgets")
    tokens = [store.read(key).tensors["tokens"] for key in plan["cells"][0]["keys"]]
    texts = [bench.model("exact:words").tokenizer.decode(row[:5].tolist()) for shard in tokens for row in shard]
    assert texts == ["sand ", "sand ", "moon ", "moon "]
    short = text.replace("tokens = 5", "tokens = 50")
    made = files.load(write(tmp_path, short), bench)
    with pytest.raises(LimpetError, match="of 50 tokens or more; 'sand salt' is shorter"):
        run(made, store, local(bench=bench), bench)
