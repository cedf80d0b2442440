"""Errors and warnings are one readable sentence."""

from __future__ import annotations

import pytest

from limpet.errors import MAX_SENTENCE, LimpetError, LimpetWarning, import_extra, one_line, unknown_name, warn


def test_an_unknown_name_comes_with_the_one_that_was_meant():
    error = unknown_name("crs has no parameter", "budgt", ["nfe", "budget"])
    assert str(error) == "crs has no parameter 'budgt'; did you mean budget?"
    assert str(unknown_name("there is no field", "x", iter(["a", "b"]))) == "there is no field 'x'; it takes a, b"


@pytest.mark.parametrize("text", ["a\nb\x1b[31m\u202e", "x" * 10_000, "\x00" * 200, "é" * 300])
def test_a_sentence_is_one_printable_line_of_bounded_length(text):
    for shown in (one_line(text), str(LimpetError(text))):
        assert shown.isprintable()
        assert len(shown) <= MAX_SENTENCE


def test_a_warning_is_a_sentence_too():
    with pytest.warns(LimpetWarning, match="^one two$"):
        warn("one\ntwo")


def test_a_missing_package_names_the_extra_that_installs_it():
    with pytest.raises(LimpetError, match=r"this needs no_such_package: pip install 'limpet\[figures\]'"):
        import_extra("no_such_package.part", "figures")
    assert import_extra("json.decoder", "figures").__name__ == "json.decoder"
