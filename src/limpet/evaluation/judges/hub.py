"""Any causal language model of transformers as a judge, by hub name or folder: safetensors only, no remote code."""

import os
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from limpet.errors import LimpetError, import_extra
from limpet.evaluation.judges.base import Judge
from limpet.models.model_files import TOKENIZER_FILES, hub_folder, read_config
from limpet.models.tensor_files import digest_of
from limpet.models.tokenizers import HuggingFaceTokenizer, read_tokenizer

DEFAULT_CONTEXT = 1024  # of a model whose config names none
IGNORED = ("transformers_version", "dtype", "torch_dtype")  # keys of config.json that do not change a score
FILES = ("model*.safetensors", "model.safetensors.index.json", *TOKENIZER_FILES)


class HubJudge(Judge):
    """A transformers model as a judge.

    Most models end in a linear map on the last hidden state; the head then runs on a few rows at a time. Models that
    do more (cap or scale their logits) compute their logits themselves, all at once."""

    def __init__(self, name: str, model: Any, tokenizer: HuggingFaceTokenizer | None, config: dict[str, Any]) -> None:
        self.name, self.model, self.tokenizer, self.config = name, model, tokenizer, config
        text_config = model.config.get_text_config()
        self.vocab_size = int(text_config.vocab_size)
        self.precision = str(model.dtype).removeprefix("torch.")
        self.context = int(getattr(text_config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
        end = text_config.eos_token_id  # None, an id, or several
        self.eos = end if isinstance(end, int) else tokenizer.special.get("eos") if tokenizer else None
        self.own_logits = not self._has_linear_head()

    @torch.inference_mode()
    def _has_linear_head(self) -> bool:
        head = self.model.get_output_embeddings()
        if head is None or self.model.base_model is self.model:
            return False
        probe = torch.arange(min(8, self.vocab_size, self.context), device=self.device)[None]
        split, own = head(self.hidden(probe)), self.model(input_ids=probe, use_cache=False).logits
        return split.shape == own.shape and torch.allclose(split, own, rtol=1e-4, atol=1e-4)

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        """A digest of the weights as loaded, which includes the precision, and of config.json."""
        facts = {key: value for key, value in self.config.items() if key not in IGNORED and not key.startswith("_")}
        return digest_of(self.model.state_dict(), facts)

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.device)

    def hidden(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)

    def backbone(self, tokens: Tensor) -> Tensor:
        if not self.own_logits:
            return self.hidden(tokens)
        return cast(Tensor, self.model(input_ids=tokens, use_cache=False).logits)

    def head(self, features: Tensor) -> Tensor:
        return features if self.own_logits else cast(Tensor, self.model.get_output_embeddings()(features))


def load(name: str, device: torch.device, dtype: torch.dtype) -> HubJudge:
    """Load a judge by hub name or folder; a model without a tokenizer.json scores ids only."""
    transformers = import_extra("transformers", "judges")
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir():
        try:
            folder = hub_folder(name, None, ("config.json",), FILES)
        except LimpetError as error:
            raise LimpetError(
                f"there is no judge {name!r} here: a judge is mini-judge, exact:NAME, a folder, or a causal language "
                f"model on the hub ({error})"
            ) from error
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, SafetensorError) as error:
        raise LimpetError(
            f"{name} cannot be loaded as a judge ({' '.join(str(error).split())[:200]}): a judge is mini-judge, or a "
            "folder or hub name of a causal language model in safetensors"
        ) from error
    vocab_size = model.config.get_text_config().vocab_size
    return HubJudge(name, model.to(device).eval(), read_tokenizer(folder, vocab_size), read_config(folder))
