"""Continuations of fixed prefixes (appendix D.6; table 9 and its contrasts)."""

from __future__ import annotations

from limpet.lab.claims import Claim, Finding, above, below, claim
from limpet.lab.page import Contrast, Entry, Page, Table, entry
from limpet.lab.results import Results
from limpet.lab.study import Cell, Study
from limpet.policy import Policy
from limpet.stats import Estimate
from limpet.studies.presets import Preset

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
PAPER_BLEU = {"prefix/all 0.8/0": "0.0378", "prefix/0.8/short": "0.0351", "prefix/0.8/ever": "0.0357"}
# Paired contrasts in nats per token, by judge: the first is GPT-2-Large, the second Pythia-1.4B.
PAPER_CONTRASTS = {
    "gain 0 to short, p=1": ("0.2165 ± 0.0061", ""),
    "gain 0 to short, p=0.8": ("0.1678 ± 0.0053", ""),
    "gain short to ever, p=1": ("0.2091 ± 0.0050", ""),
    "gain short to ever, p=0.8": ("0.0198 ± 0.0021", ""),
    "interaction 0 to short": ("0.0487 ± 0.0056", "0.0451 ± 0.0064"),
    "interaction short to ever": ("0.1893 ± 0.0069", "0.1857 ± 0.0093"),
    "late p=0.8, short less p=0.8 at every step": ("+0.0361 ± 0.0105", "+0.0208 ± 0.0111"),
    "late p=0.8, ever less p=0.8 at every step": ("+0.0163 ± 0.0096", "-0.0064 ± 0.0100"),
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
            tables=(_table(results, preset), _bleu(results)), contrasts=_contrasts(results), claims=_claims(results)
        )

    return Study(
        "prefix", "Continuations of fixed prefixes", cells(preset), preset.shards, show, preset.judges,
        preset=preset.name,
    )  # fmt: skip


def _table(results: Results, preset: Preset) -> Table:
    shown = {"0": "0", "short": str(preset.horizon), "ever": "∞"}
    judges = results.judges

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


def _bleu(results: Results) -> Table:
    rows = tuple((Entry(cell), entry(results(cell, "self-bleu"), 4, paper)) for cell, paper in PAPER_BLEU.items())
    return Table("prefix-self-bleu", "Self-BLEU among the continuations of a prompt.", ("Cell", "Self-BLEU"), (rows,))


def _contrasts(results: Results) -> tuple[Contrast, ...]:
    found = []
    for i, judge in enumerate(results.judges):
        nll = f"nll:{judge}"
        values = {
            f"gain {a} to {b}, p={p:g}": results.contrast(f"prefix/{p}/{a}", f"prefix/{p}/{b}", nll)
            for a, b in (("0", "short"), ("short", "ever"))
            for p in (1.0, 0.8)
        }
        values |= {
            f"interaction {a} to {b}": _interaction(results, a, b, nll) for a, b in (("0", "short"), ("short", "ever"))
        }
        values |= {
            f"late p=0.8, {h} less p=0.8 at every step": results.contrast(f"prefix/0.8/{h}", "prefix/all 0.8/0", nll)
            for h in ("short", "ever")
        }
        found += [
            Contrast(f"{name} ({judge})", estimate, PAPER_CONTRASTS[name][i] if i < 2 else "")
            for name, estimate in values.items()
        ]
    return tuple(found)


def _interaction(results: Results, a: str, b: str, measure: str) -> Estimate:
    """How much more horizon a -> b gains at p=1 than at p=0.8."""
    full, late = ([f"prefix/{p}/{h}" for h in (a, b)] for p in (1.0, 0.8))
    return results.interaction(full[0], full[1], late[0], late[1], measure)


def _claims(results: Results) -> tuple[Claim, ...]:
    def gain(p: float, a: str, b: str) -> Finding:
        return above(f"gain {a} to {b}, p={p:g}", results.contrast(f"prefix/{p}/{a}", f"prefix/{p}/{b}"))

    return (
        claim(
            "appendix D.6",
            "Visible labels lower the NLL of continuations, at first and when kept for ever, at p=1 and at p=0.8",
            [gain(p, a, b) for p in (1.0, 0.8) for a, b in (("0", "short"), ("short", "ever"))],
        ),
        claim(
            "appendix D.6",
            "Lowering late p attenuates the horizon effect",
            [
                above(f"interaction {a} to {b}", _interaction(results, a, b, "nll"))
                for a, b in (("0", "short"), ("short", "ever"))
            ],
        ),
        claim(
            "section 5.3",
            "The first judge favours p=0.8 at every step over late p=0.8 with selection",
            [
                above(f"NLL of late p=0.8, {h} less p=0.8 at every step",
                      results.contrast(f"prefix/0.8/{h}", "prefix/all 0.8/0"))
                for h in ("short", "ever")
            ],
        ),
        claim(
            "appendix D.6",
            "Longer visibility lowers Dist-4 and raises Rep-4 of continuations at p=1",
            [
                below("Dist-4, for ever less none", results.contrast("prefix/1.0/ever", "prefix/1.0/0", "dist-4")),
                above("Rep-4, for ever less none", results.contrast("prefix/1.0/ever", "prefix/1.0/0", "rep-4")),
            ],
        ),
    )  # fmt: skip
