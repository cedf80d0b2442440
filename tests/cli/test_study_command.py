"""`limpet study`: what it prints, what it writes, and with which exit code it ends."""

import json
import signal
import subprocess
import sys
import time

import pytest
import tyro

from limpet.cli import study as command
from limpet.errors import LimpetError

FILE = """\
model = "exact:words"
shards = [1, 2]
samples = 2
[common]
nfe = 4
[arms]
native = "native"
CRS = "crs"
"""


def limpet(*arguments):
    return tyro.extras.subcommand_cli_from_dict({"study": command.run}, args=["study", *map(str, arguments)])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path


def test_list(capfd):
    assert limpet("list", "--json") == 0
    listed = json.loads(capfd.readouterr().out)
    assert {"nfe-scaling", "frontier", "factorial"} <= set(listed["studies"])
    assert {"paper", "mini", "smoke"} <= set(listed["presets"])
    assert limpet("list") == 0
    assert "nfe-scaling" in capfd.readouterr().out


def test_run_status_report(file, tmp_path, capfd):
    store = ("--store", tmp_path / "store")
    with pytest.raises(LimpetError, match="holds no run of mine"):
        limpet("status", file, *store)
    assert limpet("run", file, *store, "--shard", "1/2", "--json") == 0
    first = json.loads(capfd.readouterr().out)["mine"]
    assert limpet("status", file, *store, "--json") == 0
    status = json.loads(capfd.readouterr().out)[0]
    assert (status["done"], status["units"]) == (first["computed"], 4)
    with pytest.raises(LimpetError, match="units of mine are missing"):
        limpet("report", file, *store, "--out", tmp_path / "report")
    assert limpet("run", file, *store, "--json") == 0
    assert json.loads(capfd.readouterr().out)["mine"]["found"] == first["computed"]
    assert limpet("report", file, *store, "--out", tmp_path / "report") == 0
    assert (tmp_path / "report/mine/index.html").is_file()
    capfd.readouterr()
    assert limpet("report", file, *store, "--out", tmp_path / "report", "--json") == 0
    assert set(json.loads(capfd.readouterr().out)[0]["cells"]) == {"native", "CRS"}


def test_a_report_is_written_anew_from_its_numbers(file, tmp_path, capfd):
    limpet("run", file, "--store", tmp_path / "store")
    limpet("report", file, "--store", tmp_path / "store", "--out", tmp_path / "first")
    assert limpet("report", file, "--from", tmp_path / "first", "--out", tmp_path / "again") == 0
    kept = [path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*.*")]
    assert kept
    for path in kept:
        assert (tmp_path / "again" / path).read_bytes() == (tmp_path / "first" / path).read_bytes()
    with pytest.raises(LimpetError, match="holds no report of mine"):
        limpet("report", file, "--from", tmp_path, "--out", tmp_path / "never")


def test_what_is_wrong_is_said_before_any_work(file, tmp_path):
    store = tmp_path / "store"
    for arguments, says in (
        (("run", "table-12"), "no study"),
        (("run", "values", "--preset", "huge"), "no preset"),
        (("run", file, "--shard", "one"), "i/n"),
        (("run", file, "--shard", "3/2"), "i from 1 to n"),
        (("run", file, "--workers", "0"), "one or more"),
        (("run", "prefix", "--preset", "mini", "--prompts", tmp_path / "none.txt"), "cannot be read"),
    ):
        with pytest.raises(LimpetError, match=says):
            limpet(*arguments, "--store", store)
    assert not (store / "units").exists()


def test_an_interrupt_can_be_gone_on_from(tmp_path):
    """Ctrl-C in the middle of a longer run: exit code 130 from the command line, and the rest is made later."""
    file = tmp_path / "long.toml"
    file.write_text(FILE.replace("[1, 2]", str(list(range(200)))))
    script = "import sys; from limpet.cli.main import main; sys.exit(main())"
    arguments = ["study", "run", str(file), "--store", str(tmp_path / "store"), "--threads", "1"]
    child = subprocess.Popen([sys.executable, "-c", script, *arguments], stderr=subprocess.PIPE, text=True)
    while child.poll() is None and not (tmp_path / "store/units").exists():
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    said = child.communicate()[1]
    assert child.returncode == 130
    assert "every finished unit is kept" in said
    done = len(list((tmp_path / "store/units").glob("*/*/rows.json")))
    assert 0 <= done < 400
    assert not list((tmp_path / "store/partial").glob("*"))
