"""The terminal and the page: what is marked, what is escaped, and that the page holds all it needs."""

import base64
import hashlib
import html.parser
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import limpet
from limpet import CRS, Mend, Native
from limpet.cli import view, watch
from limpet.errors import LimpetError
from limpet.recording import page, terminal
from limpet.recording.trajectory import Trajectory, record
from limpet.server import playground

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\u2028{{data}}"


@pytest.fixture(scope="module")
def words():
    return limpet.load("exact:words")


@pytest.fixture(scope="module")
def paths(words):
    return [record(words, sampler, seed=4) for sampler in (Native(nfe=8), CRS(nfe=8, horizon=2))]


def printed(renderable, **options):
    console = Console(width=100, record=True, file=io.StringIO(), **options)
    console.print(renderable)
    return console.export_text()


# The terminal


def test_every_position_has_the_mark_it_should(paths):
    """Marks by their definitions: chosen by one call, visible for the next two, committed ever after."""
    path = paths[1]
    chosen_at = {}
    for r, frame in enumerate(path.frames):
        kinds = terminal.kinds(path, r)
        last = r == path.header.frames - 1  # the output keeps the final step's marks
        for i in range(path.header.length):
            if path.header.marked(frame, "chosen")[i]:
                assert chosen_at.setdefault(i, r) == r
                assert kinds[i] == "chosen"
            elif i in chosen_at:
                assert path.header.marked(frame, "committed")[i]
                assert kinds[i] == ("visible" if r - last - chosen_at[i] <= 2 else "committed")
            else:
                changed = r > 0 and frame.input[i] != path.frames[r - 1].input[i]
                assert kinds[i] == ("changed" if changed else "")
    assert chosen_at


def test_a_mark_that_nobody_knows_is_underlined_and_named(paths):
    path = paths[1]
    header = replace(path.header, marks=["given", "odd", "visible", "\x1b[2J"])
    strange = Trajectory(header, path.frames, path.words)
    kinds = terminal.kinds(strange, 6)
    odd, visible = (header.marked(path.frames[6], mark) for mark in ("odd", "visible"))
    assert {kind for kind, here in zip(kinds, odd & ~visible, strict=True) if here} <= {"odd", "\x1b[2J"}
    assert terminal.style("odd") == "underline"
    text = printed(terminal.render([strange], 6))
    assert f"{odd.sum()} odd" in text
    assert "odd" in text.splitlines()[-1]
    assert "\x1b" not in text


def test_a_label_that_is_mended_looks_like_nothing_else(words, paths):
    """Where the sampler says so, in a style of its own, with its word in the legend; a path that mends nothing knows no
    such mark."""
    path = record(words, Mend(nfe=12, warmup=0.1, spacing=0), seed=4)
    marked = [path.header.marked(frame, "mended") for frame in path.frames]
    assert sum(mark.sum() for mark in marked) > 3
    for r, mark in enumerate(marked):
        assert [kind == "mended" for kind in terminal.kinds(path, r)] == mark.tolist()
    r = max(range(len(marked)), key=lambda r: marked[r].sum())
    *_, legend = printed(terminal.render([path], r)).splitlines()
    assert legend.split() == ["changed", *path.header.marks]
    assert f"{marked[r].sum()} mended" in printed(terminal.render([path], r))
    looks = [terminal.style(kind) for kind in ("changed", "other", *path.header.marks)]
    assert len(set(looks)) == len(looks)
    assert "mended" not in paths[1].header.marks


def test_the_text_can_be_read_off_the_screen(paths):
    text = printed(terminal.render([paths[0]], 8))
    letters = "".join(re.findall(r"│(.*?)│", text)).replace(" ", "")
    assert paths[0].text.replace(" ", "") in letters
    assert "output after 8 calls" in text


def test_arms_stand_side_by_side(paths):
    text = printed(terminal.render(paths, 3))
    assert text.count("call 4/8") == 2
    assert any("native" in line and "horizon=2" in line for line in text.splitlines())
    committed = paths[1].header.marked(paths[1].frames[3], "committed").sum()
    assert f"{committed} committed" in text


def test_a_sparkline_spans_its_values():
    assert terminal.sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert terminal.sparkline([i / 99 for i in range(100)], 8) == "▁▂▃▄▅▆▇█"


def test_a_word_cannot_drive_the_terminal():
    assert terminal.word("\x1b[2Jgone\x07\u202e") == "␣[2Jgone␣␣"
    assert terminal.word("\n") == "↵\n"
    assert terminal.word("") == "·"


def test_watch_live_ends_in_the_sample(words, capsys):
    watch.run(model="exact:words", arm=("native", "mine: crs budget=.25", "crs nfe=4"), nfe=8, seed=4)
    text = capsys.readouterr().out
    for name in ("native", "mine", "crs", "output after 8 calls", "output after 4 calls"):
        assert name in text
    for sampler in (Native(nfe=8), CRS(nfe=8, budget=0.25), CRS(nfe=4)):
        made = limpet.sample(words, sampler, n=1, seed=4).texts[0]
        assert made[:20] in text


def test_watch_without_arms_is_crs(words, capsys):
    watch.run(model="exact:words", nfe=6, seed=5)
    text = capsys.readouterr().out
    assert text.startswith("╭─ crs ")
    assert limpet.sample(words, CRS(nfe=6), n=1, seed=5).texts[0][:40] in text


def test_watch_a_sampler_of_ones_own(words, tmp_path, capsys):
    """A file, its parameter and its mark, with nothing else said."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from limpet import Native, parameter\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Native):\n"
        "    nth: int = parameter(2, 'Which positions are marked.', low=1)\n\n"
        "    def step(self, path, state):\n"
        "        state, info = super().step(path, state)\n"
        "        return state, info._replace(marks={'nth': (state.tokens % self.nth) == 0})\n"
    )
    watch.run(model="exact:words", arm=(f"{tmp_path}/mine.py:Mine nth=3",), nfe=5, seed=2)
    text = capsys.readouterr().out
    assert "mine.py:Mine nth=3" in text
    assert re.search(r"\d+ nth", text)
    assert limpet.sample(words, Native(nfe=5), n=1, seed=2).texts[0][:40] in text


def test_watch_from_files(paths, tmp_path, capsys):
    for name, path in zip("ab", paths, strict=True):
        path.save(tmp_path / name)
    watch.run((tmp_path / "a", tmp_path / "b"))
    assert paths[0].text[:20] in capsys.readouterr().out


@pytest.mark.parametrize("text", ["natve", "crs horizon=", "crs horizn=3", "crs nfe=x", "", "native budget=.5"])
def test_an_arm_that_is_none(text):
    with pytest.raises(LimpetError):
        watch.run(model="exact:words", arm=(text,))


def test_watch_says_what_to_mend():
    with pytest.raises(LimpetError, match="are both 'crs"):
        watch.run(model="exact:words", arm=("crs", "crs"), nfe=4)
    with pytest.raises(LimpetError, match="delay"):
        watch.run(model="exact:words", delay=-1)


# The page


class Parts(html.parser.HTMLParser):
    """Every tag with its attributes, and what stands in scripts, styles and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.stack = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.stack.append(tag)
        if tag in ("script", "style"):
            self.inside.append((tag, dict(attrs), ""))

    def handle_data(self, data):
        if self.stack and self.stack[-1] in ("script", "style"):
            tag, attributes, text = self.inside.pop()
            self.inside.append((tag, attributes, text + data))

    def handle_endtag(self, tag):
        if tag in self.stack:
            while self.stack.pop() != tag:
                pass


def hostile(path):
    header = path.header.__class__(**{**path.header.__dict__, "arm": HOSTILE, "model": HOSTILE})
    return Trajectory(header, path.frames, {**path.words, 0: HOSTILE}, HOSTILE, path.scores)


def test_a_page_holds_its_files_and_reaches_nothing(paths):
    made = page.self_contained(paths)
    parts = Parts(made)
    scripts = [text for tag, attributes, text in parts.inside if tag == "script" and "type" not in attributes]
    styles = [text for tag, _, text in parts.inside if tag == "style"]
    (data,) = [text for tag, attributes, text in parts.inside if attributes.get("type") == "application/json"]
    files = json.loads(data)["files"]
    assert [base64.b64decode(file) for file in files] == [path.to_bytes() for path in paths]
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


def test_hostile_names_and_words_stay_text(paths):
    plain, spoilt = page.self_contained(paths[:1]), page.self_contained([hostile(paths[0])], HOSTILE)
    assert [tag for tag, _ in Parts(plain).tags] == [tag for tag, _ in Parts(spoilt).tags]
    assert "alert(1)</script>" not in spoilt
    assert "onerror=alert(2)>" not in spoilt
    offered = {"models": [{"name": HOSTILE}], "samplers": {HOSTILE: []}, "words": {HOSTILE: HOSTILE}}
    about, _ = playground.playground(offered)
    assert "alert(1)</script>" not in about
    (data,) = [text for _, attributes, text in Parts(about).inside if attributes.get("type") == "application/json"]
    assert json.loads(data)["models"][0]["name"] == HOSTILE


def test_the_scripts_never_parse_text_as_html():
    for package, name in (("recording", "viewer.js"), ("recording", "open.js"), ("server", "playground.js")):
        source = page.asset(name, f"limpet.{package}")
        for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert danger not in source, (name, danger)


def test_view_writes_a_page(paths, tmp_path, capsys):
    files = []
    for name, path in zip("ab", paths, strict=True):
        path.save(tmp_path / name)
        files.append(tmp_path / name)
    view.run(tuple(files), out_file=tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert "do not share" not in capsys.readouterr().err


@pytest.mark.parametrize("files", [(), (Path("missing"),), (Path(__file__),)])
def test_view_says_what_to_mend(files, tmp_path):
    with pytest.raises(LimpetError):
        view.run(files, out_file=tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_sample_records_the_path_of_its_first_sample(tmp_path, capsys):
    from limpet.cli import sample

    sample.run(model="exact:words", n=2, seed=6, record=tmp_path / "a.limpet", arm="crs nfe=5")
    told = capsys.readouterr()
    assert Trajectory.load(tmp_path / "a.limpet").text in told.out
    assert "differs" not in told.err
    with pytest.raises(LimpetError, match="does not exist"):
        sample.run(model="exact:words", record=tmp_path / "no" / "a.limpet")


def test_the_commands_read_their_arguments(tmp_path, paths, capsys):
    """Through tyro, as the command line does."""
    import tyro

    from limpet.cli import serve

    commands = {"watch": watch.run, "view": view.run, "serve": serve.run}
    paths[0].save(tmp_path / "a.limpet")
    tyro.extras.subcommand_cli_from_dict(commands, args=["watch", str(tmp_path / "a.limpet"), "--delay", "0"])
    assert paths[0].text[:20] in capsys.readouterr().out
    arguments = ["view", str(tmp_path / "a.limpet"), str(tmp_path / "a.limpet"), "-o", str(tmp_path / "page.html")]
    tyro.extras.subcommand_cli_from_dict(commands, args=arguments)
    assert (tmp_path / "page.html").exists()
    with pytest.raises(LimpetError, match="cannot be used"):
        tyro.extras.subcommand_cli_from_dict(
            commands, args=["serve", "--models", "exact:words", "--port", "70000", "--limit.seconds", "5"]
        )
    for name in commands:
        with pytest.raises(SystemExit):
            tyro.extras.subcommand_cli_from_dict(commands, args=[name, "--help"])
        assert "$ limpet " + name in capsys.readouterr().out
