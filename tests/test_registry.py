"""Names to things: built in, of another package, in a file. What is wrong with any of them is one sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import limpet
from limpet import registry, samplers
from limpet.cli import main
from limpet.errors import LimpetError
from limpet.models import model_files
from limpet.models.loading import GROUP
from limpet.samplers.base import BUILTIN

pytestmark = pytest.mark.usefixtures("offline")

SAMPLER = """
from dataclasses import dataclass
import limpet

@dataclass(frozen=True)
class Mine(limpet.Native):
    colour: str = limpet.param("blue", "No matter.")
"""
MODEL = """
import limpet
from limpet.models.exact_sources import source

def toy(folder=None, *, device=None, precision="float32", size=2):
    model = source("exact:verses")
    model.name, model.info = "toy", {"folder": str(folder), "device": str(device), "precision": precision, "size": size}
    return model
"""


def refused(function, *arguments, match: str, **options) -> str:
    """One sentence, soon."""
    with pytest.raises(LimpetError, match=match) as caught:
        function(*arguments, **options)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 500
    return said


# Files


def test_a_file_is_run_once_for_each_content_it_has(here):
    Path("mine.py").write_text(SAMPLER)
    first = samplers.find("./mine.py:Mine")
    assert samplers.find(str(here / "mine.py:Mine")) is first
    Path("mine.py").write_text(SAMPLER.replace("blue", "green"))
    second = samplers.find("./mine.py:Mine")
    assert (first().colour, second().colour) == ("blue", "green")
    Path("copy.py").write_text(SAMPLER.replace("blue", "green"))
    assert registry.code_digest(samplers.find("./copy.py:Mine")) == registry.code_digest(second)
    assert registry.code_digest(limpet.CRS) is None


def test_what_is_in_a_file_has_its_whole_path_for_a_name(here, tmp_path, monkeypatch):
    Path("mine.py").write_text(SAMPLER)
    made = samplers.parse("./mine.py:Mine nfe=4 colour=red")[1]
    monkeypatch.chdir(tmp_path)
    assert made.to_dict()["sampler"] == f"{here / 'mine.py'}:Mine"
    assert samplers.from_dict(made.to_dict()) == made


FILES = {
    "it is not there": (None, "Mine", "mine.py cannot be read .*No such file"),
    "it is no Python": ("what is this?", "Mine", r"cannot be run \(SyntaxError: .*line 1"),
    "it is no text": ("\0\x01", "Mine", "cannot be run"),
    "it raises": ("x = 1\n\nraise RuntimeError('one\\n\\ntwo')", "Mine", r"\(RuntimeError: one two in line 3\)"),
    "it raises a megabyte": ("raise RuntimeError('x' * 2**20)", "Mine", "RuntimeError: xxx"),
    "it raises below": ("def f():\n    1 / 0\nf()", "Mine", "ZeroDivisionError: division by zero in line 2"),
    "it ends the program": ("import sys\nsys.exit(3)", "Mine", r"SystemExit: 3 in line 2"),
    "it imports what is not there": ("import no_such_thing", "Mine", "ModuleNotFoundError.* in line 1"),
    "it has no such name": ("Yours = 3", "Mine", "mine.py has no 'Mine'"),
    "it names nothing": ("Yours = 3", "", "mine.py has no ''"),
}
NO_SAMPLERS = {
    "a number": "Mine = 3",
    "a function": "def Mine(): ...",
    "a class of its own": "class Mine: ...",
    "the protocol": "from limpet import Sampler as Mine",
    "no dataclass": "import limpet\nclass Mine(limpet.Sampler):\n    nfe: int = 3",
    "not frozen": "import limpet, dataclasses\n@dataclasses.dataclass\nclass Mine(limpet.Sampler):\n    nfe: int = 3",
    "an instance": "import limpet\nMine = limpet.Native()",
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("find", [samplers.find, limpet.load])
def test_a_bad_file_is_one_sentence(here, kind, find):
    text, attribute, match = FILES[kind]
    if text is not None:
        Path("mine.py").write_text(text)
    before = set(sys.modules)
    for _ in range(2):  # what failed is not kept
        refused(find, f"./mine.py:{attribute}", match=match)
    assert text is None or "Yours" in text or not [name for name in set(sys.modules) - before if "limpet_file" in name]


def test_a_folder_or_nothing_in_place_of_a_file_is_one_sentence(here):
    Path("mine.py").mkdir()
    refused(samplers.find, "./mine.py:Mine", match="mine.py cannot be read")
    refused(samplers.find, "./mi\0ne.py:Mine", match="cannot be read")
    refused(samplers.find, "~no-such-user/mine.py:Mine", match="cannot be read")


@pytest.mark.parametrize("kind", NO_SAMPLERS)
def test_what_is_no_sampler_is_one_sentence(here, kind):
    Path("mine.py").write_text(NO_SAMPLERS[kind])
    refused(samplers.find, "./mine.py:Mine", match="is no sampler: it takes a frozen dataclass")
    assert main.main(["sample", "--model", "exact:words", "--sampler", "./mine.py:Mine"]) == 2


@pytest.mark.parametrize("hint", ["list[int]", "int | str", "dict", "'nonsense'", "complex | None"])
def test_a_knob_of_another_kind_is_one_sentence(here, hint):
    Path("mine.py").write_text(SAMPLER + f"    strange: {hint} = None\n")
    assert main.main(["sample", "--model", "exact:words", "--sampler", "./mine.py:Mine"]) == 2
    refused(samplers.parse, "./mine.py:Mine", match="strange|nonsense")


# Packages


def test_a_package_offers_by_name(package):
    points = "[limpet.samplers]\nmine = theirs_a:Mine\nnested = theirs_a:Holder.Mine [fast]\n"
    holder = "class Holder:\n    Mine = Mine\n"
    package(points + "[limpet.models]\ntoy = theirs_b:toy\n", theirs_a=SAMPLER + holder, theirs_b=MODEL)
    assert samplers.find("mine")(nfe=4).to_dict()["sampler"] == "mine"
    assert samplers.find("nested") is samplers.find("mine")
    assert list(samplers.available()) == [*BUILTIN, "mine", "nested"]
    assert limpet.load("toy").name == "toy"


def test_built_in_names_and_paths_come_first(package):
    points = (
        "[limpet.samplers]\ncrs = theirs_a:Mine\n"
        "[limpet.models]\nduo = theirs_b:toy\nmini = theirs_b:toy\ntoy = theirs_b:toy\nexact:words = theirs_b:toy\n"
    )
    package(points, theirs_a=SAMPLER, theirs_b=MODEL)
    assert samplers.find("crs") is limpet.CRS
    assert limpet.load("mini", device="cpu").info["source"] == "built in"
    assert limpet.load("exact:words").name == "exact:words"
    assert limpet.load("toy").info["folder"] == "None"
    Path("toy").mkdir()
    refused(limpet.load, "toy", match="toy holds no model")


BROKEN = {
    "a module that is not there": ("no_such_module:Mine", r"is no_such_module:Mine, which cannot be loaded"),
    "an attribute that is not there": ("theirs_a:Nobody", "AttributeError"),
    "no attribute": ("theirs_a", "is no sampler|is a module"),
    "a module that raises": ("theirs_bad:Mine", "RuntimeError: no, I will not"),
    "a module that leaves": ("theirs_leaves:Mine", "SystemExit"),
    "what is nothing of the kind": ("theirs_a:NUMBER", "is no sampler|is a int"),
    "no module at all": ("a b c", "cannot be loaded"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_is_one_sentence_and_hides_nothing(package, capsys, kind):
    target, match = BROKEN[kind]
    points = f"[limpet.samplers]\nbad = {target}\ngood = theirs_a:Mine\n[limpet.models]\nbad = {target}\n"
    package(
        points,
        theirs_a=SAMPLER + "NUMBER = 3\n", theirs_bad="raise RuntimeError('no,\\nI will not')\n",
        theirs_leaves="import sys\nsys.exit()\n",
    )  # fmt: skip
    refused(samplers.find, "bad", match=match)
    refused(limpet.load, "bad", match=match)
    assert list(samplers.available()) == [*BUILTIN, "good"]
    assert main.main(["samplers", "--json"]) == 0
    shown = capsys.readouterr()
    assert [one["name"] for one in json.loads(shown.out)] == [*BUILTIN, "good"]
    assert "bad" in shown.err
    assert main.main(["samplers", "bad"]) == 2


def test_names_that_lead_nowhere_are_one_sentence():
    refused(
        samplers.find, "psy", match=f"there is no sampler 'psy'; there are {', '.join(BUILTIN)}, and ./file.py:Name"
    )
    refused(limpet.load, "psy", match=r"nor offered by another package \(none offers any\)")


# Models


def test_a_factory_gets_what_was_asked_for(here):
    Path("my.py").write_text(MODEL)
    model = limpet.load("./my.py:toy", device="cpu", precision="bfloat16", size=5)
    assert model.info == {"folder": "None", "device": "cpu", "precision": "bfloat16", "size": 5}
    said = refused(limpet.load, "./my.py:toy", weights="raw", match="cannot be asked for a model")
    assert "unexpected keyword argument 'weights'" in said
    assert main.main(["info", "./my.py:toy", "--weights", "raw"]) == 2
    refused(limpet.load, "./my.py:toy", revision="main", match="revision 'main' is for names on the hub")
    with pytest.raises(LimpetError, match="device 'abacus' cannot be used"):
        limpet.load("./my.py:toy", device="abacus")


@pytest.mark.parametrize("origin", ["folder", "file", "hub"])
def test_a_folder_is_made_by_its_kind(here, package, monkeypatch, origin):
    package("[limpet.models]\ntoy = theirs_b:toy\nToy2 = theirs_b:toy\n", theirs_b=MODEL)
    folder, name = Path("runs/one"), "runs/one"
    if origin == "hub":
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here))
        (here / "models--owner--one" / "refs").mkdir(parents=True)
        (here / "models--owner--one" / "refs" / "main").write_text("f" * 40)
        folder, name = here / "models--owner--one" / "snapshots" / ("f" * 40), "owner/one"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "toy", "schedule": ["its", "own"]}')
    if origin == "file":
        name = "runs/one/some.weights"
        Path(name).touch()
    model = limpet.load(name, device="cpu", size=3)
    source = f"hub, commit {'f' * 40}" if origin == "hub" else origin
    path = name if origin == "file" else str(folder)
    assert model.name == name
    assert model.info == {"source": source, "folder": path, "device": "cpu", "precision": "float32", "size": 3}
    (folder / "config.json").write_text('{"model_type": "Toy2"}')
    assert limpet.load(name).name == name
    (folder / "config.json").write_text('{"model_type": "tow"}')
    said = refused(limpet.load, name, match="model_type 'tow', and the families known here are toy, Toy2, duo")
    assert GROUP in said


NO_MODELS = {
    "it gives nothing": ("def toy(folder, **options): ...", "made a NoneType, and a model is a limpet.Denoiser"),
    "it gives a network": ("import torch\ndef toy(folder, **options): return torch.nn.Linear(2, 2)", "made a Linear"),
    "it raises": ("def toy(folder, **options):\n    return {}['w']", r"made no model \(KeyError: 'w' in line 2\)"),
    "it takes nothing": ("def toy(): ...", "cannot be asked for a model .too many positional"),
    "it takes no device": ("def toy(folder=None): ...", "unexpected keyword argument 'device'"),
    "it says not what it takes": ("toy = dict", "cannot be asked for a model"),
    "it is no function": ("toy = 'a model'", "is a str, and a model comes from a function"),
    "it has an error of its own": (
        "from limpet import LimpetError\ndef toy(folder, **options): raise LimpetError('no folder')", "^no folder$"
    ),
    "it lacks a head": (
        "import limpet\nclass toy(limpet.Denoiser):\n    def __init__(self, folder, **options): ...\n    body = None",
        "made no model .TypeError: .*abstract method head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_MODELS)
def test_what_makes_no_model_is_one_sentence(here, kind):
    text, match = NO_MODELS[kind]
    Path("my.py").write_text(text)
    refused(limpet.load, "./my.py:toy", match=match)


@pytest.mark.parametrize(
    ("field", "value", "takes"),
    [
        ("name", None, "a text"),
        ("digest", "", "a text that changes with its output"),
        ("vocab_size", 1, "a whole number from 2"),
        ("vocab_size", 27.0, "a whole number from 2"),
        ("length", 0, "a whole number from 1"),
        ("predicts", "noise", '"leave-one-out" or "posterior"'),
        ("schedule", "cosine", "a limpet.process.Schedule"),
        ("precision", None, "a text, such as float32"),
    ],
)
def test_a_model_that_says_nothing_sensible_of_itself_is_one_sentence(here, field, value, takes):
    Path("my.py").write_text(MODEL.replace("    return model", f"    model.{field} = {value!r}\n    return model"))
    refused(limpet.load, "./my.py:toy", match=f"has {field} {value!r}; it takes {takes}")
    model = limpet.load("exact:verses")
    setattr(model, field, value)
    refused(limpet.sample, model, n=1, match=f"has {field} {value!r}; it takes {takes}")


def test_only_models_are_built_in():
    assert model_files.builtin_names() == ["mini", "mini-distilled"]
