"""The sizes of every study: the paper's, those for the built-in models on a CPU or a GPU, and a smoke test's."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from limpet.errors import LimpetError
from limpet.experiments import Cell, JudgeSpec, Prompts
from limpet.files import Toml
from limpet.generation import SEED
from limpet.samplers import CRS, Mend, Native, parse

HERE = Path(__file__).parent


def read_toml(name: str) -> dict[str, Any]:
    """The content of a TOML file in this package."""
    return tomllib.loads((HERE / name).read_text("utf-8"))


TEXTS = read_toml("studies.toml")


def paper_seeds(count: int) -> list[int]:
    """The paper's four seeds, and more at the same spacing."""
    return list(range(SEED, SEED + 10 * count, 10))


@dataclass(frozen=True)
class WorldSize:
    """How much of a world of the study `truth` is run."""

    n: int  # samples per seed
    nfes: tuple[int, ...]
    rival_nfes: tuple[int, ...] = ()  # those of them at which every other sampler is run too
    clue_counts: tuple[int, ...] = ()  # more numbers of clues, for native sampling with the most calls


@dataclass(frozen=True)
class Preset:
    """Models by role and every size. Budgets are fractions of the length, so they need no entry."""

    name: str
    about: str
    distilled: str
    base: str
    captions: dict[str, str]  # by role, the names of the models in tables
    lengths: dict[str, int]  # by role, tokens per sample
    judges: tuple[JudgeSpec, ...]
    seeds: tuple[int, ...]
    more_seeds: dict[str, tuple[int, ...]]  # by study, where the seeds above leave a verdict open
    n: int  # samples per seed
    fine_n: int  # the same for studies that match on entropy, where noise would hide the effect
    final_step_n: int  # the same for the study `final-step`
    nfes: tuple[int, ...]
    nfe: int  # of every study except NFE scaling
    final_step_nfe: int
    top_ps: tuple[float, ...]  # of the sweep of global top-p
    curve_top_ps: dict[str, tuple[float, ...]]  # by role, those whose curve CRS is matched against: it must not fold
    prompts: Prompts
    prompted_n: int  # continuations per seed
    prompted_length: int  # prompt and continuation together
    truth: dict[str, WorldSize]  # of the study `truth`, by world

    @property
    def horizon(self) -> int:
        """The paper's 8 steps of 64, as the same share of the calls."""
        return max(1, self.nfe // 8)

    @property
    def final_step_first(self) -> int:
        """The first sample index of `final-step`, which the paper ran apart from the sweep over calls."""
        return max(self.n, self.fine_n)

    @property
    def base_frontier_first(self) -> int:
        """The first sample index of the base model's frontier, which the paper also ran by itself."""
        return self.final_step_first + self.final_step_n

    @property
    def max_nfe(self) -> int:
        """The most calls of NFE scaling."""
        return self.nfes[-1]

    @property
    def continuation_length(self) -> int:
        """Tokens after the prompt."""
        return self.prompted_length - self.prompts.tokens

    @property
    def mend(self) -> Mend:
        """Mend with its defaults."""
        return Mend(nfe=self.nfe)

    @property
    def crs(self) -> CRS:
        """CRS with its defaults."""
        return CRS(nfe=self.nfe)

    @property
    def native(self) -> Native:
        """Native sampling with the paper's final step."""
        return Native(nfe=self.nfe, final_step="argmax")

    @property
    def horizon_captions(self) -> dict[str, str]:
        """How long tokens stay visible, as cells name it (never, the horizon, always) and as tables print it."""
        return {"0": "0", "short": str(self.horizon), "unlimited": "∞"}

    @property
    def roles(self) -> dict[str, str]:
        """The two models by role."""
        return {"distilled": self.distilled, "base": self.base}


def _read() -> Iterator[Preset]:
    """Every preset, with the fields that it inherits."""
    file = Toml(HERE / "presets.toml", "it comes with limpet")
    known: dict[str, dict[str, Any]] = {"": {}}
    for name, own in file.content.items():
        known[name] = {**known[own.pop("like", "")], **own}
        fields = {"name": name, **known[name]}
        fields["seeds"] = paper_seeds(fields.pop("n_seeds"))
        fields["more_seeds"] = {study: paper_seeds(count) for study, count in fields["more_seeds"].items()}
        preset = file.build(Preset, fields, name)
        packaged = HERE / preset.prompts.texts
        yield replace(preset, prompts=replace(preset.prompts, texts=str(packaged))) if packaged.is_file() else preset


PRESETS = {preset.name: preset for preset in _read()}


def preset(name: str, n: int | None = None, prompts: str | None = None) -> Preset:
    """A preset by name. n: samples per seed, in place of its own. prompts: a file of prompts, in place of its own."""
    if name not in PRESETS:
        raise LimpetError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    found = PRESETS[name]
    if n is not None:
        found = replace(found, n=n, fine_n=n, final_step_n=n, prompted_n=n * found.prompts.each)
        found = replace(found, truth={world: replace(size, n=n) for world, size in found.truth.items()})
    if prompts is not None:
        found = replace(found, prompts=replace(found.prompts, texts=prompts))
    return found


def combinations(rule: Mapping[str, Any], preset: Preset) -> Iterator[dict[str, Any]]:
    """The values that fill a rule of studies.toml, with the preset, at every combination of the rule's `each`."""
    each = {
        name: getattr(preset, values) if isinstance(values, str) else values
        for name, values in rule.get("each", {}).items()
    }
    for values in product(*each.values()):
        yield {"preset": preset, **dict(zip(each, values, strict=True))}


def filled(texts: Iterable[str], fields: Mapping[str, Any]) -> list[str]:
    """The texts of a rule with its values, whose own places are filled too."""
    return [text.format(**fields).format(**fields) for text in texts]


def defined_cells(study: str, preset: Preset) -> list[Cell]:
    """The cells that studies.toml defines for a study."""
    found = [cell for name in TEXTS[study].get("cells_of", ()) for cell in defined_cells(name, preset)]
    for rule in TEXTS[study].get("cells", ()):
        length, prompts = (preset.prompted_length, preset.prompts) if "prompted" in rule else (None, None)
        n, first = getattr(preset, rule["n"]), getattr(preset, rule["first"]) if "first" in rule else 0
        for fields in combinations(rule, preset):
            texts = (rule.get(key, "") for key in ("name", "model", "sampler", "replay"))
            name, role, text, replay = filled(texts, fields)
            sampler = parse(text, nfe=preset.nfe)[1]
            found.append(Cell(name, preset.roles[role], sampler, n, length, prompts, replay or None, first))
    return found
