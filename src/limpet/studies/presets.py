"""The sizes that every study comes in: the paper's, the built-in models' on a CPU or a GPU, and a smoke test's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from limpet.compare import SHARDS
from limpet.errors import LimpetError
from limpet.lab.study import Judging, Prompts
from limpet.policy import Policy

PROMPTS = Path(__file__).with_name("prompts.txt")  # paragraphs that the built-in models did not train on


@dataclass(frozen=True)
class Preset:
    """Models by role, and every size; budgets are fractions of the length already."""

    name: str
    about: str
    distilled: str
    base: str
    labels: dict[str, str]  # what tables call the models
    judges: tuple[Judging, ...]
    shards: tuple[int, ...]
    n: int  # samples in a shard
    audit_n: int  # of the endpoint audit
    nfes: tuple[int, ...]
    nfe: int  # of every study but NFE scaling
    audit_nfe: int
    prompts: Prompts
    prompted_n: int  # continuations in a shard
    prompted_length: int  # prefix and continuation together

    @property
    def horizon(self) -> int:
        """The paper's eight steps of 64, as a share of the calls."""
        return max(1, self.nfe // 8)

    @property
    def policy(self) -> Policy:
        """CRS at this preset's calls."""
        return Policy(nfe=self.nfe)

    @property
    def native(self) -> Policy:
        return self.policy.but(horizon=0)

    @property
    def roles(self) -> dict[str, str]:
        """The two models by role."""
        return {"distilled": self.distilled, "base": self.base}


PAPER = Preset(
    name="paper",
    about="the paper's own: the released checkpoints, length 1024, 4 x 64 samples, GPT-2-Large and Pythia-1.4B; a GPU",
    distilled="s-sahoo/duo-distilled",
    base="s-sahoo/duo",
    labels={"distilled": "Duo-distilled", "base": "Duo"},
    judges=(Judging("gpt2-large", "ids"), Judging("EleutherAI/pythia-1.4b", "text")),
    shards=SHARDS,
    n=64,
    audit_n=16,
    nfes=(8, 16, 32, 64),
    nfe=64,
    audit_nfe=32,
    prompts=Prompts("openwebtext-prompts.txt", tokens=50, each=5),
    prompted_n=1280,
    prompted_length=100,
)
MINI_GPU = replace(
    PAPER,
    name="mini-gpu",
    about="the built-in models at the paper's counts: minutes on a GPU, hours on a CPU; no network",
    distilled="mini-distilled",
    base="mini",
    labels={"distilled": "mini-distilled", "base": "mini"},
    judges=(Judging("mini-judge", "ids"),),
    prompts=Prompts(str(PROMPTS), tokens=50, each=5),
    prompted_n=320,
)
MINI = replace(
    MINI_GPU,
    name="mini",
    about="the built-in models, 4 x 16 samples, 32 calls: minutes to half an hour a study on a CPU; no network",
    n=16,
    nfes=(4, 8, 16, 32),
    nfe=32,
    audit_nfe=16,
    prompted_n=40,
)
SMOKE = replace(
    MINI,
    name="smoke",
    about="exact sources scored by their true law: seconds, for tests; no network, no weights",
    distilled="exact:words",
    base="exact:chain",
    labels={"distilled": "words", "base": "chain"},
    judges=(),
    shards=SHARDS[:2],
    n=4,
    audit_n=2,
    nfes=(4, 8),
    nfe=8,
    audit_nfe=4,
    prompts=Prompts("source", tokens=80, each=2),
    prompted_n=4,
    prompted_length=160,
)
PRESETS = {preset.name: preset for preset in (PAPER, MINI, MINI_GPU, SMOKE)}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise LimpetError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def sized(name: str, n: int | None = None, prompts: str | None = None) -> Preset:
    """A preset with its own number of samples or prompts replaced."""
    found = preset(name)
    if n is not None:
        found = replace(found, n=n, audit_n=n, prompted_n=n * found.prompts.each)
    if prompts is not None:
        found = replace(found, prompts=replace(found.prompts, texts=prompts))
    return found
