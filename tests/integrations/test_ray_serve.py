"""The server on Ray Serve: two replicas answer, also while one is killed, and no answer is lost or wrong."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import limpet
from limpet import recommended
from limpet.errors import LimpetError
from limpet.integrations import ray_serve
from limpet.server.http import listen
from served import GUARD, wait_for


def test_an_option_that_does_not_exist():
    with pytest.raises(LimpetError, match="there is no option 'modles': give models, replicas"):
        ray_serve.app({"modles": "mini"})


@pytest.fixture(scope="module")
def address():
    ray, serve = pytest.importorskip("ray"), pytest.importorskip("ray.serve")
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=40)
    serve.start(http_options={"port": port})
    serve.run(ray_serve.deployment(["exact:words"], 2, api_key="k", options={"ray_actor_options": {"num_cpus": 1}}))
    yield f"http://127.0.0.1:{port}/v1"
    serve.shutdown()
    ray.shutdown()


def replicas():
    """The actors of the replicas, by name."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    return {one["name"]: one["namespace"] for one in named if one["name"].startswith("SERVE_REPLICA::")}


@pytest.mark.long
def test_two_replicas_answer_while_one_is_killed(address):
    """Every request gets one answer: the library's text, or an error. After the kill, the other replica answers all."""
    import openai
    import ray

    client = openai.OpenAI(base_url=address, api_key="k", max_retries=0, timeout=GUARD)
    killed, answered, lock = threading.Event(), {"before": 0, "ids": set()}, threading.Lock()

    def answer(seed):
        try:
            found = client.completions.create(
                model="exact:words", prompt="moon ", seed=seed, max_tokens=20, extra_body={"nfe": 16}
            )
        except openai.APIError as error:
            return f"{type(error).__name__}: {error}"
        with lock:
            assert found.id not in answered["ids"]  # nothing is answered twice
            answered["ids"].add(found.id)
        return found.choices[0].text

    model = limpet.load("exact:words")
    expected = [limpet.sample(model, recommended(16), 1, seed, prompt="moon ").texts[0][5:25] for seed in range(60)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, range(24))) == expected[:24]
        jobs = []
        for seed in range(60):
            jobs.append(pool.submit(answer, seed))
            if seed == 20:
                jobs[8].result(GUARD)  # some are answered, some run
                name, namespace = next(iter(replicas().items()))
                ray.kill(ray.get_actor(name, namespace))
                killed.set()
        answers = [job.result(GUARD) for job in jobs]
    assert killed.is_set()
    wrong = {seed: one for seed, one in enumerate(answers) if one != expected[seed]}
    print(wrong)
    assert all(one.startswith(("InternalServerError", "APIConnectionError")) for one in wrong.values()), wrong
    assert len(wrong) <= 16  # what ran on one replica, and what was on its way there
    wait_for(lambda: answer(0) == expected[0], "an answer of the replica that is left")
    assert [answer(seed) for seed in range(8)] == expected[:8]
    wait_for(lambda: name not in replicas() and len(replicas()) == 2, "another replica in the killed one's place")


@pytest.mark.long
def test_the_other_routes_and_the_key(address):
    import openai

    client = openai.OpenAI(base_url=address, api_key="k", max_retries=0, timeout=GUARD)
    assert [model.id for model in client.models.list()] == ["exact:words"]
    stream = client.completions.create(model="exact:words", prompt="", stream=True, seed=1, extra_body={"nfe": 4})
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text == limpet.sample(limpet.load("exact:words"), recommended(4), 1, 1).texts[0]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=address, api_key="another", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="exact:words", prompt="é")
