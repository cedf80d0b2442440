"""Finds words that the project does not use, and class names that stand twice: `make check` runs it.

The code, the documentation and every message are written in the ordinary words of the field. A word in WORDS is not
used at all; a name in IDENTIFIERS is an ordinary English word that says too little as the name of a thing. A word is
also found within an identifier (`per_shard`, `ArmName`)."""

from __future__ import annotations

import ast
import io
import json
import lzma
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = {  # word -> what to write instead
    "law": "distribution, probs, or predicted distribution",
    "laws": "distributions",
    "label": "committed token",
    "labels": "committed tokens",
    "labelled": "committed",
    "relabel": "update the committed tokens",
    "arm": "sampler",
    "arms": "samplers",
    "knob": "parameter",
    "knobs": "parameters",
    "shard": "seed (samples that share one), job (a process) or part (a file)",
    "shards": "seeds, jobs or parts",
    "readout": "final step",
    "readouts": "final steps",
    "weave": "interleave",
    "woven": "interleaved",
    "unwoven": "not interleaved",
    "hire": "start",
    "hired": "started",
    "shelf": "cache",
    "stock": "cache",
    "spot": "location",
    "wire": "format or connection",
    "trail": "trajectory",
    "trails": "trajectories",
}
PHRASES = {"unless told": "default: ...", "in turn": "alternately", "whoever": "name the thing"}
IDENTIFIERS = {"seen", "said", "told", "made", "hands", "looks", "asked", "whose", "given"}
EXCEPTIONS = {  # pattern of a line's text that is allowed -> why
    r"aria-label|<label|</label|labelledby|\blabel for=|createElement\(.label.\)|\"label\"": "HTML's element",
    r"\.label\b|\blabel \{": "HTML's attribute and rules of style for the element",
    r"\blabel=|labels=|\blabels\(\)|ticklabels|clabel|\.set_label\b|handles_labels": "arguments of matplotlib",
    r"labels\.(text|set)|label\.set": "attributes of matplotlib's legends",
    r"nvidia.*shard|model-\d+-of-\d+": "names of files on the hub",
    r"@given|import .*\bgiven\b|hypothesis\.given": "hypothesis's decorator",
    r"sand salt .*wire|\bwire\b.*\bwind\b|\bwind\b.*\bwire\b": "the words of exact:words",
}
SUFFIXES = {".py", ".pyi", ".md", ".toml", ".js", ".css", ".html", ".yml", ".ipynb", ".sh", ".json", ".xz"}
SKIPPED = {  # file or folder -> why it is not read
    "tools/vocabulary.py": "names the words",
    "CHANGELOG.md": "says what old names have become",
    "tests/generation/golden": "digests and the parameters of earlier versions",
    "recipes/logs/": "logs of finished runs",
    "src/limpet/models/builtin/tokenizer.json": "a vocabulary that was fitted to text",
}
ENCODED = r"[A-Za-z0-9+/=]{80,}"  # bytes as text
CAMEL = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def tracked() -> Iterator[Path]:
    """The text files that git tracks, and the reports' numbers."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in names.stdout.decode().split("\0"):
        path = ROOT / name
        is_text = path.suffix in SUFFIXES and (path.suffix != ".xz" or name.endswith(".json.xz"))
        if name and is_text and not name.startswith(tuple(SKIPPED)) and path.is_file():
            yield path


def read(path: Path) -> str:
    """A file's text; of stored numbers their keys, one on each line; of a notebook its cells without their outputs."""
    if path.suffix == ".xz":
        return "\n".join(sorted(_keys(json.loads(lzma.decompress(path.read_bytes())))))
    if path.suffix == ".json" and path.name != "golden.json":
        return "\n".join(sorted(_keys(json.loads(path.read_text(encoding="utf-8")))))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":  # outputs hold random words and pages
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text


def _keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return {str(key) for key in value}.union(*map(_keys, value.values()))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()


def words_of(text: str) -> Iterator[str]:
    """The words in a line, also those within identifiers, in lower case."""
    for run in re.findall(r"[A-Za-z]+", text):
        yield run.lower()
        parts = CAMEL.findall(run)
        yield from (part.lower() for part in parts if len(parts) > 1)


def forbidden(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, word, what to write instead) of every forbidden word in a file."""
    text = read(path)
    for number, line in enumerate(text.split("\n"), 1):
        plain = re.sub("|".join([*EXCEPTIONS, ENCODED]), "", line)
        for word in {*words_of(plain)} & WORDS.keys():
            yield number, word, WORDS[word]
        for phrase, instead in PHRASES.items():
            if re.search(rf"\b{phrase}\b", plain, re.IGNORECASE):
                yield number, phrase, instead
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_hypothesis = token.string == "given" and re.search(r"@given|import|hypothesis\.given", token.line)
            if token.type == tokenize.NAME and token.string in IDENTIFIERS and not is_hypothesis:
                yield token.start[0], token.string, "a name that says what the thing is"


def repeated_classes() -> Iterator[str]:
    """Every class name of the package that stands in two places."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"the class name {name} stands twice: {', '.join(found)}"


def main() -> int:
    """Print every finding; 1 if there is any."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}: write {instead}"
        for path in tracked()
        for line, word, instead in forbidden(path)
    ]
    found += repeated_classes()
    for line in found:
        print(line)
    print(f"{len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
