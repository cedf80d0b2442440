"""From a name to its files, and from files to settings, tensors and a tokenizer. Nothing here depends on a network.

A name is of a built-in model, a folder, a file, or a repository on the hub. The files may be damaged or hostile: no
pickle is run, sizes are bounded, and whatever does not fit raises one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from limpet.errors import LimpetError, warn
from limpet.files import open_regular, write_file
from limpet.models import tokenizers
from limpet.models.tensor_files import (
    Unread,
    already_read,
    open_tensors,
    refuse_nonfinite,
    some,
    unique_keys,
    unpacked,
    write_tensors,
)
from limpet.models.tokenizers import BERT_SIZE, GPT2_SIZE, HuggingFaceTokenizer, read_tokenizer
from limpet.models.torch_checkpoint import Stored, TorchFile

T = TypeVar("T")
Field = tuple[str, Callable[[Any], bool]]  # what a field of config.json takes, in words and as a test
Fields = Mapping[str, Field]
Parameters = Callable[[Mapping[str, Stored]], list[str]]  # names of a network that has these tensors, as it was trained

FAMILIES = {  # what loads a model from a folder, by the model_type of its config.json
    "duo": "limpet.models.duo:from_folder",
    "udlm": "limpet.models.duo:from_folder",
    "sdllm-duo": "limpet.models.duo:from_folder",
    "gidd": "limpet.models.gidd:from_folder",
    "sumi": "limpet.models.sumi:from_folder",
    "diffusion_gemma": "limpet.models.diffusion_gemma:from_folder",
}
BUILTIN_FOLDER = tokenizers.BUILTIN_FOLDER
PREFIX = re.compile(r"^(?:module\.|model\.|_orig_mod\.|backbone\.)+")
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
GPT2 = "GPT-2's", ("openai-community/gpt2", "gpt2")
BERT = "BERT's", ("google-bert/bert-base-uncased", "bert-base-uncased")
PUBLIC = {GPT2_SIZE: GPT2, GPT2_SIZE + 1: GPT2, BERT_SIZE: BERT}  # the public tokenizer of a model with so many ids
UNUSED = frozenset(  # fields of config.json: sizes, which the tensors tell, and what no forward pass depends on
    "_name_or_path architectures attention_dropout auto_map bos_token_id checker cond_dim dropout dtype eos_token_id "
    "hidden_dim hidden_size initializer_range intermediate_size layout mlp_dim model_length model_type n_blocks "
    "n_heads num_hidden_layers pad_token_id return_dict torch_dtype transformers_version use_cache vocab_size".split()
)
INDEX = "model.safetensors.index.json"  # of a model in several files: which tensor is in which
MAX_INDEX = 64 << 20  # bytes; the largest released models' take a few megabytes
MAX_CONFIG = 1 << 20  # bytes
HUB_SECONDS = 8.0  # for the hub to answer before the cache is used instead

NUMBER: Field = ("a number above 0", lambda value: type(value) in (int, float) and 0 < value <= sys.float_info.max)
FALSE: Field = ("false", lambda value: value is False)
TOKEN: Field = ("a token's id or null", lambda value: value is None or (type(value) is int and value >= 0))


def whole_number(most: int) -> Field:
    """A field that takes a whole number from 1."""
    return f"a whole number from 1 to {most}", lambda value: type(value) is int and 0 < value <= most


@dataclass(frozen=True)
class Found:
    """What a name leads to: a folder, or one file in it."""

    name: str
    path: Path
    origin: str  # "built in", "folder", "file" or "hub, commit ..."

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent


def usable_device(device: torch.device | str | None) -> torch.device:
    """A device that is there. None stands for a GPU where there is one, and the CPU elsewhere."""
    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise LimpetError(f"device {str(device)!r} cannot be used here ({str(error).splitlines()[0]})") from error
    return found


# Where a name leads


def builtin_names() -> list[str]:
    """The models that come with the package."""
    found = []
    for folder in sorted(path.parent for path in BUILTIN_FOLDER.glob("*/config.json")):
        with suppress(LimpetError):
            found += [folder.name] if read_config(folder).get("model_type") in FAMILIES else []
    return found


def builtin_folder(name: str) -> Path:
    """The folder of a built-in model or judge, none of whose files is missing."""
    folder = BUILTIN_FOLDER / name
    needed = [folder / "model.safetensors", folder / "config.json", tokenizers.builtin_tokenizer(folder)]
    missing = [file.name for file in needed if not file.is_file()]
    if missing:
        raise LimpetError(
            f"the built-in {name} lacks {', '.join(missing)}: install limpet again, or name another model"
        )
    return folder


def copy_builtin(name: str, folder: Path) -> None:
    """Copy a built-in model or judge to a folder, with its tokenizer."""
    source = builtin_folder(name)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    shutil.copy(tokenizers.builtin_tokenizer(source), folder)


def locate(name: str | os.PathLike[str], revision: str | None = None) -> Found | None:
    """The files of a built-in model, else of a path that exists, else of a repository on the hub; None for others."""
    text = os.fspath(name)
    path = Path(os.path.expanduser(text))  # unlike pathlib's, it leaves an unknown user alone
    try:
        path.exists()
    except OSError as error:  # such as a name that is too long
        raise LimpetError(f"{text} cannot be read ({error.strerror}): check the path") from error
    builtin = BUILTIN_FOLDER / text if re.fullmatch(r"[\w-]+", text) else None
    is_hub = builtin is None and not path.exists() and path.suffix not in (".ckpt", ".safetensors", ".pt")
    if is_hub and HUB_NAME.fullmatch(text):
        folder = hub_folder(
            text, revision, ("config.json", "model.safetensors"), ("*.safetensors", "*.json", "*.txt", "*.jinja")
        )
        return Found(text, folder, f"hub, commit {folder.name}")
    if revision is not None:
        raise LimpetError(f"revision {revision!r} is for names on the hub, and {text!r} is not one: leave it out")
    if builtin is not None and builtin.is_dir():
        return Found(text, builtin_folder(text), "built in")
    return Found(text, path, "folder" if path.is_dir() else "file") if path.exists() else None


def weights_in(path: Path | None, what: str = "a model") -> Path:
    """The one file of weights in a folder, or the index of its parts. A path of a file is returned as it is."""
    if path is None:
        raise LimpetError(f"{what} is read from files: give its folder")
    if not path.is_dir():
        return path
    for pattern in ("model.safetensors", INDEX, "*.safetensors", "*.ckpt"):
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise LimpetError(f"{path} holds {some([file.name for file in found])}: name one of them")
    raise LimpetError(f"{path} holds no model: it needs a .safetensors or a .ckpt file")


# The hub

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")


def hub_folder(name: str, revision: str | None, needed: tuple[str, ...], wanted: tuple[str, ...] = ()) -> Path:
    """The local folder of a hub repository at a revision, with one of the needed files in it.

    It is fetched if the hub answers within HUB_SECONDS, and is otherwise the cached one."""
    import huggingface_hub as hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        api = hub.HfApi()
        commit = call_within(HUB_SECONDS, lambda: api.model_info(name, revision=revision, timeout=HUB_SECONDS / 2).sha)
        return Path(hub.snapshot_download(name, revision=commit, allow_patterns=[*needed, *wanted]))
    except Exception as error:  # which network errors there are depends on the hub library's version
        cached = cached_folder(name, revision, *needed)
        if cached is not None:
            return cached
        at = name if revision is None else f"{name} at revision {revision}"
        if isinstance(error, (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError)):
            raise LimpetError(f"the hub does not give out {at}: check the name, or log in if it is private") from error
        builtin = ", ".join(builtin_names()) or "none is installed"
        raise LimpetError(
            f"{at} is not in the local cache and could not be fetched from the hub ({type(error).__name__}): give the "
            f"path of a folder or file, fill the cache where there is network, or use a built-in model ({builtin})"
        ) from error


def cached_folder(name: str, revision: str | None, *needed: str) -> Path | None:
    """The cached folder of a hub repository, if one of the needed files is in it."""
    import huggingface_hub as hub

    try:
        found = [hub.try_to_load_from_cache(name, file, revision=revision) for file in needed]
    except ValueError:  # the hub has no such names
        return None
    return next((Path(cached).parent for cached in found if isinstance(cached, str)), None)


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """The function's value, or TimeoutError. Looking up a host name has no time limit of its own."""
    answer: Future[T] = Future()

    def attempt() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()
    return answer.result(timeout=seconds)


def find_tokenizer(folder: Path, vocab_size: int) -> tuple[HuggingFaceTokenizer | None, str]:
    """The folder's tokenizer, else the public one of a model with so many ids.

    Also returns where it is from, or why there is none."""
    own = read_tokenizer(folder, vocab_size)
    if own is not None:
        return own, "beside the weights"
    if vocab_size not in PUBLIC:
        return None, f"none: no tokenizer.json lies beside the weights, and {vocab_size} ids are not GPT-2's or BERT's"
    owner, names = PUBLIC[vocab_size]
    try:
        cached = [cached_folder(name, None, "tokenizer.json") for name in names]
        public = next(filter(None, cached), None) or hub_folder(names[0], None, ("tokenizer.json",))
        return read_tokenizer(public, vocab_size), owner
    except LimpetError:
        return None, f"none: {owner} is neither beside the weights nor in the cache, and the hub did not give it"


# Weights and config


def write_folder(
    folder: Path, config: object, tokenizer: HuggingFaceTokenizer | None, state: Mapping[str, Tensor]
) -> None:
    """Write config.json, tokenizer.json and model.safetensors, laid out as on the hub."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LimpetError(f"{folder} could not be written ({error}): name another folder") from error
    write_file(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
    write_tensors(folder / "model.safetensors", state)


def read_config(
    folder: Path, fields: Fields | None = None, what: str = "a model", name: str = "config.json"
) -> dict[str, Any]:
    """The settings in a folder's config.json, for what the tensors cannot tell; {} where there is none.

    fields: what each field takes. Fields of config.json that are not among them are warned about."""
    path = folder / name
    try:
        config = {}
        if path.exists():
            with open_regular(path, MAX_CONFIG) as file:
                config = json.loads(file.read().decode("utf-8"))
    except LimpetError:
        raise
    except (ValueError, OSError, RecursionError) as error:
        raise LimpetError(f"{path} is not JSON ({error}): fetch or copy it again") from error
    if not isinstance(config, dict):
        raise LimpetError(f"{path} holds a {type(config).__name__}, not a model's settings: fetch or copy it again")
    if fields is not None and name == "config.json":
        strange = sorted(config.keys() - fields.keys() - UNUSED)
        if strange:
            warn(f"{path} has {some(strange)}, which {what} does not use here: it is read as if that were not there")
    return check_fields(
        config, {"model_type": ("a text", lambda value: isinstance(value, str)), **(fields or {})}, path, what
    )


def check_fields(config: dict[str, Any], fields: Fields, path: Path, what: str) -> dict[str, Any]:
    """The same settings. Raises where a field does not take its value."""
    for field, (expected, accepts) in fields.items():
        if field in config and not accepts(config[field]):
            raise LimpetError(f"{path} has {field} {config[field]!r}, and {what} takes {expected}")
    return config


def open_weights(path: Path, weights: str, parameters: Parameters) -> tuple[dict[str, Unread], str]:
    """The tensors of a file, or of the parts that an index lists, under their released names, and which they are.

    weights: of a training checkpoint, its running average ("ema") or its own weights ("raw")."""
    if weights not in ("ema", "raw"):
        raise LimpetError(f'weights is "ema" or "raw", not {weights!r}')
    try:
        with open_regular(path) as file:
            magic = file.read(4)
    except OSError as error:
        raise LimpetError(f"{path} cannot be read ({error.strerror}): check the path") from error
    if magic == b"PK\x03\x04":
        return _open_lightning(path, weights, parameters)
    if path.suffix == ".ckpt":
        raise LimpetError(f"{path} is not a checkpoint in torch's zip format: save it again with torch 1.6 or later")
    stored = _open_parts(path) if path.suffix == ".json" else open_tensors(path)
    return unpacked(_bare(stored, path)), "as stored"


def _open_parts(path: Path) -> dict[str, Unread]:
    """The tensors of all the files that an index names. Each must be in the file that the index says."""
    try:
        with open_regular(path, MAX_INDEX) as stream:
            index = json.loads(stream.read().decode("utf-8"), object_pairs_hook=unique_keys)
        listed = index["weight_map"]
        if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
            raise ValueError("its weight_map names no files")
    except LimpetError:
        raise
    except (ValueError, OSError, RecursionError, LookupError, TypeError) as error:
        raise LimpetError(f"{path} is not an index of parts ({error}): fetch or copy it again") from error
    names_in: dict[str, set[str]] = {}
    for name, file in listed.items():
        names_in.setdefault(file, set()).add(name)
    files = sorted(names_in)
    strange = [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]
    if strange:
        raise LimpetError(f"{path} lists {some(strange)}, and a part is a .safetensors file beside the index")
    missing = [file for file in files if not (path.parent / file).is_file()]
    if missing:
        raise LimpetError(f"{path} lists parts that are not there ({some(missing)}): fetch or copy them too")
    found: dict[str, Unread] = {}
    for file in files:
        part = open_tensors(path.parent / file)
        disputed = sorted(part.keys() ^ names_in[file])
        if disputed:
            raise LimpetError(f"{path} and its part {file} do not agree on {some(disputed)}: fetch or copy both again")
        found |= part
    return found


def _open_lightning(path: Path, weights: str, parameters: Parameters) -> tuple[dict[str, Unread], str]:
    """A training checkpoint: its running average where it has one, which is a list in the order of the parameters."""
    with TorchFile(path) as file:
        tree = _items(file.tree)
        named = _items(tree.get("state_dict", tree))
        wanted = _bare({name: value for name, value in named.items() if isinstance(value, Stored)}, path)
        shadow = _items(tree.get("ema")).get("shadow_params")
        kept = "raw" if weights == "raw" else "raw, as the file holds no running average"
        if weights == "ema" and isinstance(shadow, list):
            order = parameters(wanted)
            if len(shadow) != len(order) or not all(isinstance(value, Stored) for value in shadow):
                raise LimpetError(
                    f"{path} has a running average of {len(shadow)} tensors for {len(order)} parameters: "
                    'load it with weights="raw"'
                )
            wanted |= zip(order, shadow, strict=True)
            kept = "ema"
        state = file.read(wanted)
    refuse_nonfinite(state, path)
    return unpacked({name: already_read(tensor) for name, tensor in state.items()}), kept


def _items(value: Any) -> dict[str, Any]:
    """A dict, empty for anything else."""
    return value if isinstance(value, dict) else {}


def _bare(named: Mapping[str, T], path: Path) -> dict[str, T]:
    """Names without the wrappers' prefixes, and without a distillation's teacher."""
    kept = {name: value for name, value in named.items() if not name.startswith("teacher.")}
    bare = {PREFIX.sub("", name): value for name, value in kept.items()}
    if len(bare) < len(kept):
        raise LimpetError(f"{path} holds the same tensor under two prefixes: keep one model in it")
    return bare
