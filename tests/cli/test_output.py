"""What is written: through whatever is no file, in place of nothing but a file, and a full disk in one sentence."""

import io
import json
import os
import stat
import threading
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load

import limpet
from forked import run
from limpet.cli.main import main
from limpet.errors import LimpetError
from limpet.files import atomic_path, write_file
from limpet.models.tensor_files import write_tensors
from limpet.recording.trajectory import Trajectory

FEW = ["sample", "--model", "exact:words", "--nfe", "2", "--n", "1"]


def sentence(output):
    """The one that a command printed."""
    (line,) = [line for line in output.splitlines() if line.startswith("limpet:")]
    assert "Traceback" not in output
    assert "Exception ignored" not in output
    return line


@pytest.fixture
def full(tmp_path):
    """A device on which nothing fits, of the test's own."""
    path = tmp_path / "full"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        path.write_bytes(b"")
    except OSError:
        pytest.skip("no device can be made here")
    return path


def test_a_device_stays_one(full):
    """safetensors would have put a file in its place."""
    for write in (
        lambda: write_file(full, b"x" * 9999),
        lambda: write_tensors(full, {"a": torch.zeros(3)}),
        lambda: limpet.recording.trajectory.record(limpet.load("exact:chain"), limpet.Native(nfe=2)).save(full),
    ):
        with pytest.raises(LimpetError, match="written"):
            write()
        assert stat.S_ISCHR(full.stat().st_mode)
    assert not [path for path in full.parent.iterdir() if path != full]


def test_a_pipe_is_written_through(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    for write, check in (
        (lambda: write_file(pipe, "text"), lambda data: data == b"text"),
        (lambda: write_tensors(pipe, {"a": torch.ones(3)}), lambda data: load(data)["a"].tolist() == [1, 1, 1]),
    ):
        reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
        reader.start()
        write()
        reader.join()
        assert check(got.pop())
        assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_one_and_a_folder_is_a_sentence(tmp_path):
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "new"
    with pytest.raises(LimpetError, match="cannot be written"):
        write_file(tmp_path, "x")


def test_what_failed_leaves_the_old_file(tmp_path):
    (tmp_path / "a").write_text("old")
    with suppress(OSError), atomic_path(tmp_path / "a") as partial:
        partial.write_text("half")
        raise OSError("stop")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("arguments", [FEW, [*FEW, "--json"], ["info", "exact:words", "--json"], ["samplers"]], ids=str)
def test_standard_output_that_is_full_is_one_sentence(full, arguments):
    with full.open("w") as out:
        done = run(*arguments, stdout=out)
    assert done.returncode == 2
    assert "No space left" in sentence(done.stderr)


def test_samples_outlive_the_disk(full):
    """They are printed where they cannot be written."""
    done = run(*FEW, "--out", full)
    assert done.returncode == 2
    assert "cannot be written" in sentence(done.stderr)
    assert done.stdout.startswith('{"text": ')


STRANGE = """
from limpet.models.exact_sources import source

class Tokenizer:
    def encode(self, text):
        return [1] * len(text)

    def decode(self, ids):
        return "é → 𝄞" if ids else ""

def make(folder=None, **options):
    model = source("exact:words")
    model.name, model.tokenizer = "töy →", Tokenizer()
    return model
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_standard_output_that_lacks_letters_has_them_escaped(tmp_path, encoding):
    """UnicodeEncodeError in every command before. JSON stays valid, and reads as UTF-8."""
    (tmp_path / "strange.py").write_text(STRANGE, "utf-8")
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONIOENCODING": encoding}, "encoding": encoding}
    call = ["sample", "--model", "./strange.py:make", "--nfe", "2", "--n", "1"]
    words = {"ascii": r"\u00e9 \u2192 \ud834\udd1e", "latin-1": r"é \u2192 \ud834\udd1e"}[encoding]
    assert run(*call, **how).stdout == words + "\n\f\n"
    for request, name, value in ((call, "text", "é → 𝄞"), (["info", "./strange.py:make"], "name", "töy →")):
        printed = run(*request, "--json", **how).stdout
        assert printed.isascii()
        assert json.loads(printed)[name] == value


@pytest.mark.parametrize("closed", ["1", "1 2", "0 1 2"])
def test_closed_standard_streams_are_the_null_device(tmp_path, closed):
    """AttributeError in every command before. What is opened later does not take their place."""
    done = run(*FEW, "--out", "x.jsonl", closed=closed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["seed"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == [
        limpet.generation.SEED
    ]


LONG = "a" * 300
NO_PATHS = [
    *([*FEW, option, path] for option in ("--out", "--record", "--prompts") for path in (LONG, "~no-such-user/x")),
    *([*FEW, "--sampler", path] for path in (f"{LONG}.toml", f"./{LONG}.py:Mine", "~no-such-user/x.toml")),
    *([command, path] for command in ("info", "check", "score", "view") for path in (LONG, "~no-such-user/x")),
    ["info", f"./{LONG}/x.ckpt"],
    ["sample", "--model", "sudoku", "--nfe", "2", "--n", "1", "--prompt", LONG],
    ["sample", "--model", "sudoku", "--nfe", "2", "--n", "1", "--prompt", "~no-such-user/x"],
    [*FEW, "--fix", "9" * 5000 + "=1"],
    [*FEW, "--fix", "1=" + "9" * 5000],
    [*FEW, "--fix", '1="' + "9" * 5000 + '"'],
]


@pytest.mark.parametrize("arguments", NO_PATHS, ids=lambda arguments: " ".join(arguments[-2:])[:30])
def test_what_can_be_no_path_or_id_is_one_sentence(tmp_path, monkeypatch, capsys, arguments):
    """OSError for long names and RuntimeError for unknown users before."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert len(sentence(capsys.readouterr().err)) < 500
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "arguments",
    [
        [*FEW, "--out", "x.jsonl"],
        [*FEW, "--record", "x.limpet"],
        ["study", "run", "study.toml", "--store", "store"],
    ],
    ids=lambda arguments: arguments[0] + arguments[-2],
)  # fmt: skip
def test_a_disk_that_takes_no_more_is_one_sentence_in_every_command(tmp_path, arguments):
    lines = [
        'title = "Small"',
        'model = "exact:words"',
        "seeds = [1, 2]",
        "samples = 2",
        "[samplers]",
        'a = "native nfe=2"',
    ]
    (tmp_path / "study.toml").write_text("\n".join(lines))
    done = run(*arguments, cwd=tmp_path, most=100)
    assert done.returncode == 2, done.stderr
    assert "written" in sentence(done.stderr)
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".partial")]


def test_a_trajectory_through_memory_is_the_file(tmp_path):
    path = limpet.recording.trajectory.record(limpet.load("exact:chain"), limpet.Native(nfe=2))
    path.save(tmp_path / "x.limpet")
    assert Trajectory.load(tmp_path / "x.limpet").to_bytes() == io.BytesIO(path.to_bytes()).getvalue()
