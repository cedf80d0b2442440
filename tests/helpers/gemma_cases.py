"""A tiny DiffusionGemma with random numbers in every parameter, and its originals on limpet's uniforms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from limpet.diffusion.backends import inverse_cdf
from limpet.diffusion.rng import CounterRNG, Purpose, canvas_seed, uniform_token
from model_cases import tiktoken_like

transformers = pytest.importorskip("transformers", minversion="5.22")

SPECIAL = ["<pad>", "<eos>", "<bos>", "<turn|>", "<|turn>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn>{{ message['role'] }}\n{{ message['content'] }}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
CANVAS, SEED = 16, 8200
PROMPT = [2, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52]
SAMPLER_TEXTS = [  # one or two of every sampler that an engine can run, for 8 calls
    "native",
    "native temperature=.8 top_p=.9",
    "crs",
    "crs budget=4 horizon=2 final_step=sample",
    "mend budget=8 warmup=.1 revise=3 revise_every=1",
    "psi eta=.3",
    "ddim",
    "gibbs predictor=crs,budget=4 corrections=1",
    "gibbs choose=margin",
    "trapezoidal",
    "tau-leaping",
    "forward-backward",
    "rdm",
    "confidence-threshold threshold=.3",
    "entropy-bound bound=9 settled=.5 distribution=predicted",
    "block-refinement threshold=.3",
    "gidd-adaptive",
    "gidd-correction patience=1",
]


def settings(vocab_size: int) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1,
             "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 12,
             "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
             "max_position_embeddings": 512}  # fmt: skip
    vision = transformers.Gemma4VisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                           num_attention_heads=2, num_key_value_heads=2, head_dim=8)  # fmt: skip
    return transformers.DiffusionGemmaConfig(
        text_config=transformers.DiffusionGemmaTextConfig(vocab_size=vocab_size, **sizes), vision_config=vision,
        canvas_length=CANVAS, image_token_id=7, boi_token_id=8, eoi_token_id=9,
    )  # fmt: skip


def original(vocab_size: int, strength: float) -> Any:
    """transformers' model. Every parameter and stored scalar matters. A low strength hardly changes a token."""
    model = transformers.DiffusionGemmaForBlockDiffusion(settings(vocab_size)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            scale = (
                0.3 if parameter.dim() == 1 else 0.5 if "embed_tokens" in name else 0.7 * parameter.shape[-1] ** -0.5
            )
            parameter.normal_(std=scale, generator=generator).add_(float(parameter.dim() == 1))
            if ".post_" in name:  # what a layer adds
                parameter.mul_(strength)
        for layers in (model.model.encoder.language_model.layers, model.model.decoder.layers):
            for layer in layers:
                layer.layer_scalar.uniform_(0.5, 1.5, generator=generator)
    return model


def folder_of(folder: Path, strength: float = 1.0) -> Path:
    """As it lies on the hub: weights, settings, tokenizer, chat template."""
    folder.mkdir()
    original(tiktoken_like(folder, SPECIAL, 280), strength).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    about = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(about | {"eos_token_id": [1, 3], "pad_token_id": 0}))
    return folder


@contextmanager
def on_our_uniforms(samples: int, monkeypatch: pytest.MonkeyPatch, undrawn: int = 0) -> Iterator[None]:
    """Code that starts a canvas with a uniform draw, and at each call draws tokens and uniform tokens, uses limpet's
    uniforms: the first of a call's pair for a token, the second for a uniform token. The `undrawn` first calls of a
    canvas draw uniform tokens alone."""
    at = {"canvas": -1, "call": -1, "drawn": False}

    def pair(purpose: Purpose) -> tuple[Tensor, Tensor]:
        rng = CounterRNG(canvas_seed(SEED, at["canvas"]), torch.arange(samples))
        return rng.uniforms(max(0, at["call"]), torch.arange(CANVAS), purpose)

    def multinomial(weights: Tensor, num_samples: int, generator: Any = None) -> Tensor:
        assert num_samples == 1
        at.update(call=at["call"] + 1, drawn=True)
        return inverse_cdf(weights, pair(Purpose.TOKENS)[0].flatten())[:, None]

    def randint(low: int, high: int, size: Any, **_: Any) -> Tensor:
        if not at["drawn"] and -1 <= at["call"] < undrawn - 1 and at["canvas"] >= 0:
            at.update(call=at["call"] + 1, drawn=True)
        if at["drawn"]:
            at.update(drawn=False)
            return uniform_token(pair(Purpose.TOKENS)[1], high)
        at.update(canvas=at["canvas"] + 1, call=-1)
        return uniform_token(pair(Purpose.START)[0], high)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "multinomial", multinomial)
        patched.setattr(torch, "randint", randint)
        yield
