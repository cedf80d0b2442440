"""What to run at which number of calls, from committed numbers: the tables of README, docs/samplers.md and the cards.

    python tools/frontier.py

Of the studies `samplers`, `forms` and `interleave` (docs/reports/mini), and of `limpet tune mini --nfe N --n 64 --precision
bfloat16 --json` for each N (benchmarks/results/tune-mini.json), all of them but `interleave` made on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from blocks import put
from limpet.evaluation.statistics import Estimate
from limpet.experiments import report, units
from limpet.experiments.contents import Entry, Table, signed
from limpet.experiments.render import markdown
from limpet.models.model_files import BUILTIN_FOLDER
from limpet.paper import studies
from limpet.paper.studies import forms, interleave, pareto, samplers
from limpet.paper.studies.published import Beside
from limpet.samplers import parse

HERE = Path(__file__).parents[1]
SIZE = studies.preset("mini-gpu")
TUNED = HERE / "benchmarks/results/tune-mini.json"
ARMS = {
    "CRS, as in the paper": "crs",
    "CRS, labels copied": "crs budget=1 spacing=2 final_step=keep",
    "Mend": "mend",
}  # of the study `samplers`, first arms of their families
DRAWN, WIDE = "top-p, ancestral", "mend budget=.25"


def committed(name: str) -> Beside:
    one = studies.study(name, SIZE)
    results = report.read(one, HERE / "docs/reports/mini" / units.name(one))
    return Beside(**vars(results), size=SIZE, words=studies.WORDS[name])


def tuned() -> dict[int, str]:
    """The tuner's winner for `mini` by number of calls, as the arm of the study `forms` that it is."""
    found: dict[str, Any] = json.loads(TUNED.read_text(encoding="utf-8"))
    arms = [arm for some in forms.FORMS.values() for arm in some]
    known = {parse(arm)[1].replace(nfe=2): arm for arm in arms if not arm.startswith("form ")}
    return {int(nfe): known[parse(one["arm"])[1].replace(nfe=2)] for nfe, one in found.items()}


def frontier(roles: Sequence[str], field: Beside, tried: Beside) -> str:
    """By model and number of calls: NLL less the best top-p curve over final steps at each arm's own entropy."""
    best, captions = tuned(), SIZE.captions

    def row(role: str, nfe: int) -> tuple[Entry, ...]:
        at = f"{role}/{nfe}"
        found: list[tuple[Beside, str]] = [(field, arm) for arm in ARMS.values()] + [(tried, best[nfe])]
        return (
            Entry(f"{captions[role]}, {nfe}"),
            *(Entry(f"{short(samplers.less(one, at, arm))} at {one(f'{at}/{arm}', 'entropy').mean:.2f}")
              for one, arm in found),
            Entry(best[nfe]),
        )  # fmt: skip

    rows = tuple(tuple(row(role, nfe) for nfe in SIZE.nfes) for role in reversed(roles))
    return markdown(Table("frontier", "", ("calls", *ARMS, "Mend, tuned", "which is"), rows))


def short(estimate: Estimate) -> str:
    return signed(estimate, 3).replace("0.", ".")


def spread(found: Iterable[float], sign: str = "+") -> str:
    """The least and the largest."""
    values = list(found)
    return f"{min(values):{sign}.3f} to {max(values):{sign}.3f}".replace("0.", ".")


def words(field: Beside) -> str:
    """What Mend costs, whether it holds after a prefix, and what MAUVE makes of it where that was taken."""
    places = samplers.places(SIZE)

    def less(measure: str, arm: str = "mend", where: Iterable[str] = places, **curves: Any) -> str:
        return spread(samplers.less(field, at, arm, measure=measure, **curves).mean for at in where)

    taken = [at for at in places if "mauve" in field.cells[f"{at}/mend"]]
    drawn = [arm for arm in samplers.CURVES[DRAWN] if "mauve" in field.cells[f"{taken[0]}/{arm}"]]
    held = sum("mauve" in field.cells[name] for name in field.cells if name.startswith(f"{taken[0]}/"))

    def mauve(arm: str) -> str:
        return spread((field(f"{at}/{arm}", "mauve").mean for at in taken), "-")

    def beyond(arm: str) -> str:
        return less("mauve", arm, taken, curves={DRAWN: drawn})

    return (
        f"Mend's Rep-4 differs by {less('rep-4')} from top-p's at equal entropy, its Self-BLEU by {less('self-bleu')}; "
        f"continuing prefixes, its NLL by {less('nll', where=samplers.continued(SIZE))}.\n\n"
        f"MAUVE against held-out text, taken of {held} arms at 16 and 64 calls, rises with entropy: it is "
        f"{mauve(drawn[0])} for native sampling with a drawn last call, {mauve('mend')} for Mend, {beyond('mend')} "
        f"from drawn top-p's at equal entropy, and {mauve(WIDE)} for `{WIDE}` ({beyond(WIDE)}), which labels a quarter "
        f"of the positions.\n"
    )


def turns() -> str:
    """NLL less the released sampler's at its entropy, in turn and all at once, by model and number of calls."""
    interleaved, plain = committed("interleave"), committed("pareto")
    calls = [SIZE.nfes[0], *interleave.every(SIZE), *SIZE.nfes[2:]]
    whose: list[tuple[str, Beside, pareto.Arms, str]] = [
        ("in turn", interleaved, interleave.every(SIZE), "in turn"),
        ("top-p, all at once", plain, pareto.every(SIZE), "top-p, ancestral"),
        ("Mend, all at once", plain, pareto.every(SIZE), "Mend"),
    ]

    def entry(role: str, nfe: int, found: Beside, every: pareto.Arms, family: str) -> Entry:
        arms = every.get(nfe, {}).get(family)
        return Entry(signed(pareto.less(found, SIZE, role, interleave.FINAL_STEP, nfe, arms), 3) if arms else "")

    rows = tuple(
        (Entry(f"{caption}, {name}"), *(entry(role, nfe, found, every, family) for nfe in calls))
        for role, caption in reversed(SIZE.captions.items())
        for name, found, every, family in whose
    )
    return markdown(Table("turns", "", ("mixtures of arms", *(f"{nfe} calls" for nfe in calls)), (rows,))).lstrip()


def sharper() -> str:
    """Mend less top-p, both in turn, at Mend's entropy."""
    found = committed("interleave")
    at = {role: f"{role}/{interleave.twice(SIZE)}" for role in SIZE.captions}

    def entry(role: str, arm: str) -> Entry:
        less = interleave.sharper(found, SIZE, role, arm)
        return Entry(f"{short(less)} at {found(f'{at[role]}/{arm}', 'entropy').mean:.2f}")

    rows = tuple(
        (Entry(arm), *(entry(role, arm) for role in reversed(SIZE.captions))) for arm in interleave.INTERLEAVED["mend"]
    )
    head = (f"{interleave.twice(SIZE)} calls", *reversed(SIZE.captions.values()))
    return markdown(Table("sharper", "", head, (rows,))).lstrip()


def pages() -> dict[Path, str]:
    field, tried = committed("samplers"), committed("forms")
    both = f"{frontier(list(SIZE.captions), field, tried)}\n{words(field)}"
    cards = {BUILTIN_FOLDER / SIZE.roles[role] / "README.md": frontier([role], field, tried) for role in SIZE.captions}
    return {HERE / "README.md": both, HERE / "docs/samplers.md": both, **cards}


if __name__ == "__main__":
    for page, text in pages().items():
        put(page, "frontier", text)
    for name, block in {"interleave": turns(), "sharper": sharper()}.items():
        put(HERE / "docs/samplers.md", name, block)
