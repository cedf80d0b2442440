"""The prose check measures what it says, and the README and the pages are below its thresholds."""

from __future__ import annotations

import pytest

import prose

PAGE = """# A title that is not prose

Call `limpet sample`. `limpet` draws [one text](page.md) of the model, i.e. a sample (arXiv 2302.05737).

```sh
limpet sample --n 2    # no prose here. Nor here.
```

- **Heading.** The token is drawn. It stays.
- A model reads it.

| a table | is not prose |
|---|---|

<!-- block -->
Generated text is not measured. At all.
<!-- end -->
"""


def test_sentences_are_those_of_paragraphs_and_items():
    assert prose.sentences(PAGE) == [
        "Call Code.",
        "Code draws one text of the model, ie a sample (Link).",
        "The token is drawn.",
        "It stays.",
        "A model reads it.",
    ]


def test_the_figures_of_a_page_are_those_counted_by_hand():
    found = prose.measure(PAGE)
    assert found.sentences == 5
    assert found.mean == (2 + 11 + 4 + 2 + 4) / 5
    assert found.longest == 11
    assert found.passive == 1 / 5


@pytest.mark.parametrize(
    ("sentence", "is_passive"),
    [
        ("The token is drawn.", True),
        ("Tokens are never revised twice.", True),
        ("The file has been written.", True),
        ("Nothing is silently replaced.", True),
        ("The sampler draws a token.", False),
        ("The speed is indeed high.", False),
        ("The network has seen the text.", False),
        ("Seeds are the need of a study.", False),
    ],
)
def test_a_form_of_be_before_a_participle_is_passive(sentence, is_passive):
    assert prose.is_passive(sentence) is is_passive


def test_reading_ease_is_fleschs_formula():
    sentence = "The cat sat on the mat."  # 6 words of one syllable: 206.835 - 1.015 * 6 - 84.6
    assert prose.measure(sentence).ease == pytest.approx(116.145)
    counted = {"cat": 1, "table": 2, "noise": 1, "called": 1, "committed": 3, "distribution": 4, "cases": 2, "the": 1}
    assert {word: prose.syllables(word) for word in counted} == counted


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("Words " * (prose.LONGEST + 1) + "end.", f"a sentence of {prose.LONGEST + 2} words"),
        (("Words " * (prose.MEAN + 1) + "end. ") * 2, "words in the mean sentence"),
        ("The text is read. The text is written. The text ends.", "67% of sentences are passive"),
        ("Heterogeneous discretization necessitates probabilistic considerations.", "reading ease"),
    ],
)
def test_each_threshold_finds_its_problem(page, problem):
    assert any(problem in one for one in prose.measure(page).problems)


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: page.stem)
def test_a_page_is_below_the_thresholds(page):
    assert prose.measure(page.read_text(encoding="utf-8")).problems == []
