"""Objects by name: built in, of another package, in a file. Copies, pickles and digests of what is found."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import limpet
from limpet import registry, samplers
from limpet.cli import main
from limpet.errors import LimpetError
from limpet.models import model_files
from limpet.models.loading import GROUP
from limpet.samplers.builtin import BUILTIN

pytestmark = pytest.mark.usefixtures("offline")

SAMPLER = """
from dataclasses import dataclass
import limpet

@dataclass(frozen=True)
class Mine(limpet.Native):
    colour: str = limpet.param("blue", "No effect.")
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
    """The one sentence in which a call is refused."""
    with pytest.raises(LimpetError, match=match) as caught:
        function(*arguments, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 500
    return sentence


# Files


def test_a_file_is_run_once_for_each_content_it_has(here):
    Path("mine.py").write_text(SAMPLER)
    first = samplers.find("./mine.py:Mine")
    assert samplers.find(str(here / "mine.py:Mine")) is first
    Path("mine.py").write_text(SAMPLER.replace("blue", "green"))
    second = samplers.find("./mine.py:Mine")
    assert (first().colour, second().colour) == ("blue", "green")


def test_the_name_of_a_class_in_a_file_has_the_whole_path(here, tmp_path, monkeypatch):
    Path("mine.py").write_text(SAMPLER + "class Holder:\n    Inner = Mine\n")
    sampler = samplers.parse("./mine.py:Mine nfe=4 colour=red")[1]
    assert samplers.find("./mine.py:Holder.Inner") is type(sampler)
    monkeypatch.chdir(tmp_path)
    assert sampler.to_dict()["sampler"] == f"{here / 'mine.py'}:Mine"
    assert samplers.from_dict(sampler.to_dict()) == sampler


def test_a_module_that_python_imported_is_not_run_again(here, monkeypatch):
    Path("mine.py").write_text(SAMPLER)
    monkeypatch.syspath_prepend(here)
    import mine

    sampler = mine.Mine(nfe=4)
    assert sampler.name == f"{here / 'mine.py'}:Mine"
    assert samplers.find(sampler.name) is mine.Mine
    assert samplers.from_dict(sampler.to_dict()) == sampler


def test_a_pickle_of_a_file_that_was_changed_says_so(here):
    Path("mine.py").write_text(SAMPLER)
    content = pickle.dumps(samplers.parse("./mine.py:Mine")[1])
    module = samplers.find("./mine.py:Mine").__module__
    Path("mine.py").write_text(SAMPLER.replace("blue", "green"))
    del sys.modules[module]
    with pytest.raises(ModuleNotFoundError, match=r"mine\.py is not there or was changed after it was loaded"):
        pickle.loads(content)


COPIES = """
import copy, multiprocessing, pickle, sys
from dataclasses import dataclass
import limpet
from limpet import samplers

print("this script runs as", __name__, file=sys.stderr)

@dataclass(frozen=True)
class Own(limpet.Native):
    colour: str = limpet.param("blue", "No effect.")

def describe(sampler):
    return repr(sampler), sampler.to_dict(), samplers.from_dict(sampler.to_dict()) == sampler

if __name__ == "__main__":
    import mine
    every = [Own(nfe=4, colour="red"), mine.Mine(nfe=4), samplers.parse("./other.py:Mine nfe=4")[1]]
    for one in every:
        for twin in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert twin == one and type(twin) is type(one), one
        assert samplers.from_dict(one.to_dict()) == one
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(describe, every) == [describe(one) for one in every]
    print("done")
"""


def test_samplers_of_scripts_modules_and_files_copy_pickle_and_reach_other_processes(here):
    """A script is run once in a process, whatever is copied, pickled or found by name."""
    for name in ("mine.py", "other.py"):
        Path(name).write_text(SAMPLER)
    Path("script.py").write_text(COPIES)
    found = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=False)
    assert found.stdout == "done\n", found.stderr
    assert [line.split()[-1] for line in found.stderr.splitlines()] == ["__main__", "__mp_main__"]


CELL = """
import copy, pickle
import limpet, torch
from limpet import registry

class Flat(limpet.Denoiser):
    name, digest, vocab_size, length = "flat", "1", 3, 4

    def backbone(self, inputs):
        return torch.zeros(*inputs.tokens.shape, 1)

    def head(self, features):
        return features.expand(*features.shape[:-1], 3)

mine = Mine(nfe=4)
for twin in (copy.copy(mine), copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
    assert twin == mine
samples = limpet.sample(Flat(), mine, n=2)
samples.save("samples.jsonl")
assert limpet.Samples.load("samples.jsonl", mine) == samples
assert registry.code_digest(Mine) != registry.code_digest(Flat)
print(mine.name, mine.to_dict()["sampler"], mine.caption, samples[0].sampler["sampler"])
"""
NO_NAME = "Mine is not at the top level of a file, so it cannot be found again by name"


@pytest.mark.parametrize("form", ["-c", pytest.param("standard input", marks=pytest.mark.more), "ipython"])
def test_classes_without_a_file_work_and_have_their_own_names(here, form):
    """One warning says that the name cannot be found again."""
    if form == "ipython":
        pytest.importorskip("IPython")
    text = SAMPLER + CELL
    call = {"-c": ["-c", text], "standard input": ["-"], "ipython": ["-m", "IPython", "-c", text]}[form]
    found = subprocess.run(
        [sys.executable, *call], input=text if form == "standard input" else "", capture_output=True, text=True,
        check=False, env={**os.environ, "IPYTHONDIR": str(here)},
    )  # fmt: skip
    assert found.stdout.strip() == "Mine Mine Mine Mine", found.stderr
    assert found.stderr.count(NO_NAME) == 1


@pytest.mark.parametrize("file", [None, "/nowhere/launcher.py"])
def test_a_cell_that_is_run_twice_warns_once(here, monkeypatch, capsys, file):
    """As in a notebook: the module is `__main__`, and each cell has a file name that leads nowhere."""
    notebook = ModuleType("__main__")
    if file is not None:
        notebook.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    registry._warn_of_no_name.cache_clear()
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            exec(compile(SAMPLER + CELL, "/tmp/ipykernel_1/123.py", "exec"), notebook.__dict__)
    assert [str(warning.message) for warning in caught] == [NO_NAME]
    assert capsys.readouterr().out == "Mine Mine Mine Mine\n" * 2


def test_the_digest_of_code_is_of_its_file_and_of_what_it_imports_beside_it(here):
    Path("mine.py").write_text("import helper, json\n" + SAMPLER)
    Path("copy.py").write_text("import helper, json\n" + SAMPLER)
    Path("helper.py").write_text("from more.one import x\n")
    Path("more").mkdir()
    Path("more/one.py").write_text("x = 1\n")
    Path("unused.py").write_text("y = 1\n")
    sys.modules["helper"] = ModuleType("helper")
    try:
        one, other = samplers.find("./mine.py:Mine"), samplers.find("./copy.py:Mine")
    finally:
        del sys.modules["helper"]
    before = registry.code_digest(one)
    assert registry.code_digest(other) == before
    Path("unused.py").write_text("y = 2\n")
    assert registry.code_digest(one) == before
    Path("more/one.py").write_text("x = 2\n")
    assert registry.code_digest(one) != before
    assert registry.code_digest(limpet.CRS) is None


def test_an_edited_helper_makes_another_run(here, capsys):
    """Of a study, whose finished units do not count any more, and of bulk, which is refused."""
    text = SAMPLER.replace(
        'No effect.")', 'No effect.")\n    def step(self, ctx, state):\n        return helper.step(self, ctx, state)'
    )
    Path("mine.py").write_text("import sys\nsys.path.insert(0, '.')\nimport helper\n" + text)
    Path("mine.toml").write_text('model = "exact:chain"\nseeds = [1, 2]\nsamples = 2\n'
                                 '[samplers]\na = "./mine.py:Mine nfe=3"\nb = "native nfe=3"\n')  # fmt: skip
    study = ["study", "run", "mine.toml", "--store", "store", "--json"]
    bulk = ["bulk", "out", "--model", "exact:chain", "--sampler", "./mine.py:Mine nfe=3", "--n", "4"]

    def run(body, command):
        """A command as in a new process, with a helper of this body."""
        Path("helper.py").write_text(f"import limpet\n\ndef step(sampler, ctx, state):\n    {body}")
        for name in [name for name in sys.modules if name == "helper" or name.startswith(registry.PREFIX)]:
            del sys.modules[name]
        return main.main(command), capsys.readouterr()

    one, other = "return limpet.Native.step(sampler, ctx, state)", "return limpet.CRS.step(sampler, ctx, state)"
    counts = []
    for body in (one, one, one + "  # edited"):
        code, printed = run(body, study)
        assert code == 0
        counts.append([json.loads(printed.out)["mine"][field] for field in ("computed", "found")])
    assert counts == [[4, 0], [0, 4], [2, 2]]
    assert run(one, bulk)[0] == run(one, bulk)[0] == 0
    code, printed = run(other, bulk)
    assert code == 2
    assert "another request" in printed.err


def test_the_digest_of_code_without_a_file_is_of_the_code_alone():
    def define(body):
        exec(f"class Made:\n    size = 3\n    def f(self, x):\n        return {body}", namespace := {"__name__": "no"})
        return registry.code_digest(namespace["Made"])

    assert define("x in {'a', 'b', 'c'}") == define("x in {'a', 'b', 'c'}")
    assert len({define(body) for body in ("x + 1", "x + 2", "x - 1", "(1, x)", "(x, 1)", "[y for y in x]")}) == 6


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


@pytest.mark.parametrize("find", [samplers.find, limpet.load])
def test_a_bad_file_is_one_sentence(here, find):
    before = set(sys.modules)
    for text, attribute, match in FILES.values():
        if text is not None:
            Path("mine.py").write_text(text)
        for _ in range(2):  # what failed is not kept
            refused(find, f"./mine.py:{attribute}", match=match)
    left = [name for name in set(sys.modules) - before if name.startswith(registry.PREFIX)]
    assert len(left) == 1  # the file that has no such name


def test_a_folder_or_nothing_in_place_of_a_file_is_one_sentence(here):
    Path("mine.py").mkdir()
    refused(samplers.find, "./mine.py:Mine", match="mine.py cannot be read")
    refused(samplers.find, "./mi\0ne.py:Mine", match="cannot be read")
    refused(samplers.find, "~no-such-user/mine.py:Mine", match="cannot be read")


def test_what_is_no_sampler_is_one_sentence(here):
    for text in NO_SAMPLERS.values():
        Path("mine.py").write_text(text)
        refused(samplers.find, "./mine.py:Mine", match="is no sampler: it takes a frozen dataclass")
        assert main.main(["sample", "--model", "exact:words", "--sampler", "./mine.py:Mine"]) == 2


def test_a_parameter_of_another_type_is_one_sentence(here):
    for hint in ("list[int]", "int | str", "dict", "'nonsense'", "complex | None"):
        Path("mine.py").write_text(SAMPLER + f"    strange: {hint} = None\n")
        refused(samplers.parse, "./mine.py:Mine", match="strange|nonsense")
        assert main.main(["sample", "--model", "exact:words", "--sampler", "./mine.py:Mine"]) == 2


# Packages


def test_a_package_offers_by_name(package):
    points = "[limpet.samplers]\nmine = theirs_a:Mine\nnested = theirs_a:Holder.Mine [fast]\n"
    holder = "class Holder:\n    Mine = Mine\n"
    package(points + "[limpet.models]\ntoy = theirs_b:toy\n", theirs_a=SAMPLER + holder, theirs_b=MODEL)
    assert samplers.find("mine")(nfe=4).to_dict()["sampler"] == "mine"
    assert samplers.find("nested") is samplers.find("mine")
    assert list(samplers.available()) == [*BUILTIN, "mine", "nested"]
    assert limpet.load("toy").name == "toy"


def test_entry_points_are_read_again_when_a_package_was_installed(package, monkeypatch):
    reads, real = [], registry.importlib.metadata.entry_points
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda **group: reads.append(1) or real(**group))
    package("[limpet.samplers]\nmine = theirs_a:Mine\n", theirs_a=SAMPLER)
    assert [registry.installed("limpet.samplers") for _ in range(3)] == [{"mine": "theirs_a:Mine"}] * 3
    assert len(reads) == 1
    site = Path(sys.path[0])
    (site / "theirs-0.1.dist-info").rename(site / "theirs-0.2.dist-info")
    os.utime(site, (2, 2))  # another time, however fast this was
    assert registry.installed("limpet.samplers") == {"mine": "theirs_a:Mine"}
    assert len(reads) == 2


def test_a_class_is_named_by_its_entry_point_without_importing_any(package):
    """Also where the entry point is another name of the class than its own module's."""
    points = "[limpet.samplers]\nmine = theirs_api:Best\nother = theirs_other:Mine\n"
    package(points, theirs_impl=SAMPLER, theirs_api="from theirs_impl import Mine as Best\n", theirs_other=SAMPLER)
    assert samplers.find("mine")().name == "mine"
    assert "theirs_other" not in sys.modules


def test_what_foreign_code_prints_while_it_is_loaded_stays_out_of_json(package, here, capfd):
    points = "[limpet.samplers]\nmine = theirs_a:Mine\n[limpet.models]\ntoy = theirs_b:toy\n"
    package(
        points, theirs_a="print('hello')" + SAMPLER, theirs_b=MODEL.replace("    model =", "    print('hi'); model =")
    )
    assert main.main(["samplers", "--json"]) == 0
    printed = capfd.readouterr()
    assert "mine" in [one["name"] for one in json.loads(printed.out)]
    Path("mine.py").write_text("print('hello')" + SAMPLER)
    options = ("--n", "1", "--json", "--sampler", "./mine.py:Mine nfe=2")
    assert main.main(["sample", "--model", "toy", *options]) == 0
    second = capfd.readouterr()
    assert json.loads(second.out)["model"] == "toy"
    assert [line for line in (printed.err + second.err).splitlines() if line in ("hello", "hi")] == [
        "hello",
        "hello",
        "hi",
    ]


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
        theirs_a=SAMPLER + "NUMBER = 3\n",
        theirs_bad="raise RuntimeError('no,\\nI will not')\n",
        theirs_leaves="import sys\nsys.exit()\n",
    )
    refused(samplers.find, "bad", match=match)
    refused(limpet.load, "bad", match=match)
    assert list(samplers.available()) == [*BUILTIN, "good"]
    assert main.main(["samplers", "--json"]) == 0
    printed = capsys.readouterr()
    assert [one["name"] for one in json.loads(printed.out)] == [*BUILTIN, "good"]
    assert "bad" in printed.err
    assert main.main(["samplers", "bad"]) == 2


def test_names_that_lead_nowhere_are_one_sentence():
    refused(
        samplers.find, "psy", match=rf"'psy', did you mean psi\? there are {', '.join(BUILTIN)}, and ./file.py:Name"
    )
    refused(limpet.load, "psy", match=r"nor offered by another package \(none offers any\)")


# Models


def test_a_factory_gets_what_was_asked_for(here):
    Path("my.py").write_text(MODEL)
    model = limpet.load("./my.py:toy", device="cpu", precision="bfloat16", size=5)
    assert model.info == {"folder": "None", "device": "cpu", "precision": "bfloat16", "size": 5}
    sentence = refused(limpet.load, "./my.py:toy", weights="raw", match="cannot be asked for a model")
    assert "unexpected keyword argument 'weights'" in sentence
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
    sentence = refused(limpet.load, name, match="model_type 'tow', and the families known here are toy, Toy2, duo")
    assert GROUP in sentence


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
        "import limpet\nclass toy(limpet.Denoiser):\n    def __init__(self, folder, **more): ...\n    backbone = None",
        "made no model .TypeError: .*abstract method head",
    ),
}  # fmt: skip


def test_what_makes_no_model_is_one_sentence(here):
    for text, match in NO_MODELS.values():
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
def test_a_model_with_a_wrong_attribute_is_one_sentence(here, field, value, takes):
    Path("my.py").write_text(MODEL.replace("    return model", f"    model.{field} = {value!r}\n    return model"))
    refused(limpet.load, "./my.py:toy", match=f"has {field} {value!r}; it takes {takes}")
    model = limpet.load("exact:verses")
    setattr(model, field, value)
    refused(limpet.sample, model, n=1, match=f"has {field} {value!r}; it takes {takes}")


def test_only_models_are_built_in():
    assert model_files.builtin_names() == ["mini", "mini-distilled", "molecules", "sudoku", "sudoku-6x6"]
