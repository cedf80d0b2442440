"""What a report says first: its result in one or two sentences, and the units of its numbers. All of it is computed."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from limpet.experiments.claims import FEW, LEVEL, Claim, Finding, Verdict, bounds
from limpet.experiments.report_content import Contrast, ReportContent, Table, format_signed
from limpet.experiments.results import Results

# The unit of a difference, by the first words that its name has.
UNITS = (
    (r"share|right more often|rep-4|dist-4|self-bleu|mauve|jaccard", "fraction"),
    (r"nll|likelihood|\bgain\b", "nats/token"),
    (r"entropy", "nats"),
    (r"\bcommitted\b", "tokens"),
)
PLACE = re.compile(r"(at|matched on) (equal|its own|its|the) \w+|matched on [\w-]+")  # says where, not what
# What the head of a column gains; a head that has words in brackets says its unit.
HEADS = (
    (r"(Native |CRS )?GenPPL", "lower is better"),
    (r"((Native|CRS) )?[Ee]ntropy|Δentropy .*", "nats"),
    (r"NLL at entropy", "nats/token, nats"),
    (r"(Delta NLL|ΔGenNLL).*", "nats/token"),
    (r"(Delta )?(Rep-4|Dist-4|Self-BLEU)|MAUVE", "fraction"),
    (r"H", "steps"),
    (r"Committed|Visible", "tokens"),
)


def unit_of(results: Results, name: str, claim: str = "") -> str:
    """The unit of a finding or a contrast by its name, else by its claim; "" where it has none or none is known."""
    if results.probes:
        known = {row.quantity: row.unit for row in results.rows() if row.quantity in name}
        if known or not results.cells:
            return known[max(known, key=len)] if known else ""
    for text in (name, claim):
        words = PLACE.sub("", text.lower())
        found = next((unit for pattern, unit in UNITS if re.search(pattern, words)), "")
        if found:
            return found
    return "nats/token" if re.search("top-p curve|mixtures", claim) else ""


def common_unit(results: Results, claim: Claim) -> str:
    """The unit that all findings of a claim have; "" if they differ."""
    units = {unit_of(results, finding.name, claim.text) for finding in claim.findings}
    return units.pop() if len(units) == 1 else ""


def with_units(content: ReportContent) -> ReportContent:
    """The same content with a unit, or the better direction, in the heads of columns that lack it."""

    def describe(head: str) -> str:
        unit = next((unit for pattern, unit in HEADS if re.fullmatch(pattern, head)), "")
        return f"{head}, {unit}" if unit else head

    tables = (replace(table, head=tuple(map(describe, table.head))) for table in content.tables)
    return replace(content, tables=tuple(tables))


def in_short(results: Results, content: ReportContent) -> str:
    """The result of a report in one or two sentences."""
    if content.claims:
        return _of_claims(results, content.claims)
    if content.contrasts:
        return _of_contrasts(results, content.contrasts)
    outcomes = _outcomes(content.tables)
    if outcomes.total():
        counts = join([f"{count} lie {word}" for word, count in outcomes.items() if word != "open"])
        return (
            f"Of {outcomes.total()} comparisons of NLL with the best top-p curve at equal entropy, {counts}; "
            f"{outcomes['open']} are open."
        )
    return _of_rows(results) if results.probes else _of_cells(results)


def join(words: Sequence[str]) -> str:
    """Words as a list in a sentence."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _of_claims(results: Results, found: Sequence[Claim]) -> str:
    counts = Counter(claim.verdict for claim in found)
    if len(found) == 1:
        return f"The one claim is {found[0].verdict}: {quote(results, found[0])}."
    known = [verdict for verdict in get_args(Verdict) if counts[verdict]]
    if len(known) == 1:
        return f"All {len(found)} claims are {known[0]}. The first is: {quote(results, found[0])}."
    tally = join([f"{counts[one]} {'is' if counts[one] == 1 else 'are'} {one}" for one in known])
    examples = []
    for verdict in ("supported", "not supported"):
        claim = next((one for one in found if one.verdict == verdict), None)
        if claim is not None:
            first = "" if counts[claim.verdict] == 1 else f", the first of {counts[claim.verdict]}"
            examples.append(f"{verdict}{first}: {quote(results, claim)}")
    text = "; ".join(examples)
    return f"Of {len(found)} claims, {tally}." + (f" {text[0].upper()}{text[1:]}." if text else "")


def quote(results: Results, claim: Claim) -> str:
    """A claim's sentence and its numbers, or how many of its findings hold where they have no unit in common."""
    unit = common_unit(results, claim)
    return f"“{claim.text}” ({f'{claim.measured}, {unit}' if unit else claim.count})"


def with_unit(results: Results, finding: Finding, claim: Claim) -> str:
    """A finding's value with its unit."""
    return f"{finding.measured} {unit_of(results, finding.name, claim.text)}".strip()


def _of_contrasts(results: Results, contrasts: Sequence[Contrast]) -> str:
    def is_decided(one: Contrast) -> bool:
        lower, upper = bounds(one.estimate.mean, one.estimate.se, len(one.estimate.values))
        return lower > 0 or upper < 0

    decided = [one for one in contrasts if is_decided(one)]
    start = (
        f"Of {len(contrasts)} contrasts, {len(decided) or 'none'} {'differ' if len(decided) > 1 else 'differs'} from 0"
    )
    values = [
        f"{one.name} ({format_signed(one.estimate, 4)} {unit_of(results, one.name)}".strip() + ")" for one in decided
    ]
    listed = f": {join(values)}" if 0 < len(decided) <= FEW else ""
    return f"{start} by a one-sided {LEVEL:.0%} bound{listed}."


def _outcomes(tables: Sequence[Table]) -> Counter[str]:
    """How many entries of the table of verdicts say each outcome."""
    every = [entry.text for table in tables if table.name == "verdicts" for group in table.groups for row in group
             for entry in row]  # fmt: skip
    counts = Counter(text.rpartition(", ")[2] for text in every)
    return Counter({word: counts[word] for word in ("below", "above", "open") if counts[word]})


def _of_rows(results: Results) -> str:
    """The rows that differ most between the places where one quantity was measured."""
    groups: dict[tuple[str, str], list[float]] = {}
    units = {}
    for row in results.rows():
        if row.estimate.mean == row.estimate.mean:
            groups.setdefault((row.quantity, row.model), []).append(row.estimate.mean)
            units[row.quantity] = row.unit
    quantity, model = max(groups, key=lambda key: (max(groups[key]) - min(groups[key]), key))
    low, high = min(groups[quantity, model]), max(groups[quantity, model])
    return (
        f"The report measures {len({name for name, _ in groups})} quantities. “{quantity}” differs most by its place: "
        f"{low:.3g} to {high:.3g} {units[quantity]}".rstrip()
        + f" on {model}."
    )


def _of_cells(results: Results) -> str:
    """The ranges of likelihood and entropy: a low NLL alone would not be a result."""
    known = [values for values in results.cells.values() if {"nll", "entropy"} <= values.keys()]
    ends = {name: [values[name].mean for values in known] for name in ("nll", "entropy")}
    if not known:
        return f"The report holds {len(results.cells)} cells and tests no claim."
    return (
        f"The {len(known)} cells reach an NLL of {min(ends['nll']):.3f} to {max(ends['nll']):.3f} nats/token at an "
        f"entropy of {min(ends['entropy']):.3f} to {max(ends['entropy']):.3f} nats. The report tests no claim."
    )
