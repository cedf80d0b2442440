"""CRS against top-p at equal diversity, by four statistics (appendix E.4): the frontier's distilled cells again."""

from __future__ import annotations

from limpet.lab.claims import Claim, above, below, claim, within
from limpet.lab.page import Entry, Page, Table, signed
from limpet.lab.results import Results
from limpet.lab.study import DIVERSITY, Study
from limpet.stats import Estimate
from limpet.studies import frontier
from limpet.studies.presets import Preset
from limpet.studies.published import value

LABELS = {"entropy": "Entropy", "dist-4": "Dist-4", "rep-4": "Rep-4", "self-bleu": "Self-BLEU"}
PAPER = {
    "entropy": "-0.154 ± 0.031", "dist-4": "-0.025 ± 0.048", "rep-4": "+0.070 ± 0.036", "self-bleu": "-0.144 ± 0.019"
}  # fmt: skip
NEARLY = 0.1  # nats: twice the paper's own error on Dist-4


def study(preset: Preset) -> Study:
    def show(results: Results) -> Page:
        return Page(tables=_tables(results, preset), claims=_claims(results, preset))

    return Study(
        "matched", "CRS against top-p at equal diversity", frontier.sweep(preset, "distilled"), preset.shards, show,
        preset.judges, preset=preset.name,
    )  # fmt: skip


def _tables(results: Results, preset: Preset) -> tuple[Table, ...]:
    curve = frontier.curve(preset, "distilled")

    def row(budget: float) -> tuple[Entry, ...]:
        def paper(statistic: str) -> str:
            if statistic == "entropy":
                return frontier.PAPER_MATCHED[budget]
            return PAPER[statistic] if budget == 0.5 else ""

        residuals = (
            Entry(signed(results.matched(f"distilled/D/{budget}", curve, statistic), 3), paper(statistic))
            for statistic in DIVERSITY
        )
        return Entry(f"D={budget:g}L"), *residuals

    caption = (
        f"{preset.labels['distilled']}: NLL of CRS less global top-p at equal diversity, nats per token, interpolated "
        "in each shard and never beyond its curve (n/a). Negative favours CRS."
    )
    head = ("Matched on", *LABELS.values())
    return (Table("matched", caption, head, (tuple(row(budget) for budget in frontier.BUDGETS),)),)


def _claims(results: Results, preset: Preset) -> tuple[Claim, ...]:
    def residual(statistic: str) -> Estimate:
        return results.matched("distilled/D/0.5", frontier.curve(preset, "distilled"), statistic)

    return (
        claim(
            "appendix E.4",
            "At equal entropy and at equal Self-BLEU, CRS has lower NLL than global top-p",
            [below(f"NLL residual, matched on {LABELS[name]}", residual(name), paper=value(PAPER[name]))
             for name in ("entropy", "self-bleu")],
        ),
        claim(
            "appendix E.4",
            "At equal Dist-4 the two are close",
            [within("NLL residual, matched on Dist-4", residual("dist-4"), NEARLY, value(PAPER["dist-4"]))],
        ),
        claim(
            "appendix E.4",
            "At equal Rep-4 global top-p has lower NLL",
            [above("NLL residual, matched on Rep-4", residual("rep-4"), paper=value(PAPER["rep-4"]))],
        ),
    )  # fmt: skip
