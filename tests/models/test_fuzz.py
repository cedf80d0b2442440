"""Fuzzers, one for each reader: any content is read, or refused in one short sentence."""

import itertools
import json
import os
import struct
import time

import hypothesis
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st

import hostile
import limpet
from limpet.errors import MAX_SENTENCE, LimpetError
from limpet.experiments.store import Store, _with_checksum, digest, unit_key, unit_paths
from limpet.models.tokenizers import read_tokenizer
from limpet.recording.trajectory import Trajectory, record
from limpet.samplers import available
from limpet.server import schema
from limpet.server.handlers import Resources
from limpet.server.scheduler import Limits

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("offline")]
SECONDS = float(os.environ.get("FUZZ_SECONDS", "6"))  # of CPU time for each

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def fuzz(strategy, read):
    """Let hypothesis try contents for some seconds, from one seed after the other."""

    def attempt(value):
        sentence = ""
        try:
            read(value)
        except LimpetError as error:
            sentence = str(error)
        assert len(sentence) <= MAX_SENTENCE
        assert sentence.isprintable()

    ends = time.process_time() + SECONDS
    for number in itertools.count():
        if time.process_time() > ends:
            return
        few = settings(max_examples=50, derandomize=False, database=None, suppress_health_check=list(HealthCheck))
        seed(number)(few(hypothesis.given(strategy)(attempt)))()


@st.composite
def mutated(draw, good):
    """Good bytes, some of them changed, added or removed."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(content)))
        content[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content)


def written(path):
    """A reader of files for bytes."""
    return lambda reader, at=None: lambda content: (path.write_bytes(content), hostile.READERS[reader](at or path))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a whole small model."""
    folder = tmp_path_factory.mktemp("model")
    hostile.Duo(hostile.DuoNetwork(hostile.TINY)).save(folder)
    return folder


def test_safetensors(model, tmp_path):
    good = (model / "model.safetensors").read_bytes()
    fuzz(mutated(good), written(tmp_path / "model.safetensors")("model", tmp_path))


def test_safetensors_headers(tmp_path):
    entry = st.fixed_dictionaries({"dtype": st.sampled_from(["F32", "I8", "F64", "F8_E4M3", "BOOL", "x"]),
                                   "shape": st.lists(st.integers(-1, 2**63), max_size=12),
                                   "data_offsets": st.lists(st.integers(0, 2**63), max_size=3)})  # fmt: skip
    names = st.sampled_from([*hostile.ANCHORS, "__metadata__"]) | st.text()

    def read(value):
        text = json.dumps(value).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
        hostile.READERS["model"](tmp_path)

    fuzz(st.dictionaries(names, entry | JSON, max_size=4), read)


def test_checkpoints(model, tmp_path):
    import torch
    from safetensors.torch import load_file

    state = load_file(model / "model.safetensors")
    torch.save({"state_dict": state, "ema": {"shadow_params": list(state.values())}}, tmp_path / "good.ckpt")
    fuzz(mutated((tmp_path / "good.ckpt").read_bytes()), written(tmp_path / "x.ckpt")("model"))


def test_pickles(tmp_path):
    """Instructions in any order."""
    one = st.sampled_from([
        b"(", b"}", b"]", b")", b"t", b"l", b"d", b"s", b"u", b"a", b"e", b"2", b"0", b"1", b"R", b"b", b"Q", b"N",
        b"\x85", b"\x86", b"\x87", b"\x94", b"h\x00", b"h\x01", b"q\x00", b"q\x01", b"K\x01", b"\x93", b"o", b"\x81",
        hostile.text("state_dict"), hostile.text("storage"), hostile.text("0"), b"ctorch\nFloatStorage\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n", hostile.number(1 << 50), hostile.number(-3), hostile.tensor([2], [1]),
    ]) | st.binary(max_size=3)  # fmt: skip
    pickles = st.lists(one, max_size=30).map(b"".join)
    fuzz(
        pickles,
        lambda content: hostile.READERS["model"](hostile.checkpoint(tmp_path / "x.ckpt", content, _0=bytes(64))),
    )


def test_configs(model, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    fields = st.sampled_from(["model_type", "n_heads", "model_length", "causal", "schedule", "predicts", "width"])

    def read(value):
        (tmp_path / "config.json").write_text(json.dumps(value))
        hostile.READERS["model"](tmp_path)

    fuzz(st.dictionaries(fields | st.text(), JSON, max_size=4) | JSON, read)


def test_tokenizers(tmp_path):
    hostile.tokenizer()(tmp_path)
    good = json.loads((tmp_path / "tokenizer.json").read_text())
    kinds = st.sampled_from(["Replace", "Sequence", "Prepend", "ByteLevel", "Precompiled", "Metaspace", "NFC", "Fuse"])
    part = st.fixed_dictionaries({"type": kinds}, optional={"content": st.text(), "prepend": st.text(),
                                 "pattern": JSON, "normalizers": JSON, "decoders": JSON})  # fmt: skip
    changes = st.dictionaries(st.sampled_from(list(good)), part | JSON, max_size=3)

    def read(value):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**good, **value}))
        read_tokenizer(tmp_path).decode(read_tokenizer(tmp_path).encode("abc"))

    fuzz(changes, read)


def test_trajectories():
    good = record(limpet.load("exact:chain"), limpet.CRS(nfe=3)).to_bytes()
    fuzz(mutated(good), Trajectory.from_bytes)


def test_studies(tmp_path):
    good = b'title = "Small"\nmodel = "exact:words"\nseeds = [1, 2]\nsamples = 2\n[samplers]\na = "native nfe=2"\n'
    fuzz(mutated(good), written(tmp_path / "x.toml")("study"))


def test_samples(tmp_path):
    good = b'{"text": "a", "tokens": [1, 2], "seed": 1, "sample": 0, "prompt_length": 1}\n{"text": "b"}\n'
    fuzz(mutated(good), written(tmp_path / "x.jsonl")("samples"))


def test_stores(tmp_path):
    """Rows with a correct checksum, and data with a correct digest, of any content."""
    store, key = Store(tmp_path), unit_key(1)
    data, facts = (tmp_path / path for path in unit_paths(key))
    data.parent.mkdir(parents=True)

    def read(rows_and_data):
        rows, content = rows_and_data
        data.write_bytes(content)
        try:
            facts.write_bytes(_with_checksum({**rows, "key": key, "data_digest": digest(content)}))
        except ValueError:  # JSON cannot represent it
            facts.write_text(json.dumps(rows))
        store.inspect(key)

    plain = st.dictionaries(st.sampled_from(["facts", "checksum", "memory"]) | st.text(), st.just(1) | JSON, max_size=3)
    fuzz(st.tuples(plain, st.binary(max_size=64)), read)


def test_requests():
    model = limpet.load("exact:words")
    resources = Resources({"exact:words": model})
    offer = schema.Offer(resources.facts(), available(), {"a": limpet.CRS(nfe=4)}, Limits())
    names = st.sampled_from(["model", "sampler", "samplers", "seed", "length", "prompt", "fixed", "n", "score"])
    sampler = st.dictionaries(st.sampled_from(["nfe", "spacing", "count", "budget"]), JSON).map(
        lambda values: {"sampler": "crs", **values}
    )
    objects = st.dictionaries(names | st.text(), JSON | sampler, max_size=4)
    bodies = objects.map(lambda value: json.dumps(value).encode()) | st.binary()
    for kind in schema.request_models(offer).values():
        fuzz(bodies, lambda body, kind=kind: schema.read(body, kind, offer))
