"""Measures the prose of the README and of the pages: `make check` runs it.

`python tools/prose.py` prints what is over a threshold. `python tools/prose.py --table` prints the figures of every
page. Prose is the text of paragraphs, quotations and list items: no code, tables, headings, links' addresses or
generated blocks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 40  # words of a sentence: beyond it, readers go back to its beginning
MEAN = 20  # words of a page's mean sentence: plain-language guides (GOV.UK, plainlanguage.gov) advise 15 to 20
PASSIVE = 0.35  # of a page's sentences: reference pages say what is read and refused; guides stay far below it
EASE = 50  # Flesch reading ease of a page: below 50 is "difficult", and terms of the field are long already

BE = r"(?:am|is|are|was|were|be|been|being|isn't|aren't|wasn't|weren't)"
IRREGULAR = (
    "begun bound bought broken brought built caught chosen cut done drawn driven fed felt found fit forgotten "
    "given gone held hidden hit kept known laid led left lent let lost made meant met paid put read rebuilt run "
    "said seen sent set shown shut spent split spread stored taken taught thought thrown told torn understood won "
    "worn written"
).split()
NOT_PASSIVE = {  # adjectives and nouns that look like participles
    "need", "indeed", "speed", "seed", "red", "hundred", "used to", "based", "unused", "biased", "mixed",
}  # fmt: skip
PARTICIPLE = rf"(?:[a-z]+ed|{'|'.join(IRREGULAR)})"
PASSIVES = re.compile(rf"\b{BE}(?: (?:not|never|only|also|often|always|then|there|[a-z]+ly))* ({PARTICIPLE})\b", re.I)
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|Fig|no)\.", re.I)
# A sentence ends at a mark, perhaps closed by a bracket or quote, before a new sentence.
END = re.compile(r"(?<=[.!?])[)\"'*]*\s+(?=[\"'(*`A-Z0-9])|(?<=:)\s*$")


class Measures(NamedTuple):
    """Figures of a page's prose."""

    sentences: int
    mean: float  # words of a sentence
    longest: int  # words
    passive: float  # share of sentences
    ease: float  # Flesch reading ease: 60 to 70 is plain English, below 30 is very difficult
    too_long: tuple[str, ...]  # sentences of more than LONGEST words

    @property
    def problems(self) -> list[str]:
        """What is over a threshold."""
        found = [f"a sentence of {len(one.split())} words (at most {LONGEST}): {one}" for one in self.too_long]
        if self.mean > MEAN:
            found.append(f"{self.mean:.1f} words in the mean sentence (at most {MEAN})")
        if self.passive > PASSIVE:
            found.append(f"{self.passive:.0%} of sentences are passive (at most {PASSIVE:.0%})")
        if self.ease < EASE:
            found.append(f"reading ease {self.ease:.0f} (at least {EASE})")
        return found


def plain(text: str) -> str:
    """The text of Markdown: inline code as one word, links as their texts, without emphasis."""
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+|arXiv [\d.]*\d", "Link", text)
    return " ".join(re.sub(r"\*+|(?<!\w)_|_(?!\w)", "", text).split())


def paragraphs(page: str) -> Iterator[str]:
    """The paragraphs and list items of a page, as plain text."""
    page = re.sub(r"^---\n.*?^---\n", "", page, flags=re.S | re.M)
    page = re.sub(r"^( *)```.*?^\1```", "", page, flags=re.S | re.M)
    page = re.sub(r"<!-- .*?<!-- end[^>]*-->|<!--.*?-->", "", page, flags=re.S)
    lines = [line for line in page.split("\n") if not re.match(r"\s*(\||#|!\[|:::)", line)]
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", "\n".join(lines), flags=re.M)
    text = re.sub(r"^\*\*[^*]+[.:]\*\* ", "", text, flags=re.M)  # a heading at the beginning of a paragraph
    yield from filter(None, (plain(part) for part in re.split(r"\n\s*\n", text)))


def sentences(page: str) -> list[str]:
    """The sentences of a page. One word alone is no sentence."""
    found = []
    for paragraph in paragraphs(page):
        text = ABBREVIATIONS.sub(lambda one: one[1].replace(".", ""), paragraph)
        found += [part for part in END.split(text) if part and len(part.split()) > 1]
    return found


def is_passive(sentence: str) -> bool:
    """Whether a form of "be" stands before a participle: "is drawn", "are never revised"."""
    return any(found[1].lower() not in NOT_PASSIVE for found in PASSIVES.finditer(sentence))


def syllables(word: str) -> int:
    """An estimate: groups of vowels, without a silent final e."""
    letters = re.sub(r"[^a-z]", "", word.lower())
    letters = re.sub(r"(?<=[^l])e$|(?<=[^td])ed$|(?<=[^sxz])es$", "", letters) if len(letters) > 3 else letters
    return max(1, len(re.findall(r"[aeiouy]+", letters)))


def measure(page: str) -> Measures:
    """The figures of a page."""
    found = sentences(page)
    words = [word for sentence in found for word in sentence.split() if re.search(r"\w", word)]
    if not words:
        return Measures(0, 0.0, 0, 0.0, 100.0, ())
    mean = len(words) / len(found)
    ease = 206.835 - 1.015 * mean - 84.6 * sum(map(syllables, words)) / len(words)
    longest = max(len(one.split()) for one in found)
    too_long = tuple(one for one in found if len(one.split()) > LONGEST)
    return Measures(len(found), mean, longest, sum(map(is_passive, found)) / len(found), ease, too_long)


def pages() -> list[Path]:
    """The README and every page of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main(arguments: list[str]) -> int:
    """Print the table, or what is over a threshold; 1 if anything is."""
    measured = {page.stem: measure(page.read_text(encoding="utf-8")) for page in pages()}
    if "--table" in arguments:
        print(f"{'page':<18} sentences  mean  longest  passive  reading ease")
        for name, one in measured.items():
            print(f"{name:<18} {one.sentences:9} {one.mean:5.1f} {one.longest:8} {one.passive:8.0%} {one.ease:13.0f}")
    found = [f"{name}: {problem}" for name, one in measured.items() for problem in one.problems]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
