"""Small models with random parameters, the folders and files that they are loaded from, and what loading refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from limpet import conformance
from limpet.conformance import CheckResult
from limpet.errors import LimpetError
from limpet.models import Denoiser, ModelInput, all_rows
from limpet.models.duo import DuoNetwork, DuoShape
from limpet.models.loading import load
from limpet.models.model_files import INDEX

TINY = DuoShape(vocab_size=53, length=12, width=32, blocks=3, heads=2, cond=16, hidden=80)
TEXT = [
    "The limpet holds its place on the rock while everything around it moves.",
    "Waves come and go; don't they? It's 3 o'clock, and the tide is turning!",
    "Unbelievable: 1,234,567 limpets, holding, turning, moving, rocking.",
]
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


# Networks


def random_network(shape: DuoShape = TINY, seed: int = 0) -> DuoNetwork:
    """A network with random parameters, all of which matter to its output."""
    generator = torch.Generator().manual_seed(seed)
    network = DuoNetwork(shape)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            scale = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(scale * noise + ("norm" in name))
    return network


def random_tokens(batch: int = 4, shape: DuoShape = TINY) -> Tensor:
    return torch.randint(shape.vocab_size, (batch, shape.length), generator=torch.Generator().manual_seed(1))


def features(
    model: Denoiser, tokens: Tensor, t: Any, rows: Callable[[], Any] = all_rows, clean: Tensor | None = None
) -> Tensor:
    """The backbone's features of tokens at a time."""
    return model.backbone(ModelInput(tokens, t, rows, clean))


def same(model: Any, network: DuoNetwork, shift: float = 0.0) -> bool:
    """Whether the model has exactly the network's parameters."""
    theirs, ours = dict(network.named_parameters()), dict(model.network.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name] + shift) for name in ours)


def check(model: Denoiser, *samplers: str) -> list[CheckResult]:
    """The conformance checks of a model, and of samplers on it."""
    rows = list(conformance.model_rows(model))
    return rows + [row for sampler in samplers for row in conformance.sampler_rows(model, sampler)]


def failed(rows: list[CheckResult]) -> dict[str, str]:
    return {row.what: row.found for row in rows if not row.ok}


# Files


class Settings:
    """Stands in for the configuration object that Lightning pickles beside the weights."""

    def __init__(self) -> None:
        self.model = {"length": 1024, 5: ("six", frozenset({7}))}


def lightning(network: DuoNetwork, path: Path, ema: bool = True, **more: Any) -> Path:
    """Save a network as the released training code does. The running average differs from the weights by one."""
    state = {f"backbone.{name}": tensor for name, tensor in network.state_dict().items()}
    tree = {"state_dict": state, "hyper_parameters": {"config": Settings()}, "loops": {"epoch": 3}, **more}
    if ema:
        shadow = [parameter.detach() + 1 for parameter in network.parameters()]
        tree["ema"] = {"decay": 0.9999, "num_updates": 10, "shadow_params": shadow}
    torch.save(tree, path)
    return path


def hub_like(network: DuoNetwork, folder: Path, **config: Any) -> Path:
    """Save a network as it lies on the hub: prefixed names, the rotary buffer, and a config without a tokenizer."""
    folder.mkdir(exist_ok=True)
    shape = network.shape
    save_file({f"backbone.{name}": t for name, t in network.state_dict().items()}, folder / "model.safetensors")
    settings = {"model_type": "duo", "n_heads": shape.heads, "model_length": shape.length, "cond_dim": 129, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def parted(folder: Path, count: int = 3) -> Path:
    """Split a folder's model.safetensors into parts with an index, as the hub's large models are stored."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file_of = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(state)}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in state.items() if file_of[name] == file}, folder / file)
    write_index(folder, file_of)
    return folder


def write_index(folder: Path, file_of: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": file_of}))


def refused(path: Any, match: str, **options: Any) -> str:
    """The one sentence in which loading refuses a path."""
    with pytest.raises(LimpetError, match=match) as caught:
        load(path, device="cpu", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Tokenizers


def bert_like(folder: Path, size: int = 120) -> int:
    """Lower-cased pieces of words with BERT's five special tokens first, as bert-base-uncased has them."""
    tokens = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokens.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokens.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokens.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=size, special_tokens=special))
    tokens.save(str(folder / "tokenizer.json"))
    return tokens.get_vocab_size()


def tiktoken_like(folder: Path, special: list[str], size: int = 300) -> int:
    """Merges of bytes after a regular expression's split, as tiktoken's vocabularies are written for `tokenizers`."""
    tokens = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
    tokens.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokens.train_from_iterator(TEXT, trainer)
    tokens.save(str(folder / "tokenizer.json"))
    return tokens.get_vocab_size()
