"""The OpenAI-compatible API, asked by OpenAI's own client: the library's texts, in any batch, and OpenAI's errors."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import limpet
from examples import FENCED, ROOT
from gemma_cases import folder_of
from limpet import CRS, Native
from limpet.errors import LimpetError
from limpet.integrations import ray_serve
from limpet.server.completions import TextRequest, completions
from limpet.server.handlers import Resources
from limpet.server.scheduler import Batch, ClientLeft, Limits, Queue, Refusal
from limpet.server.workers import in_processes, in_this_process
from served import GUARD, Counting, moody, running, wait_for

KEY = "the key"
WORDS = limpet.load("exact:words")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return limpet.load(str(folder_of(tmp_path_factory.mktemp("gemma") / "model")), device="cpu")


@pytest.fixture(scope="module")
def resources(gemma):
    return Resources({"exact:words": WORDS, "mini": limpet.load("mini", device="cpu"), "gemma": gemma})


@pytest.fixture(scope="module")
def server(resources):
    with running(in_this_process(resources), options={"api": True, "api_key": KEY, "page": False}) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def client_of(server, **options):
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=KEY, timeout=GUARD, max_retries=0, **options)


def ask(client, prompt="moon ", model="exact:words", nfe=6, **more):
    extra = {"nfe": nfe, **{name: more.pop(name) for name in ("sampler", "steps", "sharpness") if name in more}}
    return client.completions.create(model=model, prompt=prompt, extra_body=extra, **{"seed": 5, **more})


# Answers


def test_the_models_are_listed(client):
    listed = client.models.list().data
    assert [model.id for model in listed] == ["exact:words", "mini", "gemma"]
    assert client.models.retrieve("mini") == listed[1]
    with pytest.raises(openai.NotFoundError) as found:
        client.models.retrieve("s-sahoo/duo")
    assert found.value.code == "model_not_found"


def test_completions_are_those_of_the_library(client):
    """The choices of several prompts, one prompt after the other."""
    answer = ask(client, ["moon ", "tide "], n=2, sampler="crs budget=.25")
    texts = [choice.text for choice in answer.choices]
    sampler = CRS(nfe=6, budget=0.25)
    assert texts == [text[5:] for prompt in ("moon ", "tide ")
                     for text in limpet.sample(WORDS, sampler, 2, 5, prompt=prompt).texts]  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 10, "completion_tokens": 620, "total_tokens": 630
    }  # fmt: skip
    assert answer.system_fingerprint == WORDS.digest[:16]
    assert answer.limpet == {"sampler": sampler.to_dict(), "nfe": 6, "seed": 5}


def test_sharpness_chooses_the_sampler(client):
    answer = ask(client, sharpness=0.5)
    assert answer.limpet["sampler"] == limpet.recommended(6, 0.5).to_dict() != ask(client).limpet["sampler"]
    for more in ({"sampler": "crs"}, {"top_p": 0.9}):
        with pytest.raises(openai.BadRequestError, match="sharpness chooses the sampler"):
            ask(client, sharpness=0.5, **more)
    with pytest.raises(openai.BadRequestError, match="it takes a number from 0 to 1"):
        ask(client, sharpness=2)


def test_a_network_writes_no_more_than_it_is_asked_for(client, resources):
    model = resources.models["mini"]
    answer = ask(client, "The sea", "mini", max_tokens=20, sampler={"sampler": "native", "top_p": 0.9})
    (ids,) = limpet.sample(model, Native(nfe=6, top_p=0.9), 1, 5, 32, "The sea").tokens.tolist()
    start = len(model.tokenizer.encode("The sea"))
    assert answer.choices[0].text == model.tokenizer.decode(ids[start : start + 20])
    assert answer.usage.completion_tokens == 20


def test_infilling(client, resources):
    """A network's text ends with the suffix; exact sources have one length, and their text goes on."""
    found = ask(client, "The sea", "mini", suffix=" on the rock.", max_tokens=9, n=2)
    whole = limpet.infill(resources.models["mini"], "The sea", " on the rock.", 9, None, 2, 5, nfe=6).texts
    assert [f"The sea{choice.text} on the rock." for choice in found.choices] == whole
    answer = ask(client, suffix="tide surf", max_tokens=10)
    (expected,) = limpet.sample(WORDS, n=1, seed=5, nfe=6, prompt="moon ", fixed={15: "tide surf"}).texts
    assert answer.choices[0].text == expected[5:15]


def test_a_seed_is_drawn_and_told(client):
    one, other = (ask(client, seed=None) for _ in range(2))
    assert one.limpet["seed"] != other.limpet["seed"]
    assert ask(client, seed=one.limpet["seed"]).choices[0].text == one.choices[0].text


def test_a_stop_ends_a_text(client):
    text = ask(client).choices[0].text
    stop = text[40:44]
    answer = ask(client, stop=[stop, "never"])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_is_the_completion(client):
    whole, chunks = ask(client, n=2), list(ask(client, n=2, stream=True, stream_options={"include_usage": True}))
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].limpet == whole.limpet
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"] * 2


def test_steps_show_the_text_after_every_call(client):
    chunks = list(ask(client, stream=True, steps=True))
    shown = [chunk.limpet for chunk in chunks if "call" in (getattr(chunk, "limpet", None) or {})]
    assert [one["call"] for one in shown] == [1, 2, 3, 4, 5, 6]
    assert shown[-1]["text"] == ask(client).choices[0].text == "".join(c.choices[0].text for c in chunks if c.choices)
    steps = limpet.steps(WORDS, nfe=6, seed=5, prompt="moon ", trace=False)
    assert [one["text"] for one in shown] == [step.text()[5:] for step in steps]


CHAT = [{"role": "user", "content": "Why is the sky blue?"}]


def chat(client, messages=CHAT, **more):
    return client.chat.completions.create(model="gemma", messages=messages, seed=5, extra_body={"nfe": 4}, **more)


def test_a_chat_is_a_reply(client, gemma):
    """Two canvases; in a stream, the first comes when it is finished."""
    expected = limpet.reply(gemma, None, 2, 5, 32, CHAT[0]["content"], nfe=4)
    answer = chat(client, n=2, max_tokens=32)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == expected.texts
    assert answer.usage.prompt_tokens == len(gemma.prompt(CHAT[0]["content"]))
    chunks = [chunk.choices[0] for chunk in chat(client, max_completion_tokens=32, stream=True) if chunk.choices]
    assert "".join(choice.delta.content for choice in chunks) == texts[0]
    ended = set(gemma.ends) & set(expected.tokens[0, :16].tolist())
    assert len([choice for choice in chunks if choice.delta.content]) == (1 if ended else 2)
    assert chunks[-1].finish_reason == answer.choices[0].finish_reason


def test_a_chat_has_several_messages(client, gemma):
    longer = [{"role": "system", "content": "Be brief."}, *CHAT]
    parts = [longer[0], {"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    expected = limpet.reply(gemma, None, 1, 5, prompt=gemma.prompt(longer), nfe=4).texts
    assert [chat(client, messages).choices[0].message.content for messages in (longer, parts)] == expected * 2
    assert chat(client).choices[0].message.content != expected[0]


# Errors

BAD = {
    "another model": ({"model": "gpt-5"}, openai.NotFoundError, "model", "model_not_found"),
    "no samples": ({"n": 0}, openai.BadRequestError, "n", None),
    "too many samples": ({"n": 17}, openai.BadRequestError, "n", None),
    "a seed below 0": ({"seed": -1}, openai.BadRequestError, "seed", None),
    "no tokens": ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", None),
    "an empty stop": ({"stop": ""}, openai.BadRequestError, "stop", None),
    "a number as a prompt": ({"prompt": 3}, openai.BadRequestError, "prompt", None),
    "letters that it does not know": ({"prompt": "é"}, openai.BadRequestError, None, None),
    "a long prompt": ({"prompt": "a" * 161}, openai.BadRequestError, None, None),
    "what other engines do": ({"logprobs": 3}, openai.BadRequestError, "logprobs", "unsupported_parameter"),
    "a misspelt field": ({"extra_body": {"nef": 3}}, openai.BadRequestError, "nef", "unknown_parameter"),
    "another sampler": ({"sampler": "csr"}, openai.BadRequestError, "sampler", None),
    "a file as a sampler": ({"sampler": "./mine.py:Mine"}, openai.BadRequestError, "sampler", None),
    "a file inside a sampler": ({"sampler": "gibbs predictor=./m.py:M"}, openai.BadRequestError, "sampler", None),
    "a file of a sampler": ({"sampler": "mine.toml"}, openai.BadRequestError, "sampler", None),
    "another parameter": ({"sampler": "crs budgte=1"}, openai.BadRequestError, "sampler", None),
    "many calls": ({"nfe": 300}, openai.BadRequestError, "nfe", None),
    "many calls of a sampler": ({"nfe": None, "sampler": "crs nfe=300"}, openai.BadRequestError, "nfe", None),
    "a temperature of 0": ({"temperature": 0}, openai.BadRequestError, "sampler", None),
}


@pytest.mark.parametrize(("change", "kind", "param", "code"), BAD.values(), ids=BAD)
def test_an_error_has_openais_form(client, change, kind, param, code):
    """Also of a stream, which has not begun."""
    if "extra_body" in change:
        change = {"sampler": None, **change["extra_body"]}
        with pytest.raises(kind) as found:
            client.completions.create(model="exact:words", prompt="", extra_body=change)
    else:
        with pytest.raises(kind) as found:
            ask(client, **{"stream": True, **change})
    assert (found.value.param, found.value.code) == (param, code)
    assert found.value.type == ("not_found_error" if code == "model_not_found" else "invalid_request_error")
    assert set(found.value.body) == {"message", "type", "param", "code"}
    assert "\n" not in found.value.body["message"]


def test_the_key_guards_what_it_should(server):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="another", max_retries=0).models.list()
    for wrong in (b"Bearer", b"Bearer \xff\xc3\xa9", KEY.encode(), f"Bearer {KEY} {KEY}".encode()):
        assert server.get("/v1/models", headers={b"Authorization": wrong}).status_code == 401
    for path in ("/v1/models", "/v1/models/mini", "/metrics"):
        assert server.get(path).status_code == 401
        assert server.get(path, headers={"Authorization": f"Basic {KEY}"}).status_code == 401
        assert server.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = server.post(path, json={})
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/").status_code == 404  # the page is off
    nothing = server.get("/v1/nothing")
    assert (nothing.status_code, set(nothing.json()["error"])) == (404, {"message", "type", "param", "code"})
    foreign = server.get("/v1/models", headers={"Host": "elsewhere.example"})
    assert (foreign.status_code, foreign.json()["error"]["type"]) == (400, "invalid_request_error")


def test_metrics_are_prometheus_text(server, client):
    def value(name, **tags):
        text = server.get("/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        return sum(one.value for one in samples if one.name == name and tags.items() <= one[1].items())

    path = "/v1/completions"
    names = ["limpet_requests_total", "limpet_network_calls_total", "limpet_completion_tokens_total"]
    before = [value(name) for name in names]
    answered = value("limpet_requests_total", path=path, status="200")
    ask(client, n=2, max_tokens=7)
    after = [value(name) for name in names]
    assert [int(now - then) for now, then in zip(after, before, strict=True)] == [5, 6, 14]  # four were for metrics
    assert value("limpet_requests_total", path=path, status="200") == answered + 1
    assert value("limpet_ready") == 1


# Batches


def request_of(seed, prompt, n, **more):
    common = {"model": "exact:words", "suffix": "", "sampler": None, "described": None, "nfe": 4, "max_tokens": None}
    return TextRequest(**{**common, "prompts": (prompt,), "n": n, "seed": seed, "limit": 1024, **more})


def drawn(resources, requests):
    found = {}

    def report(kind, data):
        if kind in ("done", "refused"):
            assert data[0] not in found  # nothing is answered twice
            found[data[0]] = data[1]

    completions(resources, requests, report)
    return [found[number] for number in range(len(requests))]


REQUESTS = st.builds(
    request_of, seed=st.sampled_from([0, 1, 2**53 - 1]), prompt=st.sampled_from(["", "moon ", "tide surf ", "Z"]),
    n=st.integers(1, 3), suffix=st.sampled_from(["", "moon"]), max_tokens=st.sampled_from([None, 1, 30]),
)  # fmt: skip


@given(requests=st.lists(REQUESTS, min_size=1, max_size=5))
@settings(max_examples=25)
def test_a_request_is_answered_alike_in_every_batch(requests):
    """Also beside requests that cannot be answered."""
    resources = Resources({"exact:words": WORDS})
    assert drawn(resources, requests) == [drawn(resources, [request])[0] for request in requests]


def test_a_network_answers_alike_in_every_batch(resources, gemma):
    """Texts and replies to prompts of several lengths, and of the same length."""
    for model in ("mini", "gemma"):
        requests = [
            request_of(seed, prompt, 2, model=model, max_tokens=tokens)
            for seed, prompt, tokens in [(5, "The sea", 20), (6, "The cat", 32), (7, "A long way from here", 10)]
        ]
        assert drawn(resources, requests) == [drawn(resources, [request])[0] for request in requests]


def test_64_clients_share_two_batches():
    """All requests that come while the first runs are drawn together, and their texts are those of the library."""
    begun, goes_on = threading.Event(), threading.Event()

    def hold():
        begun.set()
        assert goes_on.wait(GUARD)

    model = Counting(hold)
    worker = in_this_process(Resources({"counting": model}))
    with running(worker, options={"api": True}) as server, ThreadPoolExecutor(64) as pool:
        client = client_of(server)

        def text(seed):
            return ask(client, "abcdefgh"[: seed % 8], "counting", 4, seed=seed).choices[0].text

        found = [pool.submit(text, 0)]
        assert begun.wait(GUARD)
        found += [pool.submit(text, seed) for seed in range(1, 64)]
        wait_for(lambda: len(server.queue.jobs) == 64, "the arrival of all")
        goes_on.set()
        texts = [one.result(GUARD) for one in found]
        assert model.calls == 2 * 4
        assert server.queue.metrics["limpet_batch_requests_count"] == 2
        assert server.queue.metrics["limpet_batch_requests_sum"] == 64
    expected = [limpet.sample(model, None, 1, s, nfe=4, prompt="abcdefgh"[: s % 8]).texts[0] for s in range(64)]
    assert texts == [whole[seed % 8 :] for seed, whole in enumerate(expected)]


@pytest.mark.parametrize(
    ("bad", "worker"),
    [("b", in_this_process(moody())), pytest.param("d", in_processes(moody), marks=pytest.mark.long)],
    ids=["fails", "kills its process"],
)
def test_a_request_ends_no_other(bad, worker):
    """It shares a batch with good ones, which are answered."""
    with running(worker, options={"api": True}, wait=GUARD, batch=3) as server, ThreadPoolExecutor(3) as pool:
        client = client_of(server)

        def text(prompt):
            try:
                return ask(client, prompt, "moody", 3).choices[0].text
            except openai.InternalServerError as error:
                return error.body["message"]

        good, failed, other = pool.map(text, ["s", bad, "t"])
        assert failed == "the server failed to answer this request; its log says why"
        for letter, found in (("s", good), ("t", other)):
            (expected,) = limpet.sample(limpet.load("exact:verses"), None, 1, 5, nfe=3, prompt=letter).texts
            assert found == expected[1:]
        assert server.queue.metrics["limpet_batch_requests_count"] == 4  # all of them, and then each alone


class StepWorker:
    """Makes one network call at every permit; every request takes two."""

    models, is_ready = {}, True

    def __init__(self):
        self.permits, self.calls, self.batches = threading.Semaphore(0), 0, []

    def prepare(self, check):
        pass

    def run(self, kind, requests, report, check):
        self.batches.append(requests)
        for _ in range(2):
            while not self.permits.acquire(timeout=0.01):
                check()
            self.calls += 1
            report("", None)
        for number, request in enumerate(requests):
            report("done", (number, request.seed))

    def close(self):
        self.permits.release(100)


async def until(condition):
    async with asyncio.timeout(GUARD):
        while not condition():
            await asyncio.sleep(0.001)


def in_loop(test):
    return lambda: asyncio.run(test())


@in_loop
async def test_who_leaves_a_batch_ends_only_his_part():
    worker = StepWorker()
    queue = Queue(Limits(wait=GUARD, batch=3), [worker])
    jobs = [queue.submit("completions", request_of(seed, "", 1), "a") for seed in (1, 2, 3)]
    await until(lambda: worker.batches)
    jobs[1].stop()
    await until(lambda: len(queue.jobs) == 2)
    assert isinstance(jobs[1].future.exception(0), ClientLeft)
    worker.permits.release(2)
    assert [await asyncio.wrap_future(jobs[i].future) for i in (0, 2)] == [1, 3]
    assert worker.calls == 2
    queue.close()


@in_loop
async def test_what_does_not_fit_waits_for_the_next_batch():
    """Other calls, and more samples than a batch holds."""
    worker = StepWorker()
    queue = Queue(Limits(batch=4), [worker])
    sizes = [(1, 4), (3, 4), (2, 4), (1, 5), (1, 4)]
    worker.permits.release(100)
    with queue._lock:  # until all wait
        for seed, (n, nfe) in enumerate(sizes):
            queue.submit("completions", request_of(seed, "", n, nfe=nfe), "a")
    await until(lambda: not queue.jobs)
    assert [[one.seed for one in batch] for batch in worker.batches] == [[0, 1], [2, 4], [3]]
    queue.close()


@in_loop
async def test_the_server_finishes_what_runs_when_it_stops():
    """What waits, and what comes then, is refused; so is all that still runs after the grace."""
    for grace, finishes in ((GUARD, True), (0, False)):
        worker = StepWorker()
        queue = Queue(Limits(batch=1, grace=grace), [worker])
        first = queue.submit("completions", request_of(1, "", 1), "a")
        await until(lambda worker=worker: worker.batches)
        waits = queue.submit("completions", request_of(2, "", 1), "a")
        drained = asyncio.ensure_future(queue.drain(lambda: False))
        await until(waits.future.done)
        for refused in (lambda waits=waits: waits.future.result(0), lambda q=queue: q.submit("completions", None, "a")):
            with pytest.raises(Refusal) as found:
                refused()
            assert found.value.status == 503
        if finishes:
            worker.permits.release(2)
            assert await asyncio.wrap_future(first.future) == 1
        else:
            with pytest.raises(Refusal, match="stopping"):
                await asyncio.wrap_future(first.future)
        await drained


@in_loop
async def test_the_api_has_places_of_its_own():
    worker = StepWorker()
    queue = Queue(Limits(api=2, queue=0, client=1, batch=1), [worker])
    for seed in range(2):
        queue.submit("completions", request_of(seed, "", 1), "a")
    with pytest.raises(Refusal) as found:
        queue.submit("completions", request_of(3, "", 1), "b")
    assert (found.value.status, found.value.headers["Retry-After"]) == (503, "1")
    assert queue.status == "full"
    queue.close()


def test_a_batch_has_the_time_of_its_jobs(monkeypatch):
    """And each network call the time of one."""

    async def test():
        jobs = [Queue(Limits(seconds=5), [StepWorker()]).submit("completions", request_of(1, "", 1), "a")] * 3
        batch = Batch(jobs, None)
        batch.began = batch.last_call = 0.0
        batch._deadline = batch.began + batch.seconds
        for time, last, wrong in ((14, 10, None), (16, 12, "limit of 15 s"), (9, 3, "network call takes longer")):
            monkeypatch.setattr("limpet.server.scheduler.now", lambda time=time: time)
            batch.last_call = last
            if wrong is None:
                batch.check()
            else:
                with pytest.raises(LimpetError, match=wrong):
                    batch.check()

    asyncio.run(test())


def test_the_python_of_the_page_runs(server, monkeypatch, capsys):
    """In its order; Ray Serve is not started."""
    monkeypatch.setattr(ray_serve, "deployment", lambda models, replicas, limits: (models, replicas, limits.batch))
    names = {"KEY": KEY}
    for kind, block in FENCED.findall((ROOT / "docs/serve.md").read_text(encoding="utf-8")):
        if kind == "python":
            block = block.replace("http://127.0.0.1:8787", str(server.base_url)).replace('"secret"', "KEY")
            exec(block, names)
    assert names["infilled"].usage.completion_tokens == 12
    assert names["answer"].limpet["sampler"]["sampler"] == "mend"
    assert names["application"] == (["mini"], 2, 32)


def test_64_clients_of_a_network_get_the_texts_that_they_get_alone(resources):
    """Also where prompts and lengths differ, so that requests of one batch run in several shapes."""

    def text(number):
        prompt, tokens = ("The sea", "A", "Once upon a time")[number % 3], (8, 9, 40)[number % 3]
        more = {"nfe": 2, "seed": number, "max_tokens": tokens}
        return ask(client, prompt, "mini", **more).choices[0].text

    with (
        running(in_this_process(resources), options={"api": True}) as server,
        running(in_this_process(resources), options={"api": True}, batch=1) as single,
        ThreadPoolExecutor(64) as pool,
    ):
        client = client_of(server)
        together = list(pool.map(text, range(64)))
        client = client_of(single)
        assert [text(number) for number in range(0, 64, 7)] == together[::7]


@pytest.mark.long
def test_64_clients_get_three_times_the_throughput(tmp_path):
    """In turns: 64 requests one at a time, and 64 at once."""
    import time

    torch.set_num_threads(2)
    resources = Resources({"exact:words": WORDS})
    with running(in_this_process(resources), options={"api": True}) as server, ThreadPoolExecutor(64) as pool:
        client, ratios = client_of(server), []

        def text(seed):
            return ask(client, "moon ", nfe=8, seed=seed, max_tokens=28).choices[0].text

        list(pool.map(text, range(64)))
        for _ in range(2):
            times = [time.perf_counter()]
            alone = [text(seed) for seed in range(64)]
            times.append(time.perf_counter())
            together = list(pool.map(text, range(64)))
            times.append(time.perf_counter())
            assert together == alone
            ratios.append((times[1] - times[0]) / (times[2] - times[1]))
        print(ratios)
        assert min(ratios) >= 3
