"""The server's answers: as the library gives them, and every bad request a sentence. Each test uses a real server."""

import base64
import gc
import json
import math
import socket
import threading
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import limpet
from limpet import CRS, Native, samplers
from limpet.cli.common import LoadOptions
from limpet.cli.serve import available_with, load_resources
from limpet.errors import LimpetError
from limpet.evaluation.judges import has_builtin
from limpet.models import model_files
from limpet.models.exact import Mixture
from limpet.recording.trajectory import VERSION, Header, Trajectory, record
from limpet.samplers import named_samplers
from limpet.server.handlers import Resources
from limpet.server.http import application, listen
from limpet.server.scheduler import Limits
from limpet.server.workers import in_processes, in_this_process
from served import GUARD, Clock, Counting, running, serving, wait_for

EVENTS = {"Accept": "text/event-stream"}


def server(models=None, judge=None, **arguments):
    models = models or {"exact:words": limpet.load("exact:words")}
    return running(in_this_process(Resources(models, judge)), **arguments)


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


def test_samples_are_those_of_the_library(client, words):
    ask = {"sampler": {"sampler": "crs", "nfe": 8, "budget": 0.25}, "n": 3, "seed": 5, "prompt": "moon "}
    rows = client.post("/api/sample", json=ask).json()["samples"]
    samples = limpet.sample(words, CRS(nfe=8, budget=0.25), 3, 5, prompt="moon ")
    assert [{**row, "scores": None} for row in rows] == [{**one.to_dict(), "scores": None} for one in samples]
    for row, tokens in zip(rows, samples.tokens, strict=True):
        scores = row["scores"]
        assert scores["nll"] == pytest.approx(-float(words.conditional(tokens[None])[0, 5:].mean()))
        assert scores["perplexity"] == pytest.approx(math.exp(scores["nll"]))
        assert (scores["judge"], scores["digest"]) == ("true distribution of exact:words", words.digest)
        assert (scores["convention"], scores["precision"], scores["counted"]) == ("exact", "float64", 155)


@pytest.mark.skipif(not has_builtin(), reason="mini-judge is not built in here")
def test_a_score_is_what_compare_says(words):
    """The server and `limpet.compare` score in the same way and say so in the same words."""
    model, judge = limpet.load("mini", device="cpu"), limpet.load_judge(device="cpu")
    with server({"mini": model, "exact:words": words}, judge) as client:
        ask = {"model": "mini", "sampler": {"sampler": "native", "nfe": 3}, "length": 40, "seed": 6}
        (row,) = client.post("/api/sample", json=ask).json()["samples"]
        compared = limpet.compare(model, {"native": Native(nfe=3)}, n=1, seeds=(6,), length=40, judge=judge)
        scores = compared.samplers[0].scores
        assert row["scores"]["nll"] == pytest.approx(float(scores.nll[0]), abs=1e-12)
        assert row["scores"]["counted"] == scores.counted
        for ours, theirs in {"judge": "name", **{key: key for key in ("digest", "convention", "precision")}}.items():
            assert row["scores"][ours] == compared.judge[theirs]
        by_name = {model["name"]: model["judge"] for model in client.get("/api/models").json()["models"]}
        assert by_name == {"mini": judge.name, "exact:words": "true distribution of exact:words"}


def test_a_source_without_a_tokenizer_is_scored_by_its_true_distribution():
    torch.manual_seed(0)
    source = Mixture(torch.rand(3), torch.rand(3, 4, 7), phrases=2)
    with server({"own": source}) as client:
        (row,) = client.post("/api/sample", json={"sampler": {"sampler": "native", "nfe": 3}}).json()["samples"]
        assert row["text"] is None
        assert row["scores"]["nll"] == pytest.approx(-float(source.log_prob(torch.tensor([row["tokens"]]))) / 8)
        assert (row["scores"]["convention"], row["scores"]["counted"]) == ("exact", 8)
        assert client.get("/api/models").json()["models"][0]["judge"] == f"true distribution of {source.name}"
        assert client.post("/api/sample", json={"prompt": "a"}).status_code == 422


def test_a_comparison_is_paired(client, words):
    ask = {"samplers": {"a": {"sampler": "crs", "nfe": 6}, "b": {"sampler": "native", "nfe": 6}}, "seed": 7}
    found = client.post("/api/compare", json={**ask, "score": False}).json()["samplers"]
    assert found["a"]["text"] == limpet.sample(words, CRS(nfe=6), 1, 7).texts[0]
    assert found["b"]["text"] == limpet.sample(words, Native(nfe=6), 1, 7).texts[0]
    assert found["a"]["scores"] == {}


def test_the_defaults_are_what_the_page_starts_with(client, words):
    found = client.post("/api/compare", json={}).json()["samplers"]
    expected = {"native": Native(nfe=16), "CRS": CRS(nfe=16), "sharpness=0.25": limpet.recommended(16)}
    assert {name: row["sampler"] for name, row in found.items()} == {
        name: sampler.to_dict() for name, sampler in expected.items()
    }
    (row,) = client.post("/api/sample", json={}).json()["samples"]
    assert row["text"] == limpet.sample(words, n=1, nfe=16, seed=8200).texts[0]


def test_a_prompt_that_fills_the_sequence_leaves_nothing_to_score(client):
    (row,) = client.post("/api/sample", json={"prompt": "moon " * 32}).json()["samples"]
    assert row["text"] == "moon " * 32
    assert row["scores"] == {}


def test_texts_are_fixed_in_the_middle(client):
    ask = {
        "sampler": {"sampler": "crs", "nfe": 6},
        "fixed": [{"position": 50, "text": "tide "}, {"position": 10, "text": "surf "}],
    }
    text = client.post("/api/sample", json=ask).json()["samples"][0]["text"]
    assert text[50:55] == "tide "
    assert text[10:15] == "surf "


def test_a_stream_is_a_trajectory_step_by_step(client, words):
    """The header and the frames of the events, put together, are the library's own record."""
    chosen = {"native": {"sampler": "native", "nfe": 6}, "CRS": {"sampler": "crs", "nfe": 6}}
    answer = client.post("/api/compare", json={"samplers": chosen, "seed": 3}, headers=EVENTS)
    assert answer.headers["content-type"].startswith("text/event-stream")
    stream = events(answer)
    assert [kind for kind, _ in stream] == ["begin"] + ["frame"] * 7 + ["end"]
    for i, (name, values) in enumerate(chosen.items()):
        about = stream[0][1]["trajectories"][i]
        assert (about.pop("format"), about.pop("version")) == ("limpet trajectory", VERSION)
        header, texts, frames = Header(**about), {}, []
        for _, step in stream[1:-1]:
            part = step["trajectories"][i]
            assert part["index"] == i
            texts |= {int(token): text for token, text in part["token_texts"].items()}
            frames += header.unpack(base64.b64decode(part["frame"]))
        end = stream[-1][1]["trajectories"][i]
        received = Trajectory(header, frames, texts, end["text"])
        assert received.to_bytes() == record(words, samplers.from_dict(values), seed=3, name=name).to_bytes()
        assert end["scores"]["perplexity"] > 1
        assert {"judge", "digest", "convention", "precision", "counted"} <= set(end["scores"])


def test_a_trajectory_as_a_file(client, words):
    answer = client.post(
        "/api/sample",
        json={"sampler": {"sampler": "crs", "nfe": 5}, "score": False},
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


# Bad requests


CRS6 = {"sampler": "crs", "nfe": 6}
SCRIPT = "<script>alert(1)</script>"
BAD = {
    "not json": (b"{", 400),
    "empty": (b"", 400),
    "not utf-8": (b'{"prompt": "\xff\xfe"}', 400),
    "nan": (b'{"sampler": {"sampler": "crs", "warmup": NaN}}', 400),
    "infinity": (b'{"sampler": {"sampler": "crs", "budget": 1e999}}', 400),
    "deep": (b"[" * 20000, 400),
    "long number": (b'{"seed": ' + b"9" * 5000 + b"}", 400),
    "array": (b"[]", 422),
    "null": (b"null", 422),
    "too large": (b'{"prompt": "' + b"a" * 70000 + b'"}', 413),
    "unknown field": (b'{"sed": 1}', 422),
    "unknown parameter": (b'{"sampler": {"sampler": "crs", "horizn": 1}}', 422),
    "script as a field": (json.dumps({SCRIPT: 1}).encode(), 422),
    "script as a model": (json.dumps({"model": SCRIPT}).encode(), 422),
    "script as a parameter": (json.dumps({"sampler": {"sampler": "crs", SCRIPT: 1}}).encode(), 422),
    "script as a sampler": (json.dumps({"sampler": {"sampler": SCRIPT}}).encode(), 422),
    "script as a prompt": (json.dumps({"prompt": SCRIPT}).encode(), 422),
    "a file as a model": (b'{"model": "../../etc/passwd"}', 422),
    "a model of the hub": (b'{"model": "s-sahoo/duo"}', 422),
    "negative seed": (b'{"seed": -1}', 422),
    "fractional seed": (b'{"seed": 1.5}', 422),
    "boolean seed": (b'{"seed": true}', 422),
    "large seed": (b'{"seed": 9007199254740993}', 422),
    "no samples": (b'{"n": 0}', 422),
    "too many samples": (b'{"n": 1000}', 422),
    "too many calls": (b'{"sampler": {"sampler": "crs", "nfe": 100000}}', 422),
    "negative calls": (b'{"sampler": {"sampler": "crs", "nfe": -4}}', 422),
    "huge count": (b'{"sampler": {"sampler": "crs", "count": 1' + b"0" * 30 + b"}}", 422),
    "huge horizon": (b'{"sampler": {"sampler": "crs", "horizon": 1' + b"0" * 30 + b"}}", 422),
    "sampler a list": (b'{"sampler": []}', 422),
    "sampler without a name": (b'{"sampler": {"nfe": 4}}', 422),
    "samplers of a comparison": (b'{"samplers": {"a": {"sampler": "crs"}}}', 422),
    "name of a sampler a list": (b'{"sampler": {"sampler": []}}', 422),
    "a file as a sampler": (b'{"sampler": {"sampler": "./mine.py:Mine"}}', 422),
    "a module as a sampler": (b'{"sampler": {"sampler": "os:system"}}', 422),
    "a sampler by its class": (b'{"sampler": {"sampler": "limpet.samplers.crs:CRS"}}', 422),
    "text for a number": (b'{"sampler": {"sampler": "crs", "nfe": "3"}}', 422),
    "a fraction for a whole number": (b'{"sampler": {"sampler": "crs", "nfe": 3.0}}', 422),
    "a truth for a number": (b'{"sampler": {"sampler": "crs", "budget": true}}', 422),
    "a huge whole number for a fraction": (b'{"sampler": {"sampler": "crs", "budget": 1' + b"0" * 400 + b"}}", 422),
    "the inside name of a parameter": (b'{"sampler": {"sampler": "crs", "param_nfe": 4}}', 422),
    "null for a parameter that takes none": (b'{"sampler": {"sampler": "crs", "nfe": null}}', 422),
    "parameters of odd kinds": (b'{"sampler": {"sampler": "crs", "final_step": [], "grid": {}}}', 422),
    "recorded values": (b'{"sampler": {"sampler": "crs", "values": "recorded"}}', 422),
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
    "fixed and prompt": (b'{"prompt": "moon", "fixed": [{"position": 2, "text": "tide"}]}', 422),
    "fixed twice": (b'{"fixed": [{"position": 2, "text": "a"}, {"position": 2, "text": "b"}]}', 422),
    "non-finite in a nested sampler": (b'{"sampler": {"sampler": "gibbs", "predictor": "crs,budget=inf"}}', 422),
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
    "chosen",
    [
        {}, [], 3, {"": CRS6}, {"a" * 81: CRS6}, {"a": 3}, {"a": {}}, {str(i): CRS6 for i in range(5)},
        {"\ud800": CRS6}, {"a": {**CRS6, "sampler": "nothing"}}, {"a": {**CRS6, "spaicng": 2}},
    ],
    ids=str,
)  # fmt: skip
def test_bad_samplers_of_a_comparison(client, chosen):
    body = json.dumps({"samplers": chosen})
    answer = client.post("/api/compare", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ({"sed": 1}, "did you mean seed?"),
        ({"sampler": {"sampler": "crs", "horizn": 1}}, "did you mean horizon?"),
        ({"sampler": {"sampler": "native", "budget": 1}}, "it takes nfe, refresh, warmup, "),
        ({"sampler": {"sampler": "csr"}}, "here are native, crs"),
        ({"fixed": [{"positon": 1}]}, "did you mean position?"),
        ({"n": "2"}, 'n is "2"; it should be a valid integer'),
        ({"sampler": {"sampler": "crs", "nfe": 300}}, "it should be less than or equal to 256"),
    ],
    ids=str,
)
def test_a_sentence_says_what_to_correct(client, field, hint):
    assert hint in client.post("/api/sample", json=field).json()["error"]


def test_other_content_types_are_refused(client):
    """So no page of another site can make a browser send work here."""
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
    """schemathesis: whatever is sent, no 5xx, and every answer is as described, also for a user's sampler."""
    import schemathesis
    from schemathesis import checks

    models = {"exact:words": words, "exact:verses": limpet.load("exact:verses")}
    first = named_samplers(["native", mine], 4)
    worker, limits = in_this_process(Resources(models)), Limits(calls=4, samples=2)
    app = application(worker, limits, names=("testserver",), samplers=first, available=available_with(first))
    schema = schemathesis.openapi.from_asgi("/api/openapi.json", app)
    held = [
        checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
        checks.response_schema_conformance, checks.negative_data_rejection,
    ]  # fmt: skip
    statuses = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode == "negative" and operation.method == "get":
            continue  # it takes nothing that could be wrong

        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def fuzz(case):
            answer = case.call()
            statuses.add((case.path, answer.status_code))
            case.validate_response(answer, checks=held)

        fuzz()
    if mode == "positive":
        assert {(path, 200) for path in ("/api/sample", "/api/compare", "/api/models", "/health", "/ready")} <= statuses
    else:
        assert {status for _, status in statuses} <= {400, 415, 422}


# Samplers of users

MINE = """
from dataclasses import dataclass
from typing import Literal

from limpet import LimpetError, Native, param


@dataclass(frozen=True)
class Mine(Native):
    \"\"\"Native, with every n-th token marked.\"\"\"

    nth: int = param(2, "Which tokens are marked.", low=1, high=9)
    copy: bool = param(False, "A name that pydantic has for itself.")
    tone: Literal["soft", "loud"] | None = param(None, "Nothing to do with it.")

    def __post_init__(self):
        super().__post_init__()
        if self.copy and self.nth == 3:
            raise LimpetError("copy is not for nth=3")

    def step(self, ctx, state):
        state, info = super().step(ctx, state)
        return state, info._replace(masks={"nth": (state.tokens % self.nth) == 0})
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(MINE)
    return f"{file}:Mine"


def test_a_sampler_in_a_file_is_served_under_its_name_alone(mine, words):
    """In a request, a comparison, a stream, the description and the page; none of them shows where the file is."""
    first = named_samplers([f"mine: {mine} nfe=4 nth=3", "native"], 5)
    with server(available=available_with(first), samplers=first) as client:
        ask = {"sampler": {"sampler": "Mine", "nth": 4, "nfe": 3}, "seed": 2}
        answer = client.post("/api/sample", json=ask)
        (row,) = answer.json()["samples"]
        assert row["text"] == limpet.sample(words, Native(nfe=3), 1, 2).texts[0]
        assert (row["sampler"]["sampler"], row["sampler"]["nth"], row["sampler"]["tone"]) == ("Mine", 4, None)
        stream = client.post("/api/compare", json={}, headers=EVENTS)
        headers = events(stream)[0][1]["trajectories"]
        assert [(header["name"], header["sampler"]["sampler"], header["calls"]) for header in headers] == [
            ("mine", "Mine", 4), ("native", "native", 5)
        ]  # fmt: skip
        assert headers[0]["masks"] == ["fixed", "nth"]

        described = client.get("/api/openapi.json")
        params = described.json()["components"]["schemas"]["Mine"]["properties"]
        assert params["nth"] == {"default": 2, "description": "Which tokens are marked.", "maximum": 9, "minimum": 1,
                                "title": "Nth", "type": "integer"}  # fmt: skip
        assert params["copy"]["type"] == "boolean"
        home = client.get("/")
        assert "Which tokens are marked." in home.text
        for text in (answer.text, stream.text, described.text, home.text):
            assert "mine.py" not in text

        for wrong, status in (({"nth": 10}, 422), ({"nth": "2"}, 422), ({"nth": 3, "copy": True}, 422), ({}, 200)):
            answer = client.post("/api/sample", json={"sampler": {"sampler": "Mine", "nfe": 2, **wrong}})
            assert answer.status_code == status, wrong
        assert client.post("/api/sample", json={"sampler": {"sampler": mine, "nfe": 2}}).status_code == 422


def test_a_file_that_was_not_named_at_the_start_is_never_run(mine, client):
    for name in (mine, mine.rpartition(":")[0], "Mine"):
        answer = client.post("/api/sample", json={"sampler": {"sampler": name}})
        assert answer.status_code == 422
        assert "here are native, crs" in answer.json()["error"]


def test_two_samplers_of_one_name_are_refused(mine, tmp_path):
    (tmp_path / "other.py").write_text(MINE)
    with pytest.raises(LimpetError, match="two samplers are called Mine"):
        available_with(named_samplers([mine, f"other: {tmp_path}/other.py:Mine"], 4))


def test_the_number_of_calls_is_bounded_whatever_a_sampler_does_with_its_parameters(words):
    class Twice(Native):
        def __post_init__(self):
            super().__post_init__()
            object.__setattr__(self, "nfe", 2 * self.nfe)

    with server(available={**samplers.available(), "twice": Twice}, calls=8) as client:
        answer = client.post("/api/sample", json={"sampler": {"sampler": "twice", "nfe": 6}})
        assert answer.status_code == 422
        assert "at most 8" in answer.json()["error"]


# Clients and time


def test_a_full_server_says_when_to_come_again():
    gate = threading.Event()
    model = Counting(lambda: gate.wait(GUARD))
    ask, statuses = {"sampler": {"sampler": "crs", "nfe": 3}}, []
    with server({"counting": model}, queue=1, client=3) as client:

        def send():
            statuses.append(httpx.post(f"{client.base_url}/api/sample", json=ask, timeout=GUARD).status_code)

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(client.queue.jobs) == 2, "the arrival of both requests")
        refused = client.post("/api/sample", json=ask)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "come again" in refused.json()["error"]
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        gate.set()
        for thread in threads:
            thread.join()
        assert statuses == [200, 200]
        wait_for(lambda: not client.queue.jobs, "the end of both requests")
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize("accept", [b"", b"Accept: text/event-stream\r\n"], ids=["json", "events"])
def test_a_client_that_leaves_stops_its_work_within_a_call(accept):
    permits = threading.Semaphore(3)
    model = Counting(lambda: permits.acquire(timeout=GUARD))
    with server({"counting": model}, queue=0) as client:
        body = json.dumps({"sampler": {"sampler": "crs", "nfe": 200}}).encode()
        head = b"POST /api/sample HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + accept
        with socket.create_connection((client.base_url.host, client.base_url.port)) as leaving:
            leaving.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_for(lambda: model.calls == 4, "the fourth call")
            (job,) = client.queue.jobs
        wait_for(lambda: job.stop_reason is not None, "the news that the client left")
        permits.release(200)
        wait_for(lambda: not client.queue.jobs, "the end of the work")
        assert model.calls == 4


def test_a_request_has_its_time(monkeypatch):
    """Measured between network calls by a clock that moves by a second at each."""
    clock = Clock(monkeypatch)

    def tick():
        clock.time += 1

    model = Counting(tick)
    with server({"counting": model}, seconds=3.5) as client:
        request = {"sampler": {"sampler": "crs", "nfe": 100}}
        answer = client.post("/api/sample", json=request)
        assert answer.status_code == 422
        assert "fewer calls" in answer.json()["error"]
        assert model.calls == 4
        stream = events(client.post("/api/sample", json=request, headers=EVENTS))
        assert stream[-1][0] == "error"
        assert model.calls == 8


def test_a_broken_model_harms_one_request_alone(words):
    def fail():
        raise RuntimeError("a secret detail")

    with server({"counting": Counting(fail), "exact:words": words}) as client:
        answer = client.post("/api/sample", json={"sampler": {"sampler": "crs", "nfe": 3}})
        assert answer.status_code == 500
        assert "log" in answer.json()["error"]
        assert "secret" not in answer.text
        assert client.post("/api/sample", json={"model": "exact:words"}).status_code == 200


def resident(pid="self"):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def growth(client, request, warmup, requests, *workers):
    """Bytes of memory, here and in workers, that some requests add after some others."""

    def send(count):
        for i in range(count):
            headers = EVENTS if i % 2 else {}
            assert client.post("/api/compare", json={**request, "seed": i}, headers=headers).status_code == 200
        gc.collect()
        return resident() + sum(resident(worker) for worker in workers)

    before = send(warmup)
    return send(requests) - before


@pytest.mark.long
@pytest.mark.skipif("mini" not in model_files.builtin_names(), reason="mini is not built in here")
def test_memory_stays_flat_over_200_requests_to_mini():
    worker = in_processes(partial(load_resources, ("mini",), "mini-judge", LoadOptions("cpu")))  # as limpet serve does
    app = application(worker)
    with serving(app) as address, httpx.Client(base_url=address, timeout=GUARD) as client:
        samplers = {"native": {"sampler": "native", "nfe": 16}, "CRS": {"sampler": "crs", "nfe": 16}}
        (process,) = app.state.queue.workers
        first = process.pid
        assert growth(client, {"samplers": samplers}, 10, 200, first) < 48 * 2**20
        assert process.pid == first


def test_a_port_that_is_in_use_is_named(client):
    with pytest.raises(LimpetError, match="cannot be used"):
        listen("127.0.0.1", client.base_url.port)
    with pytest.raises(LimpetError, match="cannot be used"):
        listen("127.0.0.1", 99999999)
    listen("127.0.0.1", 0).close()
