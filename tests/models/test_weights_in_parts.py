"""Models in several files: an index leads to the same model, in no more memory than it takes, or is one sentence."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from limpet.models.duo import Duo, DuoNetwork, DuoShape
from limpet.models.loading import load
from limpet.models.model_files import INDEX
from limpet.models.tensor_files import pack_rows
from model_cases import hub_like, parted, random_network, random_tokens, refused, same, write_index
from thinned import thinned

pytestmark = pytest.mark.usefixtures("offline")


def listed(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


@pytest.fixture
def folder(tmp_path):
    return parted(hub_like(random_network(), tmp_path / "m"))


def test_parts_are_the_same_model(folder):
    network = random_network()
    model = load(folder, device="cpu")
    assert same(model, network)
    assert model.digest == Duo(network).digest == load(folder / INDEX, device="cpu").digest
    assert model.info["file"] == str(folder / INDEX)


def test_bfloat16_and_int8_come_from_parts_as_from_one_file(tmp_path):
    model = Duo(random_network())
    for storage in ("bfloat16", "int8"):
        model.save(tmp_path / storage, storage)
        whole = load(tmp_path / storage, device="cpu", precision="bfloat16")
        parts = load(parted(tmp_path / storage), device="cpu", precision="bfloat16")
        assert whole.digest == parts.digest
        assert torch.equal(whole.logits(random_tokens(), 0.5), parts.logits(random_tokens(), 0.5))


def test_links_are_followed_as_in_the_hubs_cache(folder, tmp_path):
    (tmp_path / "blobs").mkdir()
    for file in folder.glob("*.safetensors"):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(tmp_path / "blobs" / file.name)
    assert same(load(folder, device="cpu"), random_network())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"x"', "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}',
             '{"weight_map": {"a": null}}', "[" * 100_000, "\x00\xff", '{"weight_map": {"a": "b", "a": "c"}}',
             '{"weight_map": {"a": "b"}, "weight_map": {"a": "b"}}'],
)  # fmt: skip
def test_an_index_that_is_none(folder, text):
    (folder / INDEX).write_text(text, encoding="latin-1")
    refused(folder, "is not an index of parts")


def test_a_huge_index_is_not_read(folder):
    with open(folder / INDEX, "ab") as file:
        file.truncate(1 << 30)
    refused(folder, "more than 67108864 is no such file")


@pytest.mark.parametrize(
    "name", ["../stolen.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", ".", "x.ckpt", "~/x.safetensors"]
)
def test_a_part_lies_beside_its_index(folder, name):
    save_file({"a": torch.ones(1)}, folder.parent / "stolen.safetensors")
    write_index(folder, listed(folder) | {"a": name})
    refused(folder, "a part is a .safetensors file beside the index")


def test_missing_parts_are_named(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()
    sentence = refused(folder, "lists parts that are not there")
    assert "(model-00002-of-00003.safetensors)" in sentence


def test_every_tensor_lies_where_the_index_says_and_nowhere_else(folder):
    where = listed(folder)
    first, *_ = where
    write_index(folder, {name: file for name, file in where.items() if name != first})
    refused(folder, f"do not agree on {first}")
    write_index(folder, where | {"nowhere": where[first]})
    refused(folder, "do not agree on nowhere")
    write_index(folder, where)
    other = folder / next(file for file in where.values() if file != where[first])
    save_file(load_file(other) | {first: torch.ones(2)}, other)  # one tensor in two parts
    refused(folder, f"its part {other.name} do not agree on {first}")


def test_a_wrong_shape_in_a_part_is_a_misfit(folder):
    name = "backbone.blocks.1.attn_out.weight"
    part = folder / listed(folder)[name]
    save_file(load_file(part) | {name: torch.ones(32, 31)}, part)
    refused(folder, r"misshapen: blocks\.1\.attn_out\.weight \(32, 31\) for \(32, 32\)")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_that_are_none_are_found_in_any_part(folder, value, dtype):
    name = "backbone.blocks.2.mlp.2.weight"
    part = folder / listed(folder)[name]
    state = {each: tensor.to(dtype) for each, tensor in load_file(part).items()}
    state[name][3, 4] = value
    save_file(state, part)
    sentence = refused(folder, r"NaN or infinity in backbone\.blocks\.2\.mlp\.2\.weight")
    assert sentence.startswith(str(part))


def test_a_dtype_that_is_not_read_here_is_named(folder):
    name = "backbone.blocks.2.mlp.2.weight"
    part = folder / listed(folder)[name]
    save_file(load_file(part) | {name: torch.ones(32, 80).to(torch.float8_e4m3fn)}, part)
    refused(folder, f"holds {name} in F8_E4M3, which is not read here")


@given(at=st.floats(0, 1, exclude_max=True), which=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_torn_parts_and_indices_are_refused(tmp_path_factory, at, which):
    folder = parted(hub_like(random_network(DuoShape(5, 4, 4, 1, 1, 2, 4)), tmp_path_factory.mktemp("m") / "m"))
    path = sorted(folder.glob("model*"))[which]
    content = path.read_bytes()
    path.write_bytes(content[: int(at * len(content))])
    refused(folder, "is not a")


MEASURE = """
import sys
from limpet.models.loading import load
def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
load(sys.argv[1], device="cpu", precision=sys.argv[3])
before = kib("VmRSS")
model = load(sys.argv[2], device="cpu", precision=sys.argv[3])
weights = sum(p.numel() * p.element_size() for p in model.network.parameters())
print(weights, (kib("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("storage", "precision"),
    thinned([("int8", "float32"), ("int8", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]),
)
def test_loading_takes_the_memory_of_the_weights_and_little_more(tmp_path, storage, precision):
    """At most the weights as they run, 15% of that, and 48 MiB; twice the weights would be 200 MiB more, or 100."""
    shape = DuoShape(vocab_size=8192, length=8, width=768, blocks=6, heads=12, cond=64, hidden=3072)
    with torch.device("meta"):
        names = [(f"backbone.{name}", parameter.shape) for name, parameter in DuoNetwork(shape).named_parameters()]
    state = {name: torch.full(size, 0.01, dtype=torch.bfloat16) for name, size in names}
    folder = hub_like(random_network(), tmp_path / "small")
    large = tmp_path / "large"
    large.mkdir()
    save_file(pack_rows(state) if storage == "int8" else state, large / "model.safetensors")
    (large / "config.json").write_text(json.dumps({"model_type": "duo", "n_heads": 12, "model_length": 8}))
    del state
    command = [sys.executable, "-c", MEASURE, str(folder), str(parted(large)), precision]
    weights, peak = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert weights > 100 << 20
    assert peak <= 1.15 * weights + (48 << 20)
