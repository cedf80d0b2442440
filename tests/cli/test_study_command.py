"""`limpet study`: what it prints, what it writes, and its exit codes."""

import json

import pytest

from limpet import experiments
from limpet.cli.main import main
from limpet.cli.study import clock

FILE = """\
model = "exact:words"
seeds = [1, 2]
samples = 2
[common]
nfe = 4
[samplers]
native = "native"
CRS = "crs"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def study(file, tmp_path, capsys):
    """Run the command on the file; return its exit code, its JSON document and its messages."""

    def call(action, *options):
        code = main(["study", action, str(file), "--store", str(tmp_path / "store"), *map(str, options), "--json"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else None, printed.err

    return call


def test_run_status_and_report(study, tmp_path):
    folder = tmp_path / "report"
    assert "holds no run of mine" in study("status")[2]
    code, document, _ = study("run", "--part", "1/2")
    computed = document["mine"]["computed"]
    assert code == 0
    _, (status,), _ = study("status")
    assert (status["done"], status["units"]) == (computed, 4)
    code, _, message = study("report", "--out", folder)
    assert code == 2
    assert "units of mine are missing" in message
    assert study("run")[1]["mine"]["found"] == computed
    code, (document,), _ = study("report", "--out", folder)
    assert code == 0
    assert (folder / "mine/index.html").is_file()
    assert document["format"] == experiments.report.FORMAT
    assert set(document["cells"]) == {"native", "CRS"}


def test_a_report_is_built_again_from_its_numbers(study, tmp_path):
    study("run")
    study("report", "--out", tmp_path / "first")
    assert study("report", "--from", tmp_path / "first", "--out", tmp_path / "again")[0] == 0
    files = [path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*.*")]
    assert files
    for path in files:
        assert (tmp_path / "again" / path).read_bytes() == (tmp_path / "first" / path).read_bytes()
    assert "holds no report of mine" in study("report", "--from", tmp_path, "--out", tmp_path / "never")[2]


def test_a_report_of_another_format_is_refused_in_one_sentence(study, tmp_path):
    study("run")
    study("report", "--out", tmp_path / "first")
    numbers = tmp_path / "first/mine/report.json"
    document = json.loads(numbers.read_text())
    del document["format"]
    numbers.write_text(json.dumps(document))
    code, _, message = study("report", "--from", tmp_path / "first", "--out", tmp_path / "again")
    assert code == 2
    assert "has format 1, and this version of limpet reads format 2: run the study again" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--part", "one"), "i/n"),
        (("--part", "3/2"), "i from 1 to n"),
        (("--workers", "0", "--on", "processes"), "one or more"),
    ],
)
def test_wrong_options_are_reported_before_any_work(study, tmp_path, options, message):
    code, _, printed = study("run", *options)
    assert code == 2
    assert message in printed
    assert not (tmp_path / "store/units").exists()


def test_an_interrupted_run_is_resumed(study, monkeypatch):
    """Ctrl-C after one unit: exit code 130, what is finished is kept, and the rest is computed later."""
    honest = experiments.worker.Worker.work

    def interrupted(worker, group):
        for event in honest(worker, group):
            yield event
            raise KeyboardInterrupt

    monkeypatch.setattr(experiments.worker.Worker, "work", interrupted)
    code, _, message = study("run")
    assert code == 130
    assert "every finished unit is kept; the same command continues" in message
    monkeypatch.undo()
    document = study("run")[1]["mine"]
    assert (document["found"], document["computed"]) == (1, 3)


def test_durations():
    assert [clock(seconds) for seconds in (5, 65.4, 3661)] == ["00:05", "01:05", "1:01:01"]
