"""The sizes that every study comes in: the paper's, the built-in models' on a CPU or a GPU, and a smoke test's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from limpet.errors import LimpetError
from limpet.experiments.study import Judging, Prompts
from limpet.files import Toml
from limpet.samplers import CRS, Mend, Native, params

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Preset:
    """Models by role, and every size; budgets are fractions of the length already."""

    name: str
    about: str
    distilled: str
    base: str
    captions: dict[str, str]  # what tables call the models
    lengths: dict[str, int]  # tokens in a sample of each
    judges: tuple[Judging, ...]
    shards: tuple[int, ...]
    more: dict[str, tuple[int, ...]]  # of studies with a verdict that the others' shards leave open
    n: int  # samples in a shard
    fine_n: int  # of the studies that match on entropy, or follow changes of it that are small against its noise
    audit_n: int  # of the final_step audit
    nfes: tuple[int, ...]
    nfe: int  # of every study but NFE scaling
    audit_nfe: int
    masses: tuple[float, ...]  # of the global top-p sweep
    nodes: dict[str, tuple[float, ...]]  # by role, those that CRS is matched against: there the curve does not fold
    prompts: Prompts
    prompted_n: int  # continuations in a shard
    prompted_length: int  # prefix and continuation together

    @property
    def horizon(self) -> int:
        """The paper's eight steps of 64, as a share of the calls."""
        return max(1, self.nfe // 8)

    @property
    def apart(self) -> int:
        """The first of the sample indices that the final_step audit has to itself: the NFE sweep has those below."""
        return max(self.n, self.fine_n)

    @property
    def own_launch(self) -> int:
        """The same for the base frontier, which the paper ran by itself."""
        return self.apart + self.audit_n

    @property
    def mend(self) -> Mend:
        """Mend as it comes, beside the paper's arms."""
        return Mend(nfe=self.nfe)

    @property
    def most(self) -> int:
        """The most calls of NFE scaling."""
        return self.nfes[-1]

    @property
    def continued(self) -> int:
        """Tokens of a continuation."""
        return self.prompted_length - self.prompts.tokens

    @property
    def crs(self) -> CRS:
        """CRS at this preset's calls."""
        return CRS(nfe=self.nfe)

    @property
    def native(self) -> Native:
        return Native(nfe=self.nfe)

    def horizons(self, crs: CRS) -> dict[str, Native]:
        """A CRS by how long its labels stay visible: never, which is native sampling, for the horizon, for ever."""
        native = Native(**{param: getattr(crs, param) for param in params(Native)})
        return {"0": native, "short": crs.replace(horizon=self.horizon), "ever": crs}

    @property
    def shown(self) -> dict[str, str]:
        """Horizons as tables print them."""
        return {"0": "0", "short": str(self.horizon), "ever": "∞"}

    @property
    def roles(self) -> dict[str, str]:
        """The two models by role."""
        return {"distilled": self.distilled, "base": self.base}


def _read() -> Iterator[Preset]:
    """Each with all that the one which it is like has."""
    file = Toml(HERE / "presets.toml", "it comes with limpet")
    known: dict[str, dict[str, Any]] = {"": {}}
    for name, own in file.content.items():
        known[name] = {**known[own.pop("like", "")], **own}
        made = file.build(Preset, {"name": name, **known[name]}, name)
        beside = HERE / made.prompts.texts
        yield replace(made, prompts=replace(made.prompts, texts=str(beside))) if beside.is_file() else made


PRESETS = {preset.name: preset for preset in _read()}


def preset(name: str, n: int | None = None, prompts: str | None = None) -> Preset:
    """A preset by name, its own number of samples or prompts replaced where told."""
    if name not in PRESETS:
        raise LimpetError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    found = PRESETS[name]
    if n is not None:
        found = replace(found, n=n, fine_n=n, audit_n=n, prompted_n=n * found.prompts.each)
    if prompts is not None:
        found = replace(found, prompts=replace(found.prompts, texts=prompts))
    return found
