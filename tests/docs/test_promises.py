"""What the pages, the help and the docstrings promise about batches says the same everywhere."""

from __future__ import annotations

import re

from examples import ROOT

PROMISE = re.compile(
    r"(not|whatever|depend|same sample as)\b.{0,40}\b(batch size|its batch|batches|limpet sample`)|in any batch"
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = sorted((ROOT / "src/limpet").rglob("*.py"))


def test_a_promise_about_batches_names_rounding() -> None:
    """A sample depends on its seed and index alone, up to a network's rounding: some places left the rounding out."""
    found = []
    for file in [*PAGES, *CODE]:
        for part in re.split(r"\n\s*\n|\n {8}(?=\w+: )", file.read_text("utf-8")):
            words = " ".join(part.split())
            if ("seed" in words.lower()) and PROMISE.search(words):
                found.append(file.name)
                assert "round" in words, f"{file}: {words}"
    assert {"README.md", "bulk.md", "write-a-sampler.md", "diffusers.md", "generation.py", "sample.py"} <= set(found)
