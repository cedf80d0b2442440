"""Continuations of fixed prefixes (appendix D.6; table 9 and its contrasts)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from limpet.lab.claims import Claim, Finding, above, below, claim, within
from limpet.lab.page import Contrast, Entry, Page, Table, entry
from limpet.lab.results import Results
from limpet.lab.study import Cell, Study
from limpet.policy import Policy
from limpet.stats import Estimate
from limpet.studies.presets import Preset
from limpet.studies.published import value

ROWS = (  # the table's: late top-p and horizon; the last applies p at every step
    ("1.0", "0"), ("1.0", "short"), ("1.0", "ever"), ("0.9", "short"), ("0.8", "0"), ("0.8", "short"), ("0.8", "ever"),
    ("all 0.8", "0"),
)  # fmt: skip
PAPER = {  # GPT-2, Pythia, entropy, Dist-4, Rep-4
    ("1.0", "0"): ("128.54", "110.39", "3.508", "0.9606", "0.0264"),
    ("1.0", "short"): ("103.50", "88.79", "3.471", "0.9480", "0.0380"),
    ("1.0", "ever"): ("83.96", "71.75", "3.453", "0.9373", "0.0469"),
    ("0.9", "short"): ("83.21", "71.62", "3.461", "0.9402", "0.0446"),
    ("0.8", "0"): ("88.43", "76.71", "3.488", "0.9497", "0.0356"),
    ("0.8", "short"): ("74.77", "64.55", "3.452", "0.9353", "0.0482"),
    ("0.8", "ever"): ("73.31", "62.83", "3.446", "0.9341", "0.0491"),
    ("all 0.8", "0"): ("72.13", "63.25", "3.450", "0.9393", "0.0424"),
}
ALIKE = 0.05  # nats: the reach of the paper's 95% intervals for its second judge, and a little
PAPER_BLEU = {"prefix/all 0.8/0": "0.0378", "prefix/0.8/short": "0.0351", "prefix/0.8/ever": "0.0357"}
# Paired contrasts in nats per token, by judge: the first is GPT-2-Large, the second Pythia-1.4B.
STEPS = (("0", "short"), ("short", "ever"))  # what visibility is extended from and to
PAPER_GAINS = {
    ("0", "short", 1.0): ("0.2165 ± 0.0061", ""),
    ("0", "short", 0.8): ("0.1678 ± 0.0053", ""),
    ("short", "ever", 1.0): ("0.2091 ± 0.0050", ""),
    ("short", "ever", 0.8): ("0.0198 ± 0.0021", ""),
}
PAPER_INTERACTIONS = {
    ("0", "short"): ("0.0487 ± 0.0056", "0.0451 ± 0.0064"),
    ("short", "ever"): ("0.1893 ± 0.0069", "0.1857 ± 0.0093"),
}
PAPER_AGAINST_EVERY_STEP = {
    "short": ("+0.0361 ± 0.0105", "+0.0208 ± 0.0111"),
    "ever": ("+0.0163 ± 0.0096", "-0.0064 ± 0.0100"),
}


def cells(preset: Preset) -> tuple[Cell, ...]:
    """Cells prefix/LATE/HORIZON."""
    steps = {"0": 0, "short": preset.horizon, "ever": None}

    def policy(late: str, horizon: str) -> Policy:
        if late.startswith("all "):
            return preset.policy.but(horizon=steps[horizon], top_p=float(late.removeprefix("all ")))
        return preset.policy.but(horizon=steps[horizon], late_top_p=float(late))

    return tuple(
        Cell(
            f"prefix/{late}/{horizon}", preset.distilled, policy(late, horizon), preset.prompted_n,
            preset.prompted_length, preset.prompts,
        )
        for late, horizon in ROWS
    )  # fmt: skip


def study(preset: Preset) -> Study:
    def show(results: Results) -> Page:
        return Page(
            tables=(_table(results, preset), _bleu(results, preset)),
            contrasts=_contrasts(results, preset),
            claims=_claims(results, preset),
        )

    return Study(
        "prefix", "Continuations of fixed prefixes", cells(preset), preset.shards, show, preset.judges,
        preset=preset.name,
    )  # fmt: skip


def _table(results: Results, preset: Preset) -> Table:
    shown, judges = _shown(preset), results.judges

    def row(late: str, horizon: str) -> tuple[Entry, ...]:
        cell, paper = f"prefix/{late}/{horizon}", PAPER[late, horizon]
        scores = [entry(results(cell, f"ppl:{judge}"), 2, paper[i] if i < 2 else "") for i, judge in enumerate(judges)]
        others = [
            entry(results(cell, measure), digits, value)
            for (measure, digits), value in zip((("entropy", 3), ("dist-4", 4), ("rep-4", 4)), paper[2:], strict=True)
        ]
        schedule = late.capitalize() if late.startswith("all") else f"Late {late}"
        return Entry(schedule), Entry(shown[horizon]), *scores, *others

    start, length = preset.prompts.tokens, preset.prompted_length
    return Table(
        "prefix",
        f"Continuations of {length - start} tokens after {start}: conditional perplexity under each judge, "
        "diversity of the continuation alone.",
        ("Top-p schedule", "H", *judges, "Entropy", "Dist-4", "Rep-4"),
        (tuple(row(*key) for key in ROWS[:-1]), (row(*ROWS[-1]),)),
        labels=2,
    )


def _shown(preset: Preset) -> dict[str, str]:
    """Horizons as tables print them."""
    return {"0": "0", "short": str(preset.horizon), "ever": "∞"}


def _bleu(results: Results, preset: Preset) -> Table:
    horizons = _shown(preset)

    def policy(cell: str) -> str:
        _, late, horizon = cell.split("/")
        when = f"p={late.removeprefix('all ')} at every step" if late.startswith("all") else f"late p={late}"
        return f"{when}, H={horizons[horizon]}"

    rows = tuple(
        (Entry(policy(cell)), entry(results(cell, "self-bleu"), 4, paper)) for cell, paper in PAPER_BLEU.items()
    )
    return Table("prefix-self-bleu", "Self-BLEU among the continuations of a prompt.", ("Policy", "Self-BLEU"), (rows,))


class Difference(NamedTuple):
    """A contrast that the paper gives: its name, ours under a judge, and the paper's under each of its judges."""

    name: str
    ours: Callable[[str], Estimate]
    paper: tuple[str, str]


def _gain(results: Results, preset: Preset, a: str, b: str, p: float) -> Difference:
    shown = _shown(preset)
    return Difference(
        f"gain of H={shown[a]} to {shown[b]}, late p={p:g}",
        lambda nll: results.contrast(f"prefix/{p}/{a}", f"prefix/{p}/{b}", nll),
        PAPER_GAINS[a, b, p],
    )


def _interaction(results: Results, preset: Preset, a: str, b: str) -> Difference:
    """How much more horizon a -> b gains at p=1 than at p=0.8."""
    shown = _shown(preset)
    full, late = ([f"prefix/{p}/{h}" for h in (a, b)] for p in (1.0, 0.8))
    return Difference(
        f"gain of H={shown[a]} to {shown[b]}, late p=1 less 0.8",
        lambda nll: results.interaction(full[0], full[1], late[0], late[1], nll),
        PAPER_INTERACTIONS[a, b],
    )


def _against_every_step(results: Results, preset: Preset, horizon: str) -> Difference:
    return Difference(
        f"NLL of late p=0.8, H={_shown(preset)[horizon]} less p=0.8 at every step",
        lambda nll: results.contrast(f"prefix/0.8/{horizon}", "prefix/all 0.8/0", nll),
        PAPER_AGAINST_EVERY_STEP[horizon],
    )


def _contrasts(results: Results, preset: Preset) -> tuple[Contrast, ...]:
    differences = [
        *(_gain(results, preset, *key) for key in PAPER_GAINS),
        *(_interaction(results, preset, *step) for step in STEPS),
        *(_against_every_step(results, preset, horizon) for horizon in PAPER_AGAINST_EVERY_STEP),
    ]
    return tuple(
        Contrast(f"{one.name} ({judge})", one.ours(f"nll:{judge}"), one.paper[i] if i < len(one.paper) else "")
        for i, judge in enumerate(results.judges)
        for one in differences
    )


def _claims(results: Results, preset: Preset) -> tuple[Claim, ...]:
    def positive(one: Difference) -> Finding:
        return above(one.name, one.ours("nll"), paper=value(one.paper[0]))

    def grams(side: Callable[..., Finding], name: str, i: int) -> Finding:
        ever, none = PAPER["1.0", "ever"], PAPER["1.0", "0"]
        estimate = results.contrast("prefix/1.0/ever", "prefix/1.0/0", name.lower())
        return side(f"{name}, H=∞ less H=0, late p=1", estimate, paper=value(ever[i]) - value(none[i]))

    every_step = [_against_every_step(results, preset, horizon) for horizon in PAPER_AGAINST_EVERY_STEP]
    found = [
        claim(
            "appendix D.6",
            "Visible labels lower the NLL of continuations, at first and when kept for ever, at p=1 and at p=0.8",
            [positive(_gain(results, preset, *key)) for key in PAPER_GAINS],
        ),
        claim(
            "appendix D.6",
            "Lowering late p attenuates the horizon effect",
            [positive(_interaction(results, preset, *step)) for step in STEPS],
        ),
        claim(
            "section 5.3",
            "In fixed-prefix continuation the first judge favours p=0.8 at every step over late p=0.8 with selection",
            [positive(one) for one in every_step],
        ),
        claim(
            "appendix D.6",
            "Persistent context lowers Dist-4 and raises Rep-4 of continuations at p=1",
            [grams(below, "Dist-4", 3), grams(above, "Rep-4", 4)],
        ),
    ]
    if len(results.judges) > 1:
        found.append(
            claim(
                "section 5.3",
                "The second judge does not tell p=0.8 at every step from late p=0.8 with selection",
                [within(f"{one.name} ({results.judges[1]})", one.ours(f"nll:{results.judges[1]}"), ALIKE,
                        value(one.paper[1])) for one in every_step],
            )
        )  # fmt: skip
    return tuple(found)
