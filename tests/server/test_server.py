"""The playground's server: answers as the library gives them, every bad request a sentence, and no client in the way
of another. Each test talks to a real server on a port of its own."""

import asyncio
import base64
import gc
import json
import math
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import limpet
from limpet import CRS, Native, samplers
from limpet.cli.common import Where
from limpet.cli.common import arms as serve_arms
from limpet.cli.serve import on_offer, stock
from limpet.errors import LimpetError
from limpet.evaluation.judges import has_builtin
from limpet.models import Denoiser, model_files
from limpet.models.exact import Mixture
from limpet.recording.trajectory import VERSION, Header, Trajectory, record
from limpet.server.handlers import Stock
from limpet.server.http import application, listen
from limpet.server.scheduler import Limits
from limpet.server.workers import here, process

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from pictures import serving
from served import Verses

EVENTS = {"Accept": "text/event-stream"}
STATM = Path("/proc/self/statm")
SLOW = 0.05  # seconds of a slow step


class Slow(Verses):
    """A source that takes its time, counts its calls, and breaks when told."""

    def __init__(self):
        super().__init__("slow")
        self.calls, self.gate, self.broken = 0, threading.Event(), False
        self.gate.set()

    def probs(self, tokens, signal):
        self.gate.wait(20)
        self.calls += 1
        time.sleep(SLOW)
        if self.broken:
            raise RuntimeError("a wire came loose")
        return super().probs(tokens, signal)


@contextmanager
def server(models=None, judge=None, offered=None, arms=None, **limits):
    models = models or {"exact:words": limpet.load("exact:words")}
    app = application(here(Stock(models, judge)), Limits(**limits), arms=arms, offered=offered)
    with serving(app) as address, httpx.Client(base_url=address, timeout=30) as client:
        client.queue = app.state.queue
        yield client


@pytest.fixture(scope="module")
def words():
    return limpet.load("exact:words")


@pytest.fixture(scope="module")
def client(words):
    with server({"exact:words": words, "exact:chain": limpet.load("exact:chain")}) as client:
        yield client


def events(response):
    """[(kind, data)] of a body of server-sent events."""
    found = []
    for block in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


# Answers


def test_samples_are_the_librarys(client, words):
    ask = {"arm": {"sampler": "crs", "nfe": 8, "budget": 0.25}, "n": 3, "seed": 5, "prompt": "moon "}
    rows = client.post("/api/sample", json=ask).json()["samples"]
    made = limpet.sample(words, CRS(nfe=8, budget=0.25), 3, 5, prefix="moon ")
    assert [{**row, "scores": None} for row in rows] == [{**row, "scores": None} for row in made.rows()]
    for row, tokens in zip(rows, made.tokens, strict=True):
        scores = row["scores"]
        assert scores["nll"] == pytest.approx(-float(words.conditional(tokens[None])[0, 5:].mean()))
        assert scores["perplexity"] == pytest.approx(math.exp(scores["nll"]))
        assert {name: scores[name] for name in ("judge", "digest", "convention", "precision", "counted")} == {
            "judge": "true distribution of exact:words", "digest": words.digest, "convention": "exact", "precision": "float64",
            "counted": 155,
        }  # fmt: skip


@pytest.mark.skipif(not has_builtin(), reason="mini-judge is not built in here")
def test_a_score_is_what_compare_says(words):
    """The same judge, read in the same way, and said so: there is one way to score."""
    model, judge = limpet.load("mini", device="cpu"), limpet.load_judge(device="cpu")
    with server({"mini": model, "exact:words": words}, judge) as client:
        ask = {"model": "mini", "arm": {"sampler": "native", "nfe": 3}, "length": 40, "seed": 6}
        (row,) = client.post("/api/sample", json=ask).json()["samples"]
        compared = limpet.compare(model, {"native": Native(nfe=3)}, 1, (6,), 40, judge=judge)
        assert row["scores"]["nll"] == pytest.approx(float(compared.arms[0].nll[0]), abs=1e-12)
        assert row["scores"]["counted"] == compared.arms[0].counted
        for ours, theirs in {"judge": "name", **{key: key for key in ("digest", "convention", "precision")}}.items():
            assert row["scores"][ours] == compared.judge[theirs]
        by_name = {model["name"]: model["scored_by"] for model in client.get("/api/models").json()["models"]}
        assert by_name == {"mini": judge.name, "exact:words": "true distribution of exact:words"}


def test_what_no_judge_can_read_is_not_judged():
    """A model without a tokenizer is sampled all the same; its texts are measured, and nobody is named."""

    class Mute(Denoiser):
        name, digest, vocab_size, length = "mute", "m", 5, 7

        def body(self, tokens, t):
            return torch.zeros(*tokens.shape, 5)

        def head(self, features):
            return features

    mute = Mute()
    with server({"mute": mute}, limpet.load_judge(device="cpu") if has_builtin() else None) as client:
        (row,) = client.post("/api/sample", json={"arm": {"sampler": "native", "nfe": 3}}).json()["samples"]
        assert row["text"] is None
        assert set(row["scores"]) == {"entropy", "rep-4"}
        assert client.get("/api/models").json()["models"][0]["scored_by"] is None
        assert client.post("/api/sample", json={"prompt": "a"}).status_code == 422


def test_a_source_without_a_tokenizer_is_scored_by_its_own_law():
    torch.manual_seed(0)
    source = Mixture(torch.rand(3), torch.rand(3, 4, 7), phrases=2)
    with server({"own": source}) as client:
        (row,) = client.post("/api/sample", json={"arm": {"sampler": "native", "nfe": 3}}).json()["samples"]
        assert row["text"] is None
        assert row["scores"]["nll"] == pytest.approx(-float(source.log_prob(torch.tensor([row["tokens"]]))) / 8)
        assert (row["scores"]["convention"], row["scores"]["counted"]) == ("exact", 8)
        assert client.get("/api/models").json()["models"][0]["scored_by"] == f"true distribution of {source.name}"


def test_a_comparison_is_paired(client, words):
    ask = {"arms": {"a": {"sampler": "crs", "nfe": 6}, "b": {"sampler": "native", "nfe": 6}}, "seed": 7, "score": False}
    arms = client.post("/api/compare", json=ask).json()["arms"]
    assert arms["a"]["text"] == limpet.sample(words, CRS(nfe=6), 1, 7).texts[0]
    assert arms["b"]["text"] == limpet.sample(words, Native(nfe=6), 1, 7).texts[0]
    assert arms["a"]["scores"] == {}


def test_what_is_not_said_is_as_the_page_starts(client, words):
    arms = client.post("/api/compare", json={}).json()["arms"]
    expected = {"native": Native(nfe=16), "CRS": CRS(nfe=16)}
    assert {name: row["sampler"] for name, row in arms.items()} == {
        name: sampler.to_dict() for name, sampler in expected.items()
    }
    (row,) = client.post("/api/sample", json={}).json()["samples"]
    assert row["text"] == limpet.sample(words, CRS(nfe=16), 1, 8200).texts[0]


def test_a_prompt_that_fills_the_sequence_leaves_nothing_to_score(client):
    (row,) = client.post("/api/sample", json={"prompt": "moon " * 32}).json()["samples"]
    assert row["text"] == "moon " * 32
    assert row["scores"] == {}


def test_words_are_held_in_the_middle(client):
    ask = {
        "arm": {"sampler": "crs", "nfe": 6},
        "fixed": [{"position": 50, "text": "tide "}, {"position": 10, "text": "surf "}],
    }
    text = client.post("/api/sample", json=ask).json()["samples"][0]["text"]
    assert text[50:55] == "tide "
    assert text[10:15] == "surf "


def test_a_stream_is_a_trajectory_step_by_step(client, words):
    """Header and frames as they come, put together by hand, are the library's own record."""
    arms = {"native": {"sampler": "native", "nfe": 6}, "CRS": {"sampler": "crs", "nfe": 6}}
    answer = client.post("/api/compare", json={"arms": arms, "seed": 3}, headers=EVENTS)
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = events(answer)
    assert [kind for kind, _ in told] == ["begin"] + ["frame"] * 7 + ["end"]
    for a, (name, arm) in enumerate(arms.items()):
        about = told[0][1]["arms"][a]
        assert (about.pop("format"), about.pop("version")) == ("limpet trajectory", 2)
        header, words_seen, frames = Header(**about), {}, []
        for _, step in told[1:-1]:
            part = step["arms"][a]
            words_seen |= {int(token): word for token, word in part["words"].items()}
            frames += header.unpack(base64.b64decode(part["frame"]))
        end = told[-1][1]["arms"][a]
        mine = Trajectory(header, frames, words_seen, end["text"])
        assert mine.to_bytes() == record(words, samplers.from_dict(arm), seed=3, arm=name).to_bytes()
        assert end["scores"]["perplexity"] > 1
        assert {"judge", "digest", "convention", "precision", "counted"} <= set(end["scores"])


def test_a_trajectory_as_a_file(client, words):
    answer = client.post(
        "/api/sample",
        json={"arm": {"sampler": "crs", "nfe": 5}, "score": False},
        headers={"Accept": "application/x-limpet-trajectory"},
    )
    assert answer.content == record(words, CRS(nfe=5)).to_bytes()
    assert "attachment" in answer.headers["content-disposition"]


def test_the_small_routes(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    names = [model["name"] for model in client.get("/api/models").json()["models"]]
    assert names == ["exact:words", "exact:chain"]
    home = client.get("/")
    assert home.text.startswith("<!doctype html>")
    assert home.headers["x-content-type-options"] == "nosniff"
    described = client.get("/api/openapi.json").json()
    assert described["info"]["version"] == limpet.__version__
    assert f"version {VERSION}." in described["paths"]["/api/sample"]["post"]["description"]
    for path, method in (("/nothing", "GET"), ("/api/sample", "GET"), ("/", "DELETE")):
        answer = client.request(method, path)
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]


def test_only_this_machines_names_are_served(client):
    assert client.get("/health", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/health", headers={"Host": "localhost:1234"}).status_code == 200


# Bad requests


CRS6 = {"sampler": "crs", "nfe": 6}
SCRIPT = "<script>alert(1)</script>"
BAD = {
    "not json": (b"{", 400),
    "empty": (b"", 400),
    "not utf-8": (b'{"prompt": "\xff\xfe"}', 400),
    "nan": (b'{"arm": {"sampler": "crs", "warmup": NaN}}', 400),
    "infinity": (b'{"arm": {"sampler": "crs", "budget": 1e999}}', 400),
    "deep": (b"[" * 20000, 400),
    "long number": (b'{"seed": ' + b"9" * 5000 + b"}", 400),
    "array": (b"[]", 422),
    "null": (b"null", 422),
    "too large": (b'{"prompt": "' + b"a" * 70000 + b'"}', 413),
    "unknown field": (b'{"sed": 1}', 422),
    "unknown parameter": (b'{"arm": {"sampler": "crs", "horizn": 1}}', 422),
    "script as a field": (json.dumps({SCRIPT: 1}).encode(), 422),
    "script as a model": (json.dumps({"model": SCRIPT}).encode(), 422),
    "script as a parameter": (json.dumps({"arm": {"sampler": "crs", SCRIPT: 1}}).encode(), 422),
    "script as a sampler": (json.dumps({"arm": {"sampler": SCRIPT}}).encode(), 422),
    "script as a prompt": (json.dumps({"prompt": SCRIPT}).encode(), 422),
    "a path as a model": (b'{"model": "../../etc/passwd"}', 422),
    "a model of the hub": (b'{"model": "s-sahoo/duo"}', 422),
    "negative seed": (b'{"seed": -1}', 422),
    "fractional seed": (b'{"seed": 1.5}', 422),
    "boolean seed": (b'{"seed": true}', 422),
    "large seed": (b'{"seed": 9007199254740993}', 422),
    "no samples": (b'{"n": 0}', 422),
    "too many samples": (b'{"n": 1000}', 422),
    "too many calls": (b'{"arm": {"sampler": "crs", "nfe": 100000}}', 422),
    "negative calls": (b'{"arm": {"sampler": "crs", "nfe": -4}}', 422),
    "huge count": (b'{"arm": {"sampler": "crs", "count": 1' + b"0" * 30 + b"}}", 422),
    "huge horizon": (b'{"arm": {"sampler": "crs", "horizon": 1' + b"0" * 30 + b"}}", 422),
    "arm a list": (b'{"arm": []}', 422),
    "arm without a sampler": (b'{"arm": {"nfe": 4}}', 422),
    "arm of a comparison": (b'{"arms": {"a": {"sampler": "crs"}}}', 422),
    "sampler a list": (b'{"arm": {"sampler": []}}', 422),
    "a file as a sampler": (b'{"arm": {"sampler": "./mine.py:Mine"}}', 422),
    "a module as a sampler": (b'{"arm": {"sampler": "os:system"}}', 422),
    "a sampler by its class": (b'{"arm": {"sampler": "limpet.samplers.crs:CRS"}}', 422),
    "text for a number": (b'{"arm": {"sampler": "crs", "nfe": "3"}}', 422),
    "a fraction for a whole number": (b'{"arm": {"sampler": "crs", "nfe": 3.0}}', 422),
    "a truth for a number": (b'{"arm": {"sampler": "crs", "budget": true}}', 422),
    "a huge whole number for a fraction": (b'{"arm": {"sampler": "crs", "budget": 1' + b"0" * 400 + b"}}", 422),
    "the inside name of a parameter": (b'{"arm": {"sampler": "crs", "knob_nfe": 4}}', 422),
    "null for a parameter that takes none": (b'{"arm": {"sampler": "crs", "nfe": null}}', 422),
    "parameters of odd kinds": (b'{"arm": {"sampler": "crs", "endpoint": [], "grid": {}}}', 422),
    "recorded values": (b'{"arm": {"sampler": "crs", "values": "recorded"}}', 422),
    "length too long": (b'{"length": 100000}', 422),
    "length the source cannot do": (b'{"length": 12}', 422),
    "prompt a number": (b'{"prompt": 3}', 422),
    "prompt too long": (json.dumps({"prompt": "a" * 161}).encode(), 422),
    "half a character": (b'{"prompt": "\\ud800"}', 422),
    "half a character as a field": (b'{"\\ud800": 1}', 422),
    "letters it does not know": ('{"prompt": "été"}'.encode(), 422),
    "fixed not a list": (b'{"fixed": {}}', 422),
    "fixed without text": (b'{"fixed": [{"position": 1}]}', 422),
    "fixed outside": (b'{"fixed": [{"position": 158, "text": "tide"}]}', 422),
    "fixed twice": (b'{"prompt": "moon", "fixed": [{"position": 2, "text": "tide"}]}', 422),
    "score a string": (b'{"score": "yes"}', 422),
}


@pytest.mark.parametrize("headers", [{}, EVENTS], ids=["json", "events"])
@pytest.mark.parametrize(("body", "status"), BAD.values(), ids=BAD)
def test_a_bad_request_gets_a_sentence(client, body, status, headers):
    answer = client.post("/api/sample", content=body, headers={"Content-Type": "application/json", **headers})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    sentence = answer.json()["error"]
    assert sentence
    assert "\n" not in sentence
    assert len(sentence) < 400


@pytest.mark.parametrize(
    "arms",
    [
        {}, [], 3, {"": CRS6}, {"a" * 81: CRS6}, {"a": 3}, {"a": {}}, {str(i): CRS6 for i in range(5)},
        {"\ud800": CRS6}, {"a": {**CRS6, "sampler": "nothing"}}, {"a": {**CRS6, "spaicng": 2}},
    ],
    ids=str,
)  # fmt: skip
def test_bad_arms(client, arms):
    assert client.post("/api/compare", json={"arms": {"a": CRS6}}).status_code == 200
    body = json.dumps({"arms": arms})
    answer = client.post("/api/compare", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ({"sed": 1}, "did you mean seed?"),
        ({"arm": {"sampler": "crs", "horizn": 1}}, "did you mean horizon?"),
        ({"arm": {"sampler": "native", "budget": 1}}, "it takes nfe, warmup, "),
        ({"arm": {"sampler": "csr"}}, "here are native, crs"),
        ({"fixed": [{"positon": 1}]}, "did you mean position?"),
        ({"n": "2"}, 'n is "2"; it should be a valid integer'),
        ({"arm": {"sampler": "crs", "nfe": 300}}, "it should be less than or equal to 256"),
    ],
    ids=str,
)
def test_a_sentence_says_what_to_mend(client, field, hint):
    assert hint in client.post("/api/sample", json=field).json()["error"]


def test_other_content_types_are_refused(client):
    """So that no page of another site can make a browser send work here."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert client.post("/api/sample", content=b"{}", headers={"Content-Type": kind}).status_code == 415


def test_a_chunked_body_cannot_exceed_the_limit(client):
    sent = []

    def chunks():
        for i in range(1000):
            sent.append(i)
            yield b" " * 65536

    try:
        status = client.post("/api/sample", content=chunks(), headers={"Content-Type": "application/json"}).status_code
    except httpx.TransportError:  # the server closed before all was sent
        status = 413
    assert status == 413


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_the_description_holds_under_fuzzing(words, mine, mode):
    """schemathesis: whatever is sent, no 5xx, and every answer is as described, for somebody else's sampler too."""
    import schemathesis
    from schemathesis import checks

    models = {"exact:words": words, "exact:verses": limpet.load("exact:verses")}
    arms = serve_arms(["native", mine], 4)
    limits = Limits(calls=4, samples=2)
    app = application(here(Stock(models)), limits, names=("testserver",), arms=arms, offered=on_offer(arms))
    schema = schemathesis.openapi.from_asgi("/api/openapi.json", app)
    held = [
        checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
        checks.response_schema_conformance, checks.negative_data_rejection,
    ]  # fmt: skip
    seen = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode == "negative" and operation.method == "get":
            continue  # it takes nothing that could be wrong

        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def fuzz(case):
            answer = case.call()
            seen.add((case.path, answer.status_code))
            case.validate_response(answer, checks=held)

        fuzz()
    if mode == "positive":
        assert {(path, 200) for path in ("/api/sample", "/api/compare", "/api/models", "/health", "/ready")} <= seen
    else:
        assert {status for _, status in seen} <= {400, 415, 422}


# Samplers of somebody else's

MINE = """
from dataclasses import dataclass
from typing import Literal

from limpet import LimpetError, Native, parameter


@dataclass(frozen=True)
class Mine(Native):
    \"\"\"Native, with every n-th token marked.\"\"\"

    nth: int = parameter(2, "Which tokens are marked.", low=1, high=9)
    copy: bool = parameter(False, "A name that pydantic has for itself.")
    tone: Literal["soft", "loud"] | None = parameter(None, "Nothing to do with it.")

    def __post_init__(self):
        super().__post_init__()
        if self.copy and self.nth == 3:
            raise LimpetError("copy is not for nth=3")

    def step(self, path, state):
        state, info = super().step(path, state)
        return state, info._replace(marks={"nth": (state.tokens % self.nth) == 0})
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(MINE)
    return f"{file}:Mine"


def test_a_sampler_in_a_file_is_served_under_its_name_alone(mine, words):
    """In a request, a comparison, a stream, the description and the page; and nowhere is said where the file lies."""
    arms = serve_arms([f"mine: {mine} nfe=4 nth=3", "native"], 5)
    with server(offered=on_offer(arms), arms=arms) as client:
        ask = {"arm": {"sampler": "Mine", "nth": 4, "nfe": 3}, "seed": 2}
        answer = client.post("/api/sample", json=ask)
        (row,) = answer.json()["samples"]
        assert row["text"] == limpet.sample(words, Native(nfe=3), 1, 2).texts[0]
        assert (row["sampler"]["sampler"], row["sampler"]["nth"], row["sampler"]["tone"]) == ("Mine", 4, None)
        told = client.post("/api/compare", json={}, headers=EVENTS)
        begun = events(told)[0][1]["arms"]
        assert [(arm["arm"], arm["sampler"]["sampler"], arm["calls"]) for arm in begun] == [
            ("mine", "Mine", 4), ("native", "native", 5)
        ]  # fmt: skip
        assert begun[0]["marks"] == ["given", "nth"]

        described = client.get("/api/openapi.json")
        params = described.json()["components"]["schemas"]["Mine"]["properties"]
        assert params["nth"] == {"default": 2, "description": "Which tokens are marked.", "maximum": 9, "minimum": 1,
                                "title": "Nth", "type": "integer"}  # fmt: skip
        assert params["copy"]["type"] == "boolean"
        home = client.get("/")
        assert "Which tokens are marked." in home.text
        for text in (answer.text, told.text, described.text, home.text):
            assert "mine.py" not in text

        for wrong, status in (({"nth": 10}, 422), ({"nth": "2"}, 422), ({"nth": 3, "copy": True}, 422), ({}, 200)):
            answer = client.post("/api/sample", json={"arm": {"sampler": "Mine", "nfe": 2, **wrong}})
            assert answer.status_code == status, wrong
        assert client.post("/api/sample", json={"arm": {"sampler": mine, "nfe": 2}}).status_code == 422


def test_a_file_that_was_not_named_at_the_start_is_never_run(mine, client):
    for name in (mine, mine.rpartition(":")[0], "Mine"):
        answer = client.post("/api/sample", json={"arm": {"sampler": name}})
        assert answer.status_code == 422
        assert "here are native, crs" in answer.json()["error"]


def test_two_samplers_of_one_name_are_refused(mine, tmp_path):
    (tmp_path / "other.py").write_text(MINE)
    with pytest.raises(LimpetError, match="two samplers are called Mine"):
        on_offer(serve_arms([mine, f"other: {tmp_path}/other.py:Mine"], 4))


def test_the_number_of_calls_is_bounded_whatever_a_sampler_makes_of_its_knobs(words):
    class Twice(Native):
        def __post_init__(self):
            super().__post_init__()
            object.__setattr__(self, "nfe", 2 * self.nfe)

    with server(offered={**samplers.available(), "twice": Twice}, calls=8) as client:
        answer = client.post("/api/sample", json={"arm": {"sampler": "twice", "nfe": 6}})
        assert answer.status_code == 422
        assert "at most 8" in answer.json()["error"]


# Many clients


def settled(queue, seconds=5.0):
    """Wait until nobody is inside."""
    ends = time.monotonic() + seconds
    while queue.inside and time.monotonic() < ends:
        time.sleep(0.005)
    return not queue.inside


def test_a_full_queue_says_when_to_come_again():
    model = Slow()
    model.gate.clear()
    ask = {"arm": {"sampler": "crs", "nfe": 3}}
    with server({"slow": model}, queue=1) as client:
        with httpx.Client(base_url=client.base_url, timeout=30) as other:
            statuses = []
            threads = [
                threading.Thread(target=lambda: statuses.append(other.post("/api/sample", json=ask).status_code))
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            while len(client.queue.inside) < 2:
                time.sleep(0.005)
            refused = client.post("/api/sample", json=ask)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert "come again" in refused.json()["error"]
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
            model.gate.set()
            for thread in threads:
                thread.join()
        assert statuses == [200, 200]
        assert settled(client.queue)
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize("headers", [EVENTS, {}], ids=["events", "json"])
def test_a_client_that_leaves_frees_its_slot_within_a_step(headers):
    model = Slow()
    with server({"slow": model}, queue=0) as client:
        if headers:
            with client.stream(
                "POST", "/api/sample", json={"arm": {"sampler": "crs", "nfe": 200}}, headers=headers
            ) as answer:
                lines = answer.iter_lines()
                while not next(lines).startswith("event: frame"):
                    pass
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/api/sample", json={"arm": {"sampler": "crs", "nfe": 200}}, timeout=3 * SLOW)
        begun, calls = time.monotonic(), model.calls
        assert settled(client.queue)
        assert model.calls - calls <= 2  # the step under way, and one that began as the news travelled
        assert time.monotonic() - begun < 1
        assert client.post("/api/sample", json={"arm": {"sampler": "crs", "nfe": 2}}).status_code == 200


def test_a_waiting_client_that_leaves_frees_its_place_at_once():
    model = Slow()
    model.gate.clear()
    with server({"slow": model}, queue=1) as client, httpx.Client(base_url=client.base_url, timeout=30) as other:
        first = threading.Thread(target=lambda: other.post("/api/sample", json={"arm": {"sampler": "crs", "nfe": 2}}))
        first.start()
        while not client.queue.inside:
            time.sleep(0.005)
        with client.stream("POST", "/api/sample", json={}, headers=EVENTS) as answer:
            lines = answer.iter_lines()  # kept, since the stream ends with it
            assert next(lines) == "event: queued"
            assert len(client.queue.inside) == 2
        ends = time.monotonic() + 5
        while len(client.queue.inside) > 1 and time.monotonic() < ends:
            time.sleep(0.005)
        assert len(client.queue.inside) == 1
        model.gate.set()
        first.join()


def test_a_request_has_its_time():
    with server({"slow": Slow()}, seconds=3 * SLOW) as client:
        begun = time.monotonic()
        answer = client.post("/api/sample", json={"arm": {"sampler": "crs", "nfe": 100}})
        assert answer.status_code == 422
        assert "fewer calls" in answer.json()["error"]
        told = events(client.post("/api/sample", json={"arm": {"sampler": "crs", "nfe": 100}}, headers=EVENTS))
        assert told[-1][0] == "error"
        assert time.monotonic() - begun < 10


def test_a_broken_model_harms_one_request_alone(words):
    model = Slow()
    with server({"slow": model, "exact:words": words}) as client:
        model.broken = True
        answer = client.post("/api/sample", json={"arm": {"sampler": "crs", "nfe": 3}})
        assert answer.status_code == 500
        assert "log" in answer.json()["error"]
        assert "wire" not in answer.text
        good = client.post("/api/sample", json={"model": "exact:words", "arm": {"sampler": "crs", "nfe": 3}})
        assert good.status_code == 200
        assert settled(client.queue)


def test_fifty_clients_at_once_all_get_an_answer(words):
    async def crowd(address):
        async with httpx.AsyncClient(base_url=address, timeout=60, limits=httpx.Limits(max_connections=60)) as many:
            asks = [
                many.post(
                    "/api/compare",
                    json={"seed": i, "arms": {"a": {"sampler": "crs", "nfe": 4}}},
                    headers=EVENTS if i % 2 else {},
                )
                for i in range(50)
            ]
            return await asyncio.gather(*asks)

    with server({"exact:words": words}, queue=8, client=9) as client:
        answers = asyncio.run(crowd(client.base_url))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) <= {200, 429}
        assert statuses.count(200) >= 9
        for i, answer in enumerate(answers):
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
            elif i % 2:
                assert events(answer)[-1][0] == "end"
            else:
                assert answer.json()["arms"]["a"]["text"] == limpet.sample(words, CRS(nfe=4), 1, i).texts[0]
        assert settled(client.queue)
        assert client.post("/api/sample", json={"arm": {"sampler": "crs", "nfe": 2}}).status_code == 200


def resident(pid="self"):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def grown(client, ask, warm, requests, *workers):
    """Bytes of memory, here and in workers, that come with some requests, after some others."""

    def send(count):
        for i in range(count):
            headers = EVENTS if i % 2 else {}
            assert client.post("/api/compare", json={**ask, "seed": i}, headers=headers).status_code == 200
        gc.collect()
        return resident() + sum(resident(worker) for worker in workers)

    before = send(warm)
    return send(requests) - before


@pytest.mark.skipif(not STATM.exists(), reason="this system has no /proc to read memory from")
def test_memory_stays_flat_over_200_requests(client):
    arms = {"native": {"sampler": "native", "nfe": 3}, "CRS": {"sampler": "crs", "nfe": 3}}
    ask = {"arms": arms, "score": False}
    assert grown(client, ask, 40, 200) < 12 * 2**20


@pytest.mark.long
def test_memory_stays_flat_over_200_requests_to_mini():
    if "mini" not in model_files.builtin_names():
        pytest.skip("mini is not built in here")
    hire = process(partial(stock, ("mini",), "mini-judge", Where("cpu")))  # as limpet serve does
    app = application(hire)
    with serving(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        ask = {"arms": {"native": {"sampler": "native", "nfe": 16}, "CRS": {"sampler": "crs", "nfe": 16}}}
        (worker,) = app.state.queue.hands
        first = worker.pid
        more = grown(client, ask, 10, 200, first)
        assert worker.pid == first
    print(f"{more / 2**20:+.1f} MiB")
    assert more < 48 * 2**20


def test_limits_are_checked():
    for wrong in ({"queue": -1}, {"calls": 0}, {"calls": 1}, {"seconds": float("nan")}):
        with pytest.raises(LimpetError, match="the limit on"):
            Limits(**wrong)


def test_a_port_that_is_taken_is_named(client):
    with pytest.raises(LimpetError, match="cannot be used"):
        listen("127.0.0.1", client.base_url.port)
    with pytest.raises(LimpetError, match="cannot be used"):
        listen("127.0.0.1", 99999999)
    listen("127.0.0.1", 0).close()
