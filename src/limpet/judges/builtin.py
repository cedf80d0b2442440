"""The built-in judge: a folder with a small causal network, its tokenizer and its sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limpet.denoisers.duo import Linear
from limpet.denoisers.tensors import digest_of, read_tensors, unpack_rows
from limpet.denoisers.text import Tokenizer, read_tokenizer
from limpet.errors import LimpetError
from limpet.judges.causal import Network, Shape
from limpet.judges.judge import Judge


class BuiltinJudge(Judge):
    """A causal network of this package behind the judge's face."""

    def __init__(self, name: str, network: Network, tokenizer: Tokenizer | None, digest: str) -> None:
        self.name, self.digest, self.network, self.tokenizer = name, digest, network, tokenizer
        self.context, self.vocab_size = network.shape.length, network.shape.vocab_size
        self.eos = tokenizer.special.get("eos") if tokenizer else None

    @property
    def device(self) -> torch.device:
        return self.network.embedding.device

    def body(self, tokens: Tensor) -> Tensor:
        return self.network.body(tokens)

    def head(self, features: Tensor) -> Tensor:
        return self.network.head(features)


def is_builtin(folder: Path) -> bool:
    """Whether a folder's config.json says that its network is this package's own."""
    return _config(folder).get("model_type") == "causal"


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def load(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> BuiltinJudge:
    """Read a judge's folder; in bfloat16 the linear maps of the blocks are rounded, embedding and head are not."""
    config = {key: value for key, value in _config(folder).items() if key != "model_type"}
    try:
        network = Network(Shape(**config))
    except (TypeError, RuntimeError, ZeroDivisionError) as error:
        raise LimpetError(f"{folder / 'config.json'} gives no sizes of a judge ({error}): copy it again") from error
    state = unpack_rows(read_tensors(folder / "model.safetensors"))
    wanted = {key: tuple(value.shape) for key, value in network.named_parameters()}
    if {key: tuple(value.shape) for key, value in state.items() if key in wanted} != wanted:
        raise LimpetError(f"the weights in {folder} do not fit its config.json: copy the folder again")
    network.load_state_dict({key: state[key] for key in wanted}, strict=False)
    for module in network.modules():
        if isinstance(module, Linear):
            module.to(dtype)
    tokenizer = read_tokenizer(folder, network.shape.vocab_size)
    digest = digest_of(dict(network.named_parameters()), {"context": network.shape.length})
    return BuiltinJudge(name, network.to(device).eval().requires_grad_(False), tokenizer, digest)
