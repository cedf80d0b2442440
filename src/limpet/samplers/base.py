"""What a sampler is: a frozen dataclass whose fields are its parameters, with `begin` and `step`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from limpet import registry
from limpet.errors import LimpetError
from limpet.files import Toml
from limpet.samplers.context import Context, State, StepInfo
from limpet.samplers.params import Param, known, params

GROUP = "limpet.samplers"
BUILTIN = {
    "native": "limpet.samplers.native:Native",
    "crs": "limpet.samplers.crs:CRS",
    "mend": "limpet.samplers.mend:Mend",
    "psi": "limpet.samplers.psi:Psi",
    "ddim": "limpet.samplers.ddim:DDIM",
    "gibbs": "limpet.samplers.gibbs:Gibbs",
    "trapezoidal": "limpet.samplers.trapezoidal:Trapezoidal",
    "entropy-bound": "limpet.samplers.entropy_bound:EntropyBound",
    "block-refinement": "limpet.samplers.block_refinement:BlockRefinement",
    "gidd-adaptive": "limpet.samplers.gidd:GIDDAdaptive",
    "gidd-correction": "limpet.samplers.gidd:GIDDCorrection",
    "guided": "limpet.samplers.guided:Guided",
}


class Sampler(Protocol):
    """How a path is walked. A subclass is a frozen dataclass; its fields are checked, compared and written out."""

    nfe: int
    needs_given: ClassVar[bool] = False  # whether there is nothing for it to do where no token is given

    def begin(self, ctx: Context) -> State:
        """The start of a path: the uniform state at t = 1, given tokens in place, nothing remembered."""
        return State(0, ctx.noise())

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        """One call of the denoiser; the last of `nfe` reads out."""
        ...

    def replay(self, ctx: Context, recorded: tuple[Any, ...]) -> State:
        """The start of a path that does again what a finished one did whose last memory was `recorded`."""
        raise LimpetError(f"{self.name} replays nothing: leave replay out")

    def finished(self, state: State) -> Tensor:
        """(B,) bool: samples that are their own output, whatever calls may follow; none, unless one can tell."""
        return torch.zeros(len(state.tokens), dtype=torch.bool, device=state.tokens.device)

    def shared(self, other: Sampler) -> int:
        """How many first calls are the same under another sampler, on the same path: none, unless one can tell."""
        return 0

    def __post_init__(self) -> None:
        for name, param in params(type(self)).items():
            if not param.accepts(value := getattr(self, name)):
                raise LimpetError(f"{self.name} has {name} {value!r}; it takes {param.takes}")

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.__repr__ = Sampler.__repr__  # type: ignore[method-assign]  # dataclass leaves alone what a class has

    def __repr__(self) -> str:
        """Its calls, and whatever is not as it comes."""
        own = (f"{name}={getattr(self, name)!r}" for name in self._changed)
        return f"{type(self).__name__}({', '.join([f'nfe={self.nfe}', *own])})"

    @property
    def _changed(self) -> list[str]:
        """The parameters that are not as they come, but for the calls."""
        listed = params(type(self)).items()
        return [name for name, param in listed if name != "nfe" and getattr(self, name) != param.default]

    @property
    def name(self) -> str:
        """What `--arm` and study files call it."""
        return registry.name_of(type(self), GROUP, BUILTIN)

    @property
    def caption(self) -> str:
        """What to call an arm that has no name of its own: the sampler and whatever is not as it comes."""
        own = [f"{name}={getattr(self, name):g}" if isinstance(getattr(self, name), float) else
               f"{name}={getattr(self, name)}" for name in self._changed]  # fmt: skip
        return " ".join([self.name.rpartition("/")[2], *own])

    def to_dict(self) -> dict[str, Any]:
        return {"sampler": self.name, **{one.name: getattr(self, one.name) for one in fields(self)}}  # type: ignore[arg-type]

    def replace(self, **changes: Any) -> Self:
        """The same sampler with some parameters changed."""
        known(type(self), changes, self.name)
        return replace(self, **changes)  # type: ignore[type-var]

    def fitted(self, length: int, vocab_size: int) -> Self:
        """The same sampler, with no whole number larger than can matter: more positions and calls than a path has are
        as good as all of them, and so are more tokens than there are."""
        most = {"path": length + self.nfe, "vocabulary": vocab_size}
        found = {name: (getattr(self, name), most.get(param.counts)) for name, param in params(type(self)).items()}
        beyond = {name: edge for name, (value, edge) in found.items() if type(value) is int and edge and value > edge}
        return self.replace(**beyond) if beyond else self

    def __reduce__(self) -> Any:
        return from_dict, (self.to_dict(),)  # by name: the class may stand in a file that no module path leads to


def find(name: str) -> type[Sampler]:
    """A sampler's class by name: built in, of another package, or `./file.py:Name`."""
    found = registry.find("sampler", GROUP, BUILTIN, name)
    frozen = getattr(getattr(found, "__dataclass_params__", None), "frozen", False)
    if not (isinstance(found, type) and Sampler in found.__mro__ and frozen):
        raise LimpetError(f"{name} is no sampler: it takes a frozen dataclass that inherits from limpet.Sampler")
    return found


def available() -> dict[str, type[Sampler]]:
    """Every sampler that has a name here; another package's that cannot be loaded is left out (`find` says why)."""
    found = {}
    for name in {**BUILTIN, **registry.installed(GROUP)}:
        with suppress(LimpetError):
            found[name] = find(name)
    return found


def words(kind: type[Sampler]) -> str:
    """What a sampler says of itself: the first paragraph of its class's words, on one line."""
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def from_dict(values: Mapping[str, Any]) -> Sampler:
    """A sampler from what `to_dict` gave."""
    if "sampler" not in values:
        raise LimpetError(f"a sampler is written with its name, as sampler; this has {', '.join(values) or 'nothing'}")
    own = {name: value for name, value in values.items() if name != "sampler"}
    kind = find(values["sampler"])
    known(kind, own, str(values["sampler"]))
    return kind(**own)


@dataclass(frozen=True)
class Written:
    """A sampler in a TOML file, as a command line has it: `limpet tune` writes such files."""

    arm: str


def parse(text: str, **common: Any) -> tuple[str, Sampler]:
    """An arm as a command line has it, `crs budget=.25`, or with a name of its own, `small: crs budget=.25`.

    In place of the sampler may stand a TOML file that holds one; parameters after it are put in the place of the file's.
    `common` are parameters that every arm has unless it says otherwise; those that a sampler does not have are left out."""
    caption, colon, spec = text.partition(": ")
    name, *settings = (spec if colon else text).split() or [""]
    kind, own = _written(name) if name.endswith(".toml") else (find(name), {})
    own |= _settings(kind, name, settings, text)
    given = {name: value for name, value in common.items() if name in params(kind) and value is not None}
    sampler = kind(**{**given, **own})
    return caption if colon else sampler.caption, sampler


def _settings(kind: type[Sampler], name: str, settings: Sequence[str], text: str) -> dict[str, Any]:
    """Parameters by name, from words such as `nfe=16`."""
    takes = "after the sampler it takes parameters such as nfe=16"
    return {param.name: param.read(value) for param, value in assigned(kind, name, settings, f"arm {text!r}", takes)}


def assigned(
    kind: type[Sampler], name: str, settings: Sequence[str], where: str, takes: str
) -> Iterator[tuple[Param, str]]:
    """The parameter and the text after it of each `parameter=text`; of one that is none it is said where, and what is taken."""
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals:
            raise LimpetError(f"{where} has {setting!r}; {takes}")
        field = field.replace("-", "_")
        known(kind, {field: value}, name)
        yield params(kind)[field], value


def _written(ctx: str) -> tuple[type[Sampler], dict[str, Any]]:
    """The sampler of a TOML file and its parameters; a Python file that it names stands beside it."""
    file = Toml(ctx, "name a file that limpet tune wrote")
    text = file.build(Written).arm
    name, *settings = text.split() or [""]
    with file.at("arm"):
        kind = find(str(file.path.parent / name) if registry.is_file(name) else name)
        own = _settings(kind, name, settings, text)
        kind(**own)  # what it does not take is said here, with the line
    return kind, own
