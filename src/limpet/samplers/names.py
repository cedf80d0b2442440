"""Samplers by name: `find` a class, `parse` a command line's text, read a dictionary or a TOML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from limpet import registry
from limpet.errors import LimpetError
from limpet.files import Toml
from limpet.samplers.base import Sampler
from limpet.samplers.builtin import BUILTIN, GROUP
from limpet.samplers.params import Param, check_names, params


def find(name: str) -> type[Sampler]:
    """A sampler's class by name: built in, of another package, or `./file.py:Name`."""
    found = registry.find("sampler", GROUP, BUILTIN, name)
    frozen = getattr(getattr(found, "__dataclass_params__", None), "frozen", False)
    if not (isinstance(found, type) and issubclass(found, Sampler) and frozen):
        raise LimpetError(f"{name} is no sampler: it takes a frozen dataclass that inherits from limpet.Sampler")
    return found


def available() -> dict[str, type[Sampler]]:
    """Every sampler that has a name here. One of another package that cannot be loaded is left out; `find` says why."""
    found = {}
    for name in {**BUILTIN, **registry.installed(GROUP)}:
        with suppress(LimpetError):
            found[name] = find(name)
    return found


def describe(kind: type[Sampler]) -> str:
    """The first paragraph of a sampler's docstring, on one line."""
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def from_dict(values: Mapping[str, Any]) -> Sampler:
    """The sampler that `Sampler.to_dict` wrote."""
    if "sampler" not in values:
        raise LimpetError(f"a sampler needs its name, as sampler; this has {', '.join(values) or 'nothing'}")
    own = {name: value for name, value in values.items() if name != "sampler"}
    kind = find(values["sampler"])
    check_names(kind, own, str(values["sampler"]))
    return kind(**own)


def parse(text: str, **common: Any) -> tuple[str, Sampler]:
    """The caption and the sampler of a text such as `crs budget=.25` or, with a caption, `small: crs budget=.25`.

    What tables print is read too, as in `crs, final_step=keep`. A TOML file that holds a sampler may stand in its
    place; parameters after it replace the file's. common: parameters of every sampler that the text does not set; a
    sampler that does not have one ignores it."""
    caption, colon, spec = text.partition(": ")
    name, *settings = [word.rstrip(",") for word in (spec if colon else text).split()] or [""]
    kind, own = _read_toml(name) if name.endswith(".toml") else (find(name), {})
    own |= _values(kind, name, settings, text)
    defaults = {name: value for name, value in common.items() if name in params(kind) and value is not None}
    sampler = kind(**{**defaults, **own})
    return caption if colon else sampler.caption, sampler


def as_sampler(sampler: Sampler | str, **common: Any) -> Sampler:
    """A sampler as it is, or the one that a text means (see `parse`)."""
    if isinstance(sampler, str):
        return parse(sampler, **common)[1]
    if not isinstance(sampler, Sampler):
        raise LimpetError(f'a sampler is a limpet.Sampler or a text such as "crs nfe=16", not {sampler!r}')
    return sampler


def named_samplers(
    samplers: Sampler | str | Mapping[str, Sampler | str] | Sequence[Sampler | str], nfe: int | None = None
) -> dict[str, Sampler]:
    """Samplers by name.

    samplers: one sampler or text such as "crs budget=.25", or a sequence or a mapping by name of them. nfe: network
    calls of the texts that do not set them (default: the sampler's)."""
    if isinstance(samplers, str | Sampler):
        samplers = [samplers]
    if isinstance(samplers, Mapping):
        return {name: _captioned(one, nfe)[1] for name, one in samplers.items()}
    captioned = [(str(one), *_captioned(one, nfe)) for one in samplers]
    count = Counter(name for _, name, _ in captioned)
    found: dict[str, tuple[str, Sampler]] = {}
    for text, name, one in captioned:
        name = name if count[name] == 1 else f"{name} nfe={one.nfe}"
        if name in found:
            raise LimpetError(
                f"the samplers {found[name][0]!r} and {text!r} are both {name!r}: change one, or give it a "
                f'caption, as in "other: {text.partition(": ")[2] or text}"'
            )
        found[name] = text, one
    return {name: one for name, (_, one) in found.items()}


def _captioned(sampler: Sampler | str, nfe: int | None) -> tuple[str, Sampler]:
    return parse(sampler, nfe=nfe) if isinstance(sampler, str) else (as_sampler(sampler).caption, sampler)


def _values(kind: type[Sampler], name: str, settings: Sequence[str], text: str) -> dict[str, Any]:
    """Parameters by name, from words such as `nfe=16`."""
    takes = "after the sampler it takes parameters such as nfe=16"
    return {
        param.name: param.read(value) for param, value in assigned(kind, name, settings, f"sampler {text!r}", takes)
    }


def assigned(
    kind: type[Sampler], name: str, settings: Sequence[str], where: str, takes: str
) -> Iterator[tuple[Param, str]]:
    """The parameter and the text of each `parameter=text`. An error says where the setting stands and what it takes."""
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals:
            raise LimpetError(f"{where} has {setting!r}; {takes}")
        field = field.replace("-", "_")
        check_names(kind, {field: value}, name)
        yield params(kind)[field], value


@dataclass(frozen=True)
class SamplerFile:
    """A TOML file that holds a sampler, as a command line has it; `limpet tune` writes such files."""

    sampler: str


def _read_toml(path: str) -> tuple[type[Sampler], dict[str, Any]]:
    """The class and the parameters in a TOML file. A Python file that it names is found beside it."""
    file = Toml(path, "name a file that limpet tune wrote")
    text = file.build(SamplerFile).sampler
    name, *settings = text.split() or [""]
    with file.at("sampler"):
        kind = find(str(file.path.parent / name) if registry.is_file(name) else name)
        own = _values(kind, name, settings, text)
        kind(**own)  # a wrong value is reported here, with its place in the file
    return kind, own
