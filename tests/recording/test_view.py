"""The terminal and the page: what is drawn, what is escaped, and that a page needs no other file."""

import base64
import gzip
import hashlib
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import limpet
from limpet import CRS, Mend, Native
from limpet.cli import view, watch
from limpet.errors import LimpetError
from limpet.evaluation.checkers.molecules import read_molecule
from limpet.evaluation.checkers.sudoku import SudokuChecker, puzzles, solutions
from limpet.models.prompt_layouts import clashes
from limpet.recording import drawings, page, terminal
from limpet.recording.trajectory import Trajectory, record
from limpet.server import playground
from pages import Page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\u2028{{data}}"


@pytest.fixture(scope="module")
def words():
    return limpet.load("exact:words")


@pytest.fixture(scope="module")
def recorded(words):
    return [record(words, sampler, seed=4) for sampler in (Native(nfe=8), CRS(nfe=8, horizon=2))]


def printed(renderable, **options):
    console = Console(width=100, record=True, file=io.StringIO(), **options)
    console.print(renderable)
    return console.export_text()


# The terminal


def test_every_position_is_drawn_with_its_mask(recorded):
    """By the definitions: chosen by one call, visible in the next two, committed ever after."""
    path = recorded[1]
    chosen_at = {}
    for r, frame in enumerate(path.frames):
        names = terminal.mask_names(path, r)
        last = r == path.header.frames - 1  # the output has the masks of the final step
        for i in range(path.header.length):
            if path.header.mask(frame, "chosen")[i]:
                assert chosen_at.setdefault(i, r) == r
                assert names[i] == "chosen"
            elif i in chosen_at:
                assert path.header.mask(frame, "committed")[i]
                assert names[i] == ("visible" if r - last - chosen_at[i] <= 2 else "committed")
            else:
                changed = r > 0 and frame.model_input[i] != path.frames[r - 1].model_input[i]
                assert names[i] == ("changed" if changed else "")
    assert chosen_at


def test_an_unknown_mask_is_underlined_and_named(recorded):
    path = recorded[1]
    header = replace(path.header, masks=["fixed", "odd", "visible", "\x1b[2J"])
    strange = Trajectory(header, path.frames, path.token_texts)
    names = terminal.mask_names(strange, 6)
    odd, visible = (header.mask(path.frames[6], name) for name in ("odd", "visible"))
    assert {name for name, here in zip(names, odd & ~visible, strict=True) if here} <= {"odd", "\x1b[2J"}
    assert terminal.style("odd") == "underline"
    text = printed(terminal.render([strange], 6))
    assert f"{odd.sum()} odd" in text
    assert "odd" in text.splitlines()[-1]
    assert "\x1b" not in text


def test_a_revised_token_has_its_own_style(words, recorded):
    """It has a name in the legend; a trajectory of another sampler does not have the mask."""
    path = record(words, Mend(nfe=12, warmup=0.1, spacing=0), seed=4)
    revised = [path.header.mask(frame, "revised") for frame in path.frames]
    assert sum(mask.sum() for mask in revised) > 3
    for r, mask in enumerate(revised):
        assert [name == "revised" for name in terminal.mask_names(path, r)] == mask.tolist()
    r = max(range(len(revised)), key=lambda r: revised[r].sum())
    *_, legend = printed(terminal.render([path], r)).splitlines()
    assert legend.split() == ["changed", *path.header.masks]
    assert f"{revised[r].sum()} revised" in printed(terminal.render([path], r))
    styles = [terminal.style(name) for name in ("changed", "other", *path.header.masks)]
    assert len(set(styles)) == len(styles)
    assert "revised" not in recorded[1].header.masks


def test_the_text_can_be_read_off_the_screen(recorded):
    text = printed(terminal.render([recorded[0]], 8))
    letters = "".join(re.findall(r"│(.*?)│", text)).replace(" ", "")
    assert recorded[0].text.replace(" ", "") in letters
    assert "output after 8 calls" in text


def test_trajectories_stand_side_by_side(recorded):
    text = printed(terminal.render(recorded, 3))
    assert text.count("call 4/8") == 2
    assert any("native" in line and "horizon=2" in line for line in text.splitlines())
    committed = recorded[1].header.mask(recorded[1].frames[3], "committed").sum()
    assert f"{committed} committed" in text


def test_a_sparkline_spans_its_values():
    assert terminal.sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert terminal.sparkline([i / 99 for i in range(100)], 8) == "▁▂▃▄▅▆▇█"


def test_a_token_cannot_control_the_terminal():
    assert terminal.printable("\x1b[2Jgone\x07\u202e") == "␣[2Jgone␣␣"
    assert terminal.printable("\n") == "↵\n"
    assert terminal.printable("") == "·"


def test_watch_live_ends_in_the_sample(words, capsys):
    watch.run(model="exact:words", sampler=("native", "mine: crs budget=.25", "crs nfe=4"), nfe=8, seed=4)
    text = capsys.readouterr().out
    for name in ("native", "mine", "crs", "output after 8 calls", "output after 4 calls"):
        assert name in text
    for sampler in (Native(nfe=8), CRS(nfe=8, budget=0.25), CRS(nfe=4)):
        assert limpet.sample(words, sampler, n=1, seed=4).texts[0][:20] in text


def test_watch_from_files(recorded, tmp_path, capsys):
    for name, path in zip("ab", recorded, strict=True):
        path.save(tmp_path / name)
    watch.run((tmp_path / "a", tmp_path / "b"))
    assert recorded[0].text[:20] in capsys.readouterr().out


@pytest.mark.parametrize("text", ["natve", "crs horizon=", "crs horizn=3", "crs nfe=x", "", "native budget=.5"])
def test_a_sampler_that_does_not_exist(text):
    with pytest.raises(LimpetError):
        watch.run(model="exact:words", sampler=(text,))


def test_watch_says_what_is_wrong():
    with pytest.raises(LimpetError, match="are both 'crs"):
        watch.run(model="exact:words", sampler=("crs", "crs"), nfe=4)
    with pytest.raises(LimpetError, match="delay"):
        watch.run(model="exact:words", delay=-1)


# A sudoku


@pytest.fixture(scope="module")
def puzzle():
    (line,) = puzzles(1, clues=32, seed=0)
    return line


@pytest.fixture(scope="module")
def solved(puzzle):
    """The trajectories of the README's animation."""
    model = limpet.load("sudoku")
    return [record(model, sampler, prompt=puzzle) for sampler in (Native(nfe=16), Mend(nfe=16))]


def test_a_trajectory_names_its_layout_and_keeps_it_in_its_file(solved, recorded):
    assert [Trajectory.from_bytes(path.to_bytes()).header.layout for path in solved] == ["sudoku", "sudoku"]
    assert Trajectory.from_bytes(recorded[0].to_bytes()).header.layout is None


def test_a_file_without_a_layout_is_plain_text_and_another_kind_of_layout_is_refused(recorded):
    line, _, frames = gzip.decompress(recorded[0].to_bytes()).partition(b"\n")
    values = json.loads(line)
    del values["layout"]
    assert Trajectory.from_bytes(gzip.compress(json.dumps(values).encode() + b"\n" + frames)).header.layout is None
    values["layout"] = ["sudoku"]
    with pytest.raises(LimpetError, match="damaged"):
        Trajectory.from_bytes(gzip.compress(json.dumps(values).encode() + b"\n" + frames))


def test_both_samplers_solve_the_readmes_sudoku(solved):
    assert [SudokuChecker().check(path.text)["solved"] for path in solved] == [True, True]


def test_a_sudoku_is_a_grid_in_the_terminal(solved, puzzle):
    lines = printed(terminal.render(solved[:1], 16)).splitlines()
    rows = ["".join(re.findall(r"\d", line)) for line in lines if re.search(r"(\d ){3}\|", line)]
    assert "".join(rows) == solved[0].text[83:]
    assert "clue   clash" in lines[-1]
    early = terminal.render(solved[:1], 4)
    frame = solved[0].frames[4]
    texts = [solved[0].token_texts[int(token)] for token in frame.model_input]
    console = Console(width=100, force_terminal=True, color_system="standard", file=io.StringIO())
    console.print(early)
    red = re.findall(r"\x1b\[(?:\d+;)*31m(.)\x1b", console.file.getvalue())
    assert len(red) == sum(clashes(texts[1:82], texts[83:])) > 20


def test_a_sudoku_of_6x6_is_a_grid_in_the_terminal():
    (path,) = [record(limpet.load("sudoku-6x6"), Native(nfe=2))]
    lines = printed(terminal.render([path], 2)).splitlines()
    assert path.header.layout == "sudoku-6x6"
    assert sum("------+------" in line for line in lines) == 2
    assert len([line for line in lines if re.search(r"([^ ] ){3}\| ([^ ] ?){3}", line)]) == 6
    assert "clash" in lines[-1]


def test_another_length_or_an_unknown_layout_is_drawn_as_text(solved, recorded):
    for path, layout in ((recorded[0], "sudoku"), (solved[0], "unknown")):
        strange = Trajectory(replace(path.header, layout=layout), path.frames, path.token_texts)
        assert "clash" not in printed(terminal.render([strange], 3))


def test_clashes_are_equal_digits_and_digits_that_are_not_the_clue(puzzle):
    """Against the rules, pair by pair."""
    solution = "".join(map(str, solutions([int(clue) for clue in puzzle.replace(".", "0")])[0]))
    assert not any(clashes(puzzle, solution))
    board = list(solution)
    board[0], board[40], board[80] = board[1], "0", "="
    expected = [
        (puzzle[i] != "." and board[i] != puzzle[i])
        or any(
            i != j and board[i] == board[j] and board[i] in "123456789"
            and (i // 9 == j // 9 or i % 9 == j % 9 or (i // 27 == j // 27 and i % 9 // 3 == j % 9 // 3))
            for j in range(81)
        )
        for i in range(81)
    ]  # fmt: skip
    assert clashes(puzzle, board) == expected
    assert sum(expected) >= 2


# A molecule


def test_a_molecule_has_its_drawing_in_the_file():
    pytest.importorskip("rdkit")
    model = limpet.load("molecules")
    path = next(path for seed in range(9) if (path := record(model, Native(nfe=32), seed=seed)).drawing)
    svg = base64.b64decode(path.drawing.removeprefix("data:image/svg+xml;base64,")).decode()
    assert "<svg" in svg
    assert "<script" not in svg
    assert Trajectory.from_bytes(path.to_bytes()).drawing == path.drawing
    assert drawings.draw("molecules", "CCO   ").startswith(drawings.PREFIX)
    assert drawings.draw("molecules", "C1(") is drawings.draw(None, "CCO") is None


def test_without_rdkit_there_is_no_drawing(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rdkit"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rdkit", None)
    read_molecule.cache_clear()
    assert drawings.draw("molecules", "CCO") is None


@pytest.mark.parametrize("drawing", ["data:text/html;base64,AA==", "https://example.org/a.svg", 3, {}])
def test_a_file_whose_drawing_is_no_embedded_svg_is_refused(recorded, drawing):
    line, _, frames = gzip.decompress(recorded[0].to_bytes()).partition(b"\n")
    data = json.dumps({**json.loads(line), "drawing": drawing}).encode() + b"\n" + frames
    with pytest.raises(LimpetError, match="damaged"):
        Trajectory.from_bytes(gzip.compress(data))


# The page


def hostile(path):
    header = path.header.__class__(**{**path.header.__dict__, "name": HOSTILE, "model": HOSTILE})
    return Trajectory(header, path.frames, {**path.token_texts, 0: HOSTILE}, HOSTILE, path.scores)


def test_a_page_holds_its_files_and_reaches_nothing(recorded):
    parts = Page(page.self_contained(recorded))
    scripts = [text for tag, attributes, text in parts.inside if tag == "script" and "type" not in attributes]
    styles = [text for tag, _, text in parts.inside if tag == "style"]
    (data,) = [text for tag, attributes, text in parts.inside if attributes.get("type") == "application/json"]
    files = json.loads(data)["files"]
    assert [base64.b64decode(file) for file in files] == [path.to_bytes() for path in recorded]
    for tag, attributes in parts.tags:
        assert not {"src", "href"} & set(attributes) or attributes["href"].startswith("data:"), tag
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in styles[0]
    assert "@import" not in styles[0]
    (csp,) = [a["content"] for _, a in parts.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in csp.split("; "))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    for rule, (text,) in {"script-src": scripts, "style-src": styles}.items():
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_hostile_names_and_texts_stay_text(recorded):
    plain, spoilt = page.self_contained(recorded[:1]), page.self_contained([hostile(recorded[0])], HOSTILE)
    assert [tag for tag, _ in Page(plain).tags] == [tag for tag, _ in Page(spoilt).tags]
    assert "alert(1)</script>" not in spoilt
    assert "onerror=alert(2)>" not in spoilt
    data = {"models": [{"name": HOSTILE}], "samplers": {}, "params": {HOSTILE: []}, "descriptions": {HOSTILE: HOSTILE}}
    about, _ = playground.playground(data)
    assert "alert(1)</script>" not in about
    (data,) = [text for _, attributes, text in Page(about).inside if attributes.get("type") == "application/json"]
    assert json.loads(data)["models"][0]["name"] == HOSTILE


def test_the_scripts_never_parse_text_as_html():
    for package, name in (("recording", "viewer.js"), ("recording", "open.js"), ("server", "playground.js")):
        source = page.asset(name, f"limpet.{package}")
        for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert danger not in source, (name, danger)


def test_view_writes_a_page(recorded, tmp_path, capsys):
    files = []
    for name, path in zip("ab", recorded, strict=True):
        path.save(tmp_path / name)
        files.append(tmp_path / name)
    view.run(tuple(files), out_file=tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert "do not share" not in capsys.readouterr().err


@pytest.mark.parametrize("files", [(), (Path("missing"),), (Path(__file__),)])
def test_view_says_what_is_wrong(files, tmp_path):
    with pytest.raises(LimpetError):
        view.run(files, out_file=tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_sample_records_its_first_sample(tmp_path, capsys):
    from limpet.cli import sample

    sample.run(model="exact:words", n=2, seed=6, record=tmp_path / "a.limpet", sampler="crs nfe=5")
    printed_texts = capsys.readouterr()
    assert Trajectory.load(tmp_path / "a.limpet").text in printed_texts.out
    assert "differs" not in printed_texts.err
    with pytest.raises(LimpetError, match="does not exist"):
        sample.run(model="exact:words", record=tmp_path / "no" / "a.limpet")
