"""SGLang's own base class drives limpet's samplers on a tiny DiffusionGemma; only the runner of the network is a fake.

Equal to `limpet.sample` and `limpet.reply`: that holds exactly here, since the runner calls the network one request at
a time, so that the network's rounding does not depend on the batch either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import limpet
from gemma_cases import CANVAS, PROMPT, SAMPLER_TEXTS, SEED, folder_of
from limpet import LimpetError
from limpet.generation import reply
from limpet.models import ModelInput
from limpet.models.diffusion_gemma import Gemma
from limpet.models.loading import load
from limpet.samplers import as_sampler
from sglang_cases import load_sglang

pytestmark = pytest.mark.usefixtures("offline")
sgl: Any = None  # SGLang's names that the tests use
CALLS = 8
BEGINNINGS = ("native temperature", "crs budget", "mend budget", "gibbs predictor", "entropy-bound bound")
TEXTS = [text for text in SAMPLER_TEXTS if text.partition("=")[0] in BEGINNINGS]
PROMPTS = [PROMPT, PROMPT[:5], [2, 70, 71, 72]]


@pytest.fixture(autouse=True, scope="module")
def _import_sglang() -> None:
    """It takes seconds, so only the process that runs these tests does it."""
    global sgl
    load_sglang()
    from sglang.srt.dllm import algorithm
    from sglang.srt.dllm.algorithm.gemma4_renoise import Gemma4Renoise
    from sglang.srt.dllm.config import DllmConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.plugins.hook_registry import HookRegistry

    from limpet.integrations.sglang import CanvasAlgorithm, register

    sgl = SimpleNamespace(
        algorithm=algorithm, Gemma4Renoise=Gemma4Renoise, DllmConfig=DllmConfig, ForwardBatch=ForwardBatch,
        ForwardMode=ForwardMode, HookRegistry=HookRegistry, CanvasAlgorithm=CanvasAlgorithm, register=register,
    )  # fmt: skip


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    model = load(folder_of(tmp_path_factory.mktemp("gemma") / "model", 0.5), device="cpu")
    assert isinstance(model, Gemma)
    model.ends = (10**6,)
    return model


@pytest.fixture(autouse=True)
def _fake_init_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hook is applied by SGLang's registry, over a function that needs no memory pool."""

    def init_new(cls: Any, batch: Any, runner: Any) -> Any:
        size, zeros = len(batch.reqs), torch.zeros(len(batch.reqs), dtype=torch.long)
        return cls(
            forward_mode=sgl.ForwardMode.DLLM_EXTEND, batch_size=size, seq_lens_sum=0, req_pool_indices=zeros,
            seq_lens=zeros, out_cache_loc=zeros, input_ids=torch.zeros(size * CANVAS, dtype=torch.long),
            rids=[one.rid for one in batch.reqs],
        )  # fmt: skip

    monkeypatch.setattr(sgl.ForwardBatch, "init_new", classmethod(init_new))
    monkeypatch.setattr(sgl.CanvasAlgorithm, "takes_seeds", False)
    sgl.HookRegistry.reset()
    sgl.register()
    sgl.HookRegistry.apply_hooks()
    yield
    sgl.HookRegistry.reset()


class Runner:
    """What the algorithm asks of SGLang's runner: the network on the canvases of some requests, after their texts."""

    def __init__(self, gemma: Gemma) -> None:
        self.model_config = SimpleNamespace(hf_config=gemma.network.config)
        self.model = self
        self.gemma, self.contexts, self.forwards = gemma, [gemma], 0

    def get_input_embeddings(self) -> Any:
        return self.gemma.network.model.decoder.embed_tokens

    def prepare_dllm_input_embeds(self, input_ids: Tensor, self_conditioning: Tensor | None) -> Tensor | None:
        return self_conditioning

    def forward(self, batch: Any, pp_proxy_tensors: None) -> Any:
        self.forwards += 1
        previous = [None] * len(self.contexts) if batch.input_embeds is None else batch.input_embeds.split(CANVAS)
        logits = []
        for context, tokens, soft in zip(self.contexts, batch.input_ids.split(CANVAS), previous, strict=True):
            soft = None if soft is None else soft[None]
            logits.append(context.head(context.backbone(ModelInput(tokens[None], 0.5, previous=soft)))[0])
        output = SimpleNamespace(full_logits=torch.cat(logits))
        return SimpleNamespace(logits_output=output, can_run_graph=False)


def configured(fdfo: bool = False, **settings: Any) -> Any:
    """The algorithm as SGLang makes it, from the settings of a YAML file."""
    return sgl.DllmConfig(
        algorithm="Gemma4Renoise", algorithm_config=yaml.safe_load(yaml.safe_dump(settings)), block_size=CANVAS,
        mask_id=-1, max_running_requests=4, first_done_first_out_mode=fdfo, requires_separate_context_encoding=True,
    )  # fmt: skip


def request(gemma: Gemma, prompt: list[int], seed: int | None, rid: str = "r") -> Any:
    """A request as SGLang's scheduler keeps it, with the text that its canvas follows."""
    sampling = SimpleNamespace(
        sampling_seed=seed, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0,
        min_p=0.0, logit_bias=None, json_schema=None, regex=None, ebnf=None, structural_tag=None,
    )  # fmt: skip
    return SimpleNamespace(
        rid=rid, sampling_params=sampling, output_ids=[], context=gemma.after(torch.tensor([prompt])), state=None,
        return_logprob=False, logprob=SimpleNamespace(top_logprobs_num=0, token_ids_logprob=None),
        return_flat_raw_top_logprobs=False, custom_logit_processor=None, return_sampling_mask=False,
    )  # fmt: skip


def extend(one: Any, tokens: list[int]) -> None:
    one.output_ids.extend(tokens)
    one.context = one.context.after(torch.tensor([tokens]))


def run(algorithm: Any, config: Any, runner: Runner, requests: list[Any]) -> Any:
    """One scheduler-visible run over a batch."""
    runner.contexts = [one.context for one in requests]
    batch = sgl.ForwardBatch.init_new(SimpleNamespace(reqs=requests, dllm_config=config), runner)
    return algorithm.run(runner, batch, [one.state for one in requests] if algorithm.fdfo else None)


def served(gemma: Gemma, config: Any, requests: list[Any], canvases: int = 2) -> list[list[int]]:
    """The tokens of each request, canvas by canvas, all requests in one batch."""
    algorithm, runner = sgl.algorithm.get_algorithm(config), Runner(gemma)
    for _ in range(canvases):
        _, tokens, *_ = run(algorithm, config, runner, requests)
        for one, own in zip(requests, tokens, strict=True):
            extend(one, own.tolist())
    return [one.output_ids for one in requests]


def expected(gemma: Gemma, text: str, prompt: list[int], number: int, canvases: int = 2, seed: int = SEED) -> list[int]:
    tokens = reply(gemma, as_sampler(text, nfe=CALLS), 1, seed, canvases * CANVAS, prompt, first=number).tokens[0]
    return tokens.tolist()


@pytest.mark.parametrize("text", TEXTS)
def test_a_request_has_the_tokens_of_reply(gemma: Gemma, text: str) -> None:
    """Two canvases of three requests in one batch; the first canvas is that of `limpet.sample`."""
    config = configured(sampler=f"{text} nfe={CALLS}", seed=SEED)
    numbers = [0, 7, 2**32 - 1]
    requests = [request(gemma, prompt, seed) for prompt, seed in zip(PROMPTS, numbers, strict=True)]
    tokens = served(gemma, config, requests)
    for own, prompt, number in zip(tokens, PROMPTS, numbers, strict=True):
        assert own == expected(gemma, text, prompt, number)
        if "settled" not in text:
            context = gemma.after(torch.tensor([prompt]))
            first = limpet.sample(context, as_sampler(text, nfe=CALLS), n=1, seed=SEED, first=number)
            assert own[:CANVAS] == first.tokens[0].tolist()
    assert served(gemma, config, [request(gemma, PROMPTS[1], 7)]) == tokens[1:2]  # alone, too


@pytest.mark.parametrize("text", ["mend", "entropy-bound bound=9 settled=.5 distribution=predicted", "trapezoidal"])
def test_a_request_that_joins_others_midway_has_the_same_tokens(gemma: Gemma, text: str) -> None:
    """First done, first out: requests are at different calls of different canvases in one batch."""
    config = configured(fdfo=True, sampler=f"{text} nfe={CALLS}", seed=SEED)
    algorithm, runner = sgl.algorithm.get_algorithm(config), Runner(gemma)
    requests = [request(gemma, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    done: list[Any] = []
    for round_ in range(1000):
        present = [one for start, one in enumerate(requests) if 5 * start <= round_ and one not in done]
        if not present:
            break
        _, tokens, accepted, states, _ = run(algorithm, config, runner, present)
        for one, own, length, state in zip(present, tokens, accepted, states, strict=True):
            one.state = state
            if length:
                extend(one, own)
        done += [one for one in present if len(one.output_ids) == 2 * CANVAS]
    assert len(done) == 3
    for number, one in enumerate(requests):
        assert one.output_ids == expected(gemma, text, PROMPTS[number], number)


def test_a_request_without_a_seed_is_a_function_of_its_id(gemma: Gemma) -> None:
    config = configured(sampler=f"mend nfe={CALLS}", seed=SEED)
    tokens = [served(gemma, config, [request(gemma, PROMPT, None, rid)], 1)[0] for rid in ("a", "a", "b")]
    assert tokens[0] == tokens[1] != tokens[2]
    other = configured(sampler=f"mend nfe={CALLS}", seed=SEED + 1)
    assert served(gemma, other, [request(gemma, PROMPT, 5)], 1)[0] == expected(gemma, "mend", PROMPT, 5, 1, SEED + 1)
    default = configured(sampler=f"mend nfe={CALLS}")
    assert served(gemma, default, [request(gemma, PROMPT, 5)], 1)[0] == expected(gemma, "mend", PROMPT, 5, 1)


def test_a_sampler_that_finishes_early_saves_calls(tmp_path: Path) -> None:
    gemma = load(folder_of(tmp_path / "model", 0.03), device="cpu")
    assert isinstance(gemma, Gemma)
    text = "entropy-bound nfe=40 bound=.1 settled=5 distribution=predicted"
    config = configured(sampler=text, seed=SEED)
    algorithm, runner = sgl.algorithm.get_algorithm(config), Runner(gemma)
    _, tokens, *_ = run(algorithm, config, runner, [request(gemma, PROMPT, 1)])
    alone = reply(gemma, text, 1, SEED, CANVAS, PROMPT, first=1)
    assert runner.forwards == alone.nfe < 40
    assert tokens[0].tolist() == alone.tokens[0].tolist()


def test_without_a_sampler_it_is_sglangs_own(gemma: Gemma) -> None:
    for settings in ({}, {"max_denoising_steps": 3, "seed": 4}):
        config = configured(**settings)
        ours, theirs = sgl.algorithm.get_algorithm(config), sgl.Gemma4Renoise(config)
        assert type(ours) is sgl.CanvasAlgorithm
        outputs = [run(one, config, Runner(gemma), [request(gemma, PROMPT, None, "a")])[1][0] for one in (ours, theirs)]
        assert torch.equal(*outputs)
    assert "sampling_seed" in config.validate_request(request(gemma, PROMPT, 3))


def test_what_a_request_may_ask_for(gemma: Gemma) -> None:
    config = configured(sampler="crs nfe=4")
    sgl.algorithm.get_algorithm(config)
    seeded = request(gemma, PROMPT, 3)
    assert config.validate_request(seeded) is None
    assert seeded.sampling_params.sampling_seed == 3
    assert config.validate_request(request(gemma, PROMPT, None)) is None
    assert "it takes a whole number from 0 to 4294967295" in config.validate_request(request(gemma, PROMPT, -1))
    seeded.sampling_params.min_p = 0.1
    assert "min_p" in config.validate_request(seeded)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"sampler": "mnd"}, "there is no sampler 'mnd'"),
        ({"sampler": "mend budget=-1"}, "mend has budget -1.0; it takes"),
        ({"sampler": "guided"}, "guided needs fixed tokens"),
        ({"sampler": "crs", "t_max": 0.8}, "has t_max; beside sampler it takes seed"),
        ({"sampler": "crs", "seed": "x"}, "has seed 'x'"),
        ({"sampler": 3}, "a sampler is a limpet.Sampler or a text"),
    ],
)
def test_a_wrong_setting_is_one_sentence(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(LimpetError, match=match):
        sgl.algorithm.get_algorithm(configured(**settings))


def test_sglang_finds_limpet_by_its_entry_point() -> None:
    """`load_plugins`, which every process of SGLang calls, has put limpet's class in place."""
    assert sgl.algorithm.algo_name_to_cls["Gemma4Renoise"] is sgl.CanvasAlgorithm


def test_the_page_has_the_file_that_the_test_reads(gemma: Gemma) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    settings = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    assert sgl.algorithm.get_algorithm(configured(**settings)).sampler == as_sampler(settings["sampler"])
