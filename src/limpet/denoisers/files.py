"""From a name to a model: built-in, folder, safetensors file, Lightning checkpoint, or hub.

Sizes come from the tensors; config.json adds what they cannot tell. The network is laid out without memory and every
parameter is assigned from the file, so nothing can be left at an initial value."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from limpet.denoisers.duo import PRECISIONS, Duo, Network, Rotary, Shape
from limpet.denoisers.tensors import digest_of, pack_rows, read_tensors, refuse_nonfinite, some, unpack_rows
from limpet.denoisers.text import GPT2_SIZE, Tokenizer, read_tokenizer
from limpet.denoisers.torchfile import Stored, TorchFile
from limpet.errors import LimpetError
from limpet.process import SCHEDULES

__all__ = ["builtin_names", "digest_of", "load", "pack_rows", "read_tensors", "unpack_rows"]

T = TypeVar("T")

MINIS = Path(__file__).parents[1] / "minis"
PREFIX = re.compile(r"^(?:module\.|model\.|_orig_mod\.|backbone\.)+")
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
ROTARY = "rotary_emb.inv_freq"  # kept in the files, though no parameter: it tells the heads and can be checked
GPT2_NAMES = ("openai-community/gpt2", "gpt2")
MOST_BLOCKS = 512  # far beyond any model of this kind; a file that names a million must not keep us busy
PATIENCE = 8.0  # seconds for the hub to answer before the cache is asked instead


@dataclass(frozen=True)
class Found:
    """Where a name led: a file of weights, its folder, and what to call it."""

    name: str
    weights: Path
    origin: str

    @property
    def folder(self) -> Path:
        return self.weights.parent


def load(
    name: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    precision: Literal["float32", "bfloat16"] = "float32",
    weights: Literal["ema", "raw"] = "ema",
    revision: str | None = None,
) -> Duo:
    """A model by name: a built-in one, a folder, a .safetensors or .ckpt file, or "owner/name" on the hub.

    `device` is a GPU where there is one, unless told; `weights="raw"` takes a training checkpoint's own weights
    instead of their running average; `revision` names a commit, branch or tag on the hub."""
    if precision not in PRECISIONS:
        raise LimpetError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
    if weights not in ("ema", "raw"):
        raise LimpetError(f'weights is "ema" or "raw", not {weights!r}')
    place = usable_device(device)
    found = find(name, revision)
    try:
        return _read(found, weights, precision, place)
    except LimpetError as error:
        if found.origin == "built in":
            raise LimpetError(f"the built-in model {found.name!r} is damaged: {error}, or install again") from error
        raise


def usable_device(device: torch.device | str | None) -> torch.device:
    """The device asked for, if it is there; a GPU where there is one, if none was."""
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise LimpetError(f"device {str(device)!r} cannot be used here ({str(error).splitlines()[0]})") from error
    return place


def _read(found: Found, weights: str, precision: Any, device: torch.device) -> Duo:
    config = read_config(found.folder)
    state, kept = read_weights(found.weights, weights, config)
    network = assemble(state, config, found.weights)
    tokenizer, reason = find_tokenizer(found.folder, network.shape.vocab_size)
    info = {"source": found.origin, "file": str(found.weights), "weights": kept, "tokenizer": reason}
    if "model_length" not in config:
        info["assumed"] = f"length {network.shape.length}, the released models', as no config.json says"
    return Duo(
        network.set_precision(PRECISIONS[precision]).to(device),
        name=found.name,
        tokenizer=tokenizer,
        schedule=SCHEDULES[config.get("schedule", "log-linear")],
        predicts=config.get("predicts", "leave-one-out"),
        precision=precision,
        info=info,
    )


# Where a name leads


def builtin_names() -> list[str]:
    """The Duo models that come with the package."""
    return sorted(path.parent.name for path in MINIS.glob("*/config.json") if _is_duo(path.parent))


def _is_duo(folder: Path) -> bool:
    try:
        return "model_type" in read_config(folder)
    except LimpetError:
        return False


def whole_builtin(name: str) -> Path:
    """The folder of something built in, with all its files there."""
    folder = MINIS / name
    missing = [file for file in ("model.safetensors", "config.json", "tokenizer.json") if not (folder / file).is_file()]
    if missing:
        raise LimpetError(
            f"the built-in {name} lacks {', '.join(missing)}: install limpet again, or name another model"
        )
    return folder


def find(name: str | os.PathLike[str], revision: str | None = None) -> Found:
    text, path = os.fspath(name), Path(name).expanduser()
    builtin = MINIS / text if re.fullmatch(r"[\w-]+", text) else None
    is_hub = builtin is None and not path.exists() and path.suffix not in (".ckpt", ".safetensors", ".pt")
    if is_hub and HUB_NAME.fullmatch(text):
        folder = hub_folder(text, revision, "model.safetensors", "config.json", *TOKENIZER_FILES)
        return Found(text, folder / "model.safetensors", f"hub, commit {folder.name}")
    if revision is not None:
        raise LimpetError(f"revision {revision!r} is for names on the hub, and {text!r} is not one: leave it out")
    if builtin is not None and builtin.is_dir():
        return Found(text, whole_builtin(text) / "model.safetensors", "built in")
    if path.is_dir():
        return Found(text, _weights_in(path), "folder")
    if path.is_file():
        return Found(text, path, "file")
    raise LimpetError(
        f"no model {text!r}: it is neither built in ({', '.join(builtin_names()) or 'none is installed'}), "
        "nor a path that exists, nor a hub name like owner/name"
    )


def _weights_in(folder: Path) -> Path:
    for pattern in ("model.safetensors", "*.safetensors", "*.ckpt"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise LimpetError(f"{folder} holds {some([path.name for path in found])}: name one of them")
    raise LimpetError(f"{folder} holds no model: it needs a .safetensors or a .ckpt file")


# The hub

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")


def hub_folder(name: str, revision: str | None, needed: str, *wanted: str) -> Path:
    """The local folder of a hub repository at a revision: fetched if the hub answers soon, else as it was cached."""
    import huggingface_hub as hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        api = hub.HfApi()
        commit = within(PATIENCE, lambda: api.model_info(name, revision=revision, timeout=PATIENCE / 2).sha)
        return Path(hub.snapshot_download(name, revision=commit, allow_patterns=[needed, *wanted]))
    except Exception as error:  # which network errors there are depends on the hub library's version
        cached = cached_folder(name, revision, needed)
        if cached is not None:
            return cached
        at = name if revision is None else f"{name} at revision {revision}"
        if isinstance(error, (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError)):
            raise LimpetError(f"the hub does not give out {at}: check the name, or log in if it is private") from error
        builtin = some(builtin_names()) or "none is installed"
        raise LimpetError(
            f"{at} is not in the local cache and could not be fetched from the hub ({type(error).__name__}): give the "
            f"path of a folder or file, fill the cache where there is network, or use a built-in model ({builtin})"
        ) from error


def cached_folder(name: str, revision: str | None, needed: str) -> Path | None:
    import huggingface_hub as hub

    try:
        cached = hub.try_to_load_from_cache(name, needed, revision=revision)
    except ValueError:  # no name that the hub could have
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def within(seconds: float, function: Callable[[], T]) -> T:
    """The function's value, or TimeoutError: a name server that never answers knows no timeout of its own."""
    answer: Future[T] = Future()

    def attempt() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()
    return answer.result(timeout=seconds)


def find_tokenizer(folder: Path, vocab_size: int) -> tuple[Tokenizer | None, str]:
    """The folder's tokenizer, else GPT-2's for a model with its ids; and where it is from, or why there is none."""
    own = read_tokenizer(folder, vocab_size)
    if own is not None:
        return own, "beside the weights"
    if vocab_size not in (GPT2_SIZE, GPT2_SIZE + 1):
        return None, f"none: no tokenizer.json lies beside the weights, and {vocab_size} tokens are not GPT-2's"
    try:
        cached = [cached_folder(name, None, "tokenizer.json") for name in GPT2_NAMES]
        gpt2 = next(filter(None, cached), None) or hub_folder(GPT2_NAMES[0], None, "tokenizer.json")
        return read_tokenizer(gpt2, vocab_size), "GPT-2's"
    except LimpetError:
        return None, "none: GPT-2's is neither beside the weights nor in the cache, and the hub did not give it"


# Weights and config


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, for what the tensors cannot tell: heads, length, schedule, what is predicted; {} where none is."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise LimpetError(f"{path} is not JSON ({error}): fetch or copy it again") from error
    takes: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "model_type": ('"duo"', lambda value: isinstance(value, str) and value.lower() == "duo"),
        "causal": ("false", lambda value: value is False),
        "n_heads": ("a whole number from 1", lambda value: type(value) is int and value > 0),
        "model_length": ("a whole number from 1", lambda value: type(value) is int and value > 0),
        "schedule": (" or ".join(SCHEDULES), lambda value: isinstance(value, str) and value in SCHEDULES),
        "predicts": ("leave-one-out or posterior", lambda value: value in ("leave-one-out", "posterior")),
    }
    if not isinstance(config, dict):
        raise LimpetError(f"{path} holds a {type(config).__name__}, not a model's settings: fetch or copy it again")
    for field, (taken, accepts) in takes.items():
        if field in config and not accepts(config[field]):
            raise LimpetError(f"{path} has {field} {config[field]!r}, and a Duo model takes {taken}")
    return config


def read_weights(path: Path, weights: str, config: Mapping[str, Any]) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file as float32 under their released names, and which ones they are."""
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise LimpetError(f"{path} cannot be read ({error.strerror}): check the path") from error
    if magic == b"PK\x03\x04":
        return _read_lightning(path, weights, config)
    if path.suffix == ".ckpt":
        raise LimpetError(f"{path} is not a checkpoint in torch's zip format: save it again with torch 1.6 or later")
    return unpack_rows(_bare(read_tensors(path), path)), "as stored"


def _read_lightning(path: Path, weights: str, config: Mapping[str, Any]) -> tuple[dict[str, Tensor], str]:
    """A training checkpoint: its running average where it has one, which is a list in the order of the parameters."""
    with TorchFile(path) as file:
        tree = file.tree if isinstance(file.tree, dict) else {}
        named = tree.get("state_dict", tree)
        named = named if isinstance(named, dict) else {}
        wanted = _bare({name: value for name, value in named.items() if isinstance(value, Stored)}, path)
        ema = tree.get("ema")
        shadow = ema.get("shadow_params") if isinstance(ema, dict) else None
        kept = "raw" if weights == "raw" else "raw, as the file holds no running average"
        if weights == "ema" and isinstance(shadow, list):
            order = [name for name, _ in empty_network(shape_of(wanted, config, path)).named_parameters()]
            if len(shadow) != len(order) or not all(isinstance(value, Stored) for value in shadow):
                raise LimpetError(
                    f"{path} has a running average of {len(shadow)} tensors for {len(order)} parameters: "
                    'load it with weights="raw"'
                )
            wanted |= zip(order, shadow, strict=True)
            kept = "ema"
        state = unpack_rows(file.read(wanted))
    refuse_nonfinite(state, path)
    return state, kept


def _bare(named: Mapping[str, T], path: Path) -> dict[str, T]:
    """Names without the wrappers' prefixes, and without a distillation's teacher."""
    kept = {name: value for name, value in named.items() if not name.startswith("teacher.")}
    bare = {PREFIX.sub("", name): value for name, value in kept.items()}
    if len(bare) < len(kept):
        raise LimpetError(f"{path} holds the same tensor under two prefixes: keep one model in it")
    return bare


def shape_of(state: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> Shape:
    """Every size of the network, read off its tensors' shapes."""
    anchors = ("vocab_embed.embedding", "sigma_map.mlp.2.weight", "blocks.0.mlp.0.weight")
    sizes = [tuple(state[name].shape) if name in state else () for name in anchors]
    if any(len(size) != 2 or min(size) < 1 for size in sizes):
        raise LimpetError(f"{path} does not hold a Duo model: it lacks the matrices {', '.join(anchors)}")
    (vocab_size, width), (cond, _), (hidden, _) = sizes
    blocks = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    if blocks > MOST_BLOCKS:
        raise LimpetError(f"{path} does not hold a Duo model: it names {blocks} blocks, and {MOST_BLOCKS} is the most")
    rotary = tuple(state[ROTARY].shape) if ROTARY in state else ()
    heads = config.get("n_heads") or (width // (2 * rotary[0]) if len(rotary) == 1 and rotary[0] else None)
    if not heads:
        raise LimpetError(f'{path} does not tell how many heads its model has: put {{"n_heads": ...}} in a config.json')
    if width % heads or width // heads % 2:
        raise LimpetError(f"{path} has width {width}, which {heads} heads do not share evenly: check its config.json")
    return Shape(vocab_size, config.get("model_length", Shape.length), width, blocks, heads, cond, hidden)


def empty_network(shape: Shape) -> Network:
    """Names and shapes without memory."""
    with torch.device("meta"):
        return Network(shape)


def assemble(state: Mapping[str, Tensor], config: Mapping[str, Any], path: Path) -> Network:
    """The network that these tensors are, every one of them used and none left out."""
    shape = shape_of(state, config, path)
    network = empty_network(shape)
    own = {ROTARY: Rotary(shape.width // shape.heads).inv_freq}
    given = {**own, **state}
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    misfits = {
        "missing": sorted(expected.keys() - given),
        "unexpected": sorted(given.keys() - expected),
        "misshapen": [
            f"{name} {_seen(given[name])} for {size}"
            for name, size in expected.items()
            if name in given and (tuple(given[name].shape) != size or not given[name].is_floating_point())
        ],
    }
    if any(misfits.values()):
        listed = "; ".join(f"{kind}: {some(names)}" for kind, names in misfits.items() if names)
        raise LimpetError(f"{path} does not fit a Duo model of {shape.blocks} blocks ({listed})")
    if not torch.allclose(given[ROTARY], own[ROTARY], rtol=1e-2):
        raise LimpetError(f"{path} turns its queries and keys by other frequencies than Duo's: it is another model")
    network.load_state_dict({**state, **own}, assign=True)
    return network.eval().requires_grad_(False)


def _seen(tensor: Tensor) -> str:
    kind = "" if tensor.is_floating_point() else f" of {tensor.dtype}"
    return f"{tuple(tensor.shape)}{kind}"
