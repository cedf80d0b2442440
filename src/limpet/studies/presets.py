"""The sizes that every study comes in: the paper's, the built-in models' on a CPU or a GPU, and a smoke test's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from limpet.compare import SHARDS
from limpet.errors import LimpetError
from limpet.lab.study import Judging, Prompts
from limpet.policy import Policy

# Paragraphs of books held out from the built-in models' training; six of the 256 stand in a training book as well.
PROMPTS = Path(__file__).with_name("prompts.txt")


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
    fine_n: int  # of the studies that match on entropy, or follow changes of it that are small against its noise
    audit_n: int  # of the endpoint audit
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
    fine_n=64,
    audit_n=16,
    nfes=(8, 16, 32, 64),
    nfe=64,
    audit_nfe=32,
    masses=(1.0, 0.95, 0.9, 0.85, 0.8, 0.75),
    nodes={"distilled": (1.0, 0.95, 0.9, 0.85, 0.8, 0.75), "base": (0.9, 0.85, 0.8, 0.75)},
    prompts=Prompts("openwebtext-prompts.txt", tokens=50, each=5),
    prompted_n=1280,
    prompted_length=100,
)
MINI_GPU = replace(
    PAPER,
    name="mini-gpu",
    about="the built-in models, 4 x 64 samples, 4 x 256 where noise would hide the effect, 64 calls; a GPU; no network",
    distilled="mini-distilled",
    base="mini",
    labels={"distilled": "mini-distilled", "base": "mini"},
    judges=(Judging("mini-judge", "ids"),),
    fine_n=256,  # of 256 tokens: as many tokens as the paper's 64 of 1024
    masses=(*PAPER.masses, 0.7, 0.6, 0.5, 0.4),  # a small model under CRS is less diverse than at the paper's least p
    nodes=dict.fromkeys(("distilled", "base"), (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)),  # wide steps keep every shard's order
    prompts=Prompts(str(PROMPTS), tokens=50, each=5),
    prompted_n=320,
)
MINI = replace(
    MINI_GPU,
    name="mini",
    about="the built-in models, 4 x 8 samples, 32 calls: ten minutes to two hours a study on two cores; no network",
    n=8,
    fine_n=8,
    audit_n=8,
    masses=(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4),
    nfes=(4, 8, 16, 32),
    nfe=32,
    audit_nfe=16,
    prompted_n=20,
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
    fine_n=4,
    audit_n=2,
    nfes=(4, 8),
    nfe=8,
    audit_nfe=4,
    masses=PAPER.masses,
    nodes=PAPER.nodes,
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
        found = replace(found, n=n, fine_n=n, audit_n=n, prompted_n=n * found.prompts.each)
    if prompts is not None:
        found = replace(found, prompts=replace(found.prompts, texts=prompts))
    return found
