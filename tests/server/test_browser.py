"""The playground and the self-contained page in Chromium, driven by playwright."""

import json
import re
import sys
import threading
import urllib.parse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import limpet
from limpet import CRS, Mend, Native, samplers
from limpet.evaluation.checkers.sudoku import puzzles
from limpet.evaluation.judges import has_builtin
from limpet.models import model_files
from limpet.models.prompt_layouts import clashes
from limpet.recording import page
from limpet.recording.trajectory import Trajectory, record
from limpet.samplers import named_samplers
from limpet.server import playground
from limpet.server.handlers import Resources, examples, page_length
from limpet.server.http import application
from limpet.server.scheduler import Limits
from limpet.server.workers import in_this_process
from limpet.style import colours

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import pictures
from accessibility import SCREENS, on_screen, serious
from pictures import serving
from served import GUARD, Counting, wait_for

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'limpet[dev]'")
pytestmark = pytest.mark.skipif(
    pictures.chromium() is None, reason="there is no Chromium here: install one, or name it in LIMPET_CHROMIUM"
)

IMAGES = Path(__file__).parents[2] / "docs/images"
MARKS = "run", "first frame"
ALWAYS = ["confidence", "t", "deficit"]  # of the legend
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


@pytest.fixture(scope="module")
def opened():
    with pictures.browser() as browser:
        yield browser


@pytest.fixture
def tab(opened):
    """A page that fails the test when it throws, logs an error, or requests anything from elsewhere."""
    context = opened.new_context(viewport={"width": 1180, "height": 900}, accept_downloads=True)
    tab, trouble = context.new_page(), []
    own = re.compile(r"(file:|data:|blob:|about:|http://127\.0\.0\.1:)")
    tab.on("pageerror", lambda error: trouble.append(str(error)))
    tab.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    tab.on("dialog", lambda dialog: trouble.append(f"dialog {dialog.message}"))
    tab.on("request", lambda request: None if own.match(request.url) else trouble.append(request.url))
    tab.trouble = trouble
    yield tab
    context.close()
    assert not trouble


@pytest.fixture(scope="module")
def models():
    """mini where it is built in, and two sources of letters."""
    names = [name for name in ("mini",) if name in model_files.builtin_names()] + ["exact:words", "exact:verses"]
    return {name: limpet.load(name, device="cpu") for name in names}


@pytest.fixture(scope="module")
def address(models):
    judge = limpet.load_judge(device="cpu") if has_builtin() else None
    with serving(application(in_this_process(Resources(models, judge)), Limits(calls=64))) as found:
        yield found


def follow(tab, link):
    """Open a link. It fills the form in and sends nothing until Run is pressed."""
    posted = []
    tab.on("request", lambda request: posted.append(request.url) if request.method == "POST" else None)
    tab.goto(link)
    tab.locator("#status", has_text="press Run").wait_for()
    assert not posted
    tab.click("#run")
    wait_done(tab)


def field(tab, number, name):
    """A field of the n-th sampler in the form."""
    return tab.locator(f".samplers fieldset:nth-child({number})").locator("label", has_text=name)


def text_of(tab, index):
    return "".join(tab.locator(f".trajectory{index} .text span").all_text_contents())


def wait_done(tab):
    tab.locator("#status", has_text="Done.").wait_for(timeout=1000 * GUARD)


def from_the_start(tab):
    """Go to the first call of a page, which opens at the output."""
    tab.locator("#where", has_text=re.compile("^output after ")).wait_for()
    tab.evaluate("limpet.go(0)")


def shown(text):
    """A text as the viewer writes it."""
    return text.replace("\n", "↵\n")


# The playground


def test_a_comparison_runs_is_scrubbed_and_comes_back_by_its_link(tab, address, models, tmp_path):
    """Run, see the frames arrive, scrub, read the scores, download both kinds of files, open the link."""
    name = next(iter(models))
    tab.goto(address)
    tab.fill("#nfe", "8")
    tab.evaluate("""() => {
      const where = document.getElementById("where");
      window.positions = [];
      new MutationObserver(() => window.positions.push(where.textContent)).observe(where, { childList: true });
    }""")
    tab.click("#run")
    wait_done(tab)
    shown_calls = [
        re.match(r"(call \d+|output)", text)[0]
        for text in tab.evaluate("window.positions")
        if "of 8" in text or "after 8" in text
    ]
    assert list(dict.fromkeys(shown_calls)) == [*(f"call {r}" for r in range(1, 9)), "output"]
    assert tab.locator("#where").text_content() == "output after 8 calls"
    native, crs, other = (text_of(tab, index) for index in range(3))
    third, name_of_third = limpet.recommended(8), "sharpness=0.25"
    prompt, length = examples(models[name])[0][1], page_length(models[name])
    for index, text, sampler in ((0, native, Native(nfe=8)), (1, crs, CRS(nfe=8)), (2, other, third)):
        assert text == shown(limpet.sample(models[name], sampler, 1, 8200, length, prompt).texts[0])
        scores = tab.locator(f".trajectory{index} .scores").text_content()
        expected = r"perplexity under \S.* \(\w{12}, float(32|64), (ids|distribution), \d+ tokens scored\)"
        assert re.search(expected, scores), scores
    assert len({native, crs, other}) == 3

    tab.locator("#scrub").fill("0")
    assert tab.locator("#where").text_content().startswith("call 1 of 8 · t 1.000")
    assert text_of(tab, 0) == text_of(tab, 1) == text_of(tab, 2) != native  # all start from the same noise

    with tab.expect_download() as download:
        tab.click(".trajectory2 button:text-is('text')")
    download.value.save_as(tmp_path / "text")
    assert shown((tmp_path / "text").read_text()) == other
    with tab.expect_download() as download:
        tab.click(".trajectory2 button:text-is('trajectory')")
    download.value.save_as(tmp_path / "a.limpet")
    kept = Trajectory.load(tmp_path / "a.limpet")
    own = record(models[name], third, length=length, prompt=prompt, name=name_of_third)
    assert (kept.header, kept.token_texts, kept.text) == (own.header, own.token_texts, own.text)
    for a, b in zip(kept.frames, own.frames, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))

    link = tab.url
    query = urllib.parse.parse_qs(urllib.parse.urlparse(link).query)
    assert query["model"] == [name]
    assert query["seed"] == ["8200"]
    chosen = json.loads(query["samplers"][0])
    assert chosen["native"] == {"nfe": 8, "sampler": "native"}
    assert limpet.samplers.from_dict(chosen[name_of_third]) == third
    tab.goto("about:blank")
    follow(tab, link)
    assert tuple(text_of(tab, index) for index in range(3)) == (native, crs, other)


def test_a_link_restores_every_choice(tab, address):
    tab.goto(address)
    tab.select_option("#model", "exact:words")
    tab.fill("#nfe", "7")
    tab.fill("#seed", "99")
    tab.fill("#prompt", "moon ")
    tab.click("#fixing summary")
    tab.click("#fix")
    tab.fill("#fixed input[type=number]", "51")
    tab.fill("#fixed input[type=text]", "tide ")
    field(tab, 1, "Preset").locator("select").select_option("horizon 8")
    tab.click("#add")
    tab.click(".samplers fieldset:nth-child(2) summary")
    field(tab, 2, "Budget").locator("input").fill("0.125")
    field(tab, 2, "Name").locator("input").fill("careful & <b>slow</b>")
    tab.click("#run")
    wait_done(tab)
    texts = [text_of(tab, index) for index in range(4)]
    assert all(text.startswith("moon ") and text[50:55] == "tide " for text in texts)
    assert tab.locator("#trajectories h2").all_text_contents() == [
        "horizon 8", "careful & <b>slow</b>", "sharpness=0.25", "native"
    ]  # fmt: skip
    link = tab.url
    tab.goto("about:blank")
    follow(tab, link)
    assert [text_of(tab, index) for index in range(4)] == texts
    assert field(tab, 2, "Budget").locator("input").input_value() == "0.125"
    assert tab.input_value("#fixed input[type=text]") == "tide "
    assert tab.url == link


def test_a_refusal_is_shown_as_text(tab, address):
    tab.goto(address)
    tab.select_option("#model", "exact:words")
    tab.fill("#prompt", HOSTILE)
    tab.click("#run")
    tab.locator("#problem", has_text="knows the letters a to z").wait_for()
    assert "alert" not in tab.evaluate("document.getElementById('problem').innerHTML.replace(/&lt;.*/, '')")
    assert not tab.locator("#problem *").count()
    tab.trouble[:] = [each for each in tab.trouble if "422" not in each]  # the browser logs the refusal itself


UNREADABLE = [
    {"a": values} for values in (3, None, {"nfe": 8}, {"sampler": "nothing"}, {"sampler": "constructor"},
                                 {"sampler": "crs", "horizn": 3}, {"sampler": "native", "budget": 0.5})
]  # fmt: skip


def test_a_link_that_cannot_be_read_leaves_a_working_page(tab, address):
    queries = [f"model=exact:words&samplers={urllib.parse.quote(json.dumps(values))}" for values in UNREADABLE]
    for query in ("samplers={", "samplers=[]&model=nothing", "model=exact:words&samplers={}", *queries):
        tab.goto(f"{address}/?{query}")
        tab.locator("#problem", has_text="This link cannot be read: ").wait_for()
        assert tab.locator(".samplers fieldset").count() == 3
    tab.goto(address)
    tab.select_option("#model", "exact:words")
    tab.click("#run")
    wait_done(tab)


def test_stop_keeps_the_frames(tab, tmp_path):
    """A run is stopped half way: its frames stay, can be kept and say that it was stopped; its place is free."""
    permits = threading.Semaphore(3)
    model = Counting(lambda: permits.acquire(timeout=GUARD))
    samplers = {"native": Native(nfe=16), "CRS": CRS(nfe=16)}  # which share their first calls
    app = application(in_this_process(Resources({"counting": model})), Limits(queue=0), samplers=samplers)
    with serving(app) as address:
        tab.goto(address)
        tab.click("#run")
        tab.locator("#where", has_text="call 3 of 16").wait_for()
        assert tab.locator("#run").text_content() == "Running …"
        assert tab.locator("#status").text_content() == "3 of 16 calls"
        tab.click("#stop")
        tab.locator("#status", has_text="Stopped.").wait_for()
        assert tab.locator("#run").text_content() == "Run"
        permits.release(100)
        wait_for(lambda: not app.state.queue.jobs, "the end of the work")
        tab.keyboard.press("Home")
        assert tab.locator("#where").text_content().startswith("call 1 of 16")
        with tab.expect_download() as download:
            tab.click(".trajectory1 button:text-is('text')")
        download.value.save_as(tmp_path / "text")
        with tab.expect_download() as download:
            tab.click(".trajectory1 button:text-is('trajectory')")
        download.value.save_as(tmp_path / "cut.limpet")
    path = Trajectory.load(tmp_path / "cut.limpet")
    assert (path.header.calls, path.header.sampler["nfe"], path.text) == (2, 16, None)
    expected = "".join(path.token_texts[int(token)] for token in path.frames[-1].model_input)
    assert (tmp_path / "text").read_text() == expected
    tab.goto(write_page(tmp_path, [path]))
    tab.locator("#where", has_text="stopped at call 3").wait_for()


MINE = """
from dataclasses import dataclass
from typing import Literal

from limpet import Native, param


@dataclass(frozen=True)
class Mine(Native):
    nth: int = param(2, "Which tokens are marked <b>&.", low=1, high=9)
    even: bool = param(True, "Nothing to do with it.")
    tone: Literal["soft", "loud"] | None = param("soft", "Nor this.")
    words: str = param("a b", "Nor these.")

    def step(self, ctx, state):
        state, info = super().step(ctx, state)
        return state, info._replace(masks={"nth <i>": (info.model_input % self.nth) == 0})
"""


def test_a_users_sampler_has_its_parameters_and_masks_on_the_page(tab, models, tmp_path):
    """Parameters with their help, the mask in the text and the legend, the sampler in the link."""
    (tmp_path / "mine.py").write_text(MINE)
    first = named_samplers([f"mine: {tmp_path}/mine.py:Mine nth=3", "native nfe=5"], 4)
    kind = type(first["mine"])
    model, available = models["exact:words"], {"native": samplers.find("native"), "Mine": kind}
    worker = in_this_process(Resources({"exact:words": model}))
    with serving(application(worker, samplers=first, available=available)) as address:
        tab.goto(address)
        box = tab.locator(".samplers fieldset:nth-child(1)")
        box.locator("summary").click()
        param = box.locator("label", has_text="Nth")
        assert param.get_attribute("data-tip") == "Which tokens are marked <b>&."
        assert param.locator("input").input_value() == "3"
        assert box.locator("label", has_text="Preset").locator("option").all_text_contents() == [
            "native", "top-p .9", "Mine", "custom"
        ]  # fmt: skip
        box.locator("label", has_text="Tone").locator("select").select_option("none")
        box.locator("label", has_text="Even").locator("select").select_option("false")
        box.locator("label", has_text="Words").locator("input").fill("")
        tab.click("#run")
        wait_done(tab)
        query = urllib.parse.parse_qs(urllib.parse.urlparse(tab.url).query)
        chosen = {"sampler": "Mine", "nfe": 4, "nth": 3, "tone": None, "even": False, "words": ""}
        assert json.loads(query["samplers"][0]) == {"mine": chosen, "native": {"sampler": "native", "nfe": 5}}
        prompt = examples(model)[0][1]
        assert text_of(tab, 0) == limpet.sample(model, Native(nfe=4), 1, 8200, prompt=prompt).texts[0]
        assert text_of(tab, 1) == limpet.sample(model, Native(nfe=5), 1, 8200, prompt=prompt).texts[0]
        path = record(model, kind(nfe=4, nth=3), prompt=prompt)
        tab.evaluate("limpet.go(2)")
        masked = path.header.mask(path.frames[2], "nth <i>")
        assert tab.locator(".trajectory0 .text span.other").count() == masked.sum() > 0
        assert tab.locator(".trajectory1 .text span.other").count() == 0
        assert tab.locator("#legend b").all_text_contents() == ["fixed", "nth <i>", "changed", *ALWAYS]
        assert f"{masked.sum()} nth <i>" in tab.locator(".trajectory0 .facts").text_content()
        link = tab.url
        tab.goto("about:blank")
        follow(tab, link)
        assert tab.url == link
        assert box.locator("label", has_text="Tone").locator("select").input_value() == ""
        tab.locator(".samplers fieldset:nth-child(2) summary").click()
        field(tab, 2, "Sampler").locator("select").select_option("Mine")
        assert field(tab, 2, "Nth").locator("input").input_value() == "2"
        tab.click("#add")
        assert tab.locator(".samplers fieldset").count() == 3


# The page


@pytest.fixture(scope="module")
def recorded(models):
    chosen = {"native": Native(nfe=12, final_step="argmax"), "CRS": CRS(nfe=12), "two": CRS(nfe=12, horizon=2)}
    return [record(models["exact:words"], sampler, seed=4, name=name) for name, sampler in chosen.items()]


@pytest.fixture
def file(recorded, tmp_path):
    return write_page(tmp_path, recorded)


def write_page(folder, trajectories):
    """The address of a page in a file."""
    path = folder / "page.html"
    path.write_text(page.self_contained(trajectories), encoding="utf-8")
    return path.as_uri()


def test_a_page_works_from_a_file_without_network(tab, file, recorded):
    """Keys, masks, texts and charts, against the trajectories themselves."""
    tab.context.set_offline(True)
    tab.goto(file)
    from_the_start(tab)
    tab.locator("h1").click()
    for r in range(13):
        assert tab.locator("#where").text_content().startswith("output" if r == 12 else f"call {r + 1} of 12")
        for index, path in enumerate(recorded):
            frame = path.frames[r]
            assert text_of(tab, index) == "".join(path.token_texts[int(token)] for token in frame.model_input)
            facts = tab.locator(f".trajectory{index} .facts").text_content()
            for name in ("fixed", "committed", "visible", "chosen"):
                mask = path.header.mask(frame, name)
                spans = tab.locator(f".trajectory{index} .text span").evaluate_all(
                    "(all, name) => all.map((span) => span.classList.contains(name))", name
                )
                assert spans == mask.tolist()
                assert (f"{mask.sum()} {name} " in facts) == (name in path.header.masks[1:])
        tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("#where").text_content().startswith("call 12")
    assert tab.locator("#announcer").text_content().startswith("call 12 of 12")
    assert "CRS: " in tab.locator("#announcer").text_content()
    tab.keyboard.press("Home")
    assert tab.locator("#where").text_content().startswith("call 1 ")
    tab.keyboard.press("End")
    assert tab.locator("#where").text_content().startswith("output")
    tab.select_option("#speed", "70")
    tab.locator("h1").click()
    tab.keyboard.press("Space")
    tab.locator("#where", has_text=re.compile("call ([3-9]|1\\d) of")).wait_for()
    tab.keyboard.press("Space")
    assert tab.locator("#play").get_attribute("aria-label") == "Play"
    ends = tab.locator("#timeline .axes").evaluate_all(
        "(all) => all.map((one) => [...one.querySelectorAll('span')].map((end) => end.textContent))"
    )
    most = max(frame.mean_deficit for path in recorded for frame in path.frames)
    assert ends == [[top, "0", "call 1", "12"] for top in (f"{recorded[0].header.length}", f"{most:.3f}")]


def test_a_frame_touches_only_what_differs(tab, file, recorded):
    """So that a long text can be scrubbed: the texts written are those of tokens that changed."""
    tab.goto(file)
    from_the_start(tab)
    for r in (1, 5, 12):
        written = tab.evaluate(
            """(r) => {
          limpet.go(r - 1);
          const texts = document.querySelector(".trajectory0 .text"), observer = new MutationObserver(() => {});
          observer.observe(texts, { characterData: true, subtree: true });
          limpet.go(r);
          return observer.takeRecords().length;
        }""",
            r,
        )
        before, after = (recorded[0].frames[i].model_input for i in (r - 1, r))
        assert written == (before != after).sum()


def test_a_revised_token_has_its_own_style_and_each_of_its_values_its_call(tab, models, tmp_path):
    path = record(models["exact:words"], Mend(nfe=12, warmup=0.1, spacing=0), seed=4)
    tab.goto(write_page(tmp_path, [path]))
    from_the_start(tab)
    assert tab.locator("#legend b").all_text_contents() == [*path.header.masks, "changed", *ALWAYS]
    shades = tab.locator("#legend i").evaluate_all("(all) => all.map((i) => getComputedStyle(i).backgroundColor)")
    assert len({shades[path.header.masks.index(name)] for name in ("visible", "chosen", "revised")}) == 3
    revised = np.array([path.header.mask(frame, "revised") for frame in path.frames[:12]])
    i = int(revised.sum(0).argmax())  # revised most often
    r = int(revised[:, i].argmax())
    tab.evaluate(f"limpet.go({r})")
    spans = tab.locator(".trajectory0 .text span")
    assert spans.evaluate_all("(all) => all.map((span) => span.classList.contains('revised'))") == revised[r].tolist()
    spans.nth(i).hover()
    assert f"revised in call {r + 1}" in tab.locator("#position .side p").text_content()
    shown = tab.locator("#position .history > li").all_text_contents()
    texts = [path.token_texts[int(frame.model_input[i])] for frame in path.frames]
    starts = [r for r, text in enumerate(texts) if r == 0 or text != texts[r - 1]]
    expected = []
    for start, end in zip(starts, [*starts[1:], len(texts)], strict=True):
        calls = f"{start + 1}" if end == start + 1 else f"{start + 1}–{end}"
        did = [name for name in ("chosen", "revised") if start and path.header.mask(path.frames[start - 1], name)[i]]
        expected.append(" ".join([calls, f'"{texts[start]}"', *did]))
    assert shown == expected
    assert sum("revised" in run for run in shown) == revised[:, i].sum() > 0


def test_a_position_shows_its_history_and_candidates(tab, file, recorded):
    tab.goto(file)
    from_the_start(tab)
    tab.evaluate("limpet.go(8)")
    word, about = tab.locator(".trajectory1 .text span").nth(7), tab.locator("#position")
    word.hover()
    one, two = word.bounding_box(), about.bounding_box()
    gap = max(two["y"] - one["y"] - one["height"], one["y"] - two["y"] - two["height"])
    assert 0 <= gap < 20  # it opens beside its word
    assert "Position 8" in about.text_content()
    frame, texts = recorded[1].frames[8], recorded[1].token_texts
    candidates = about.locator(".side.trajectory1 .candidates li .word").all_text_contents()
    assert candidates == [f'"{texts[int(token)]}"' for token in frame.top_tokens[7]]
    history = about.locator(".side.trajectory1 .history .word").all_text_contents()
    values = [texts[int(f.model_input[7])] for f in recorded[1].frames]
    runs = [text for r, text in enumerate(values) if r == 0 or text != values[r - 1]]
    assert history == [f'"{text}"' for text in runs]
    summary = about.locator(".side.trajectory1 p").text_content()
    names = [name for name in recorded[1].header.masks if recorded[1].header.mask(frame, name)[7]]
    described = [re.split(" since | in ", part)[0] for part in summary.partition('" ')[2].split(", ")]
    assert described == (names or ["free"])
    tab.locator("#hint").or_(tab.locator("h1")).first.hover()
    tab.locator(".trajectory0 .text").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowDown")
    assert re.search(r"Position \d+, pinned", about.text_content())
    tab.keyboard.press("Escape")
    assert about.is_hidden()


def test_colours_and_most_probable_tokens(tab, file, recorded):
    tab.goto(file)
    from_the_start(tab)
    tab.evaluate("limpet.go(5)")
    tab.select_option("#show", "top")
    top = "".join(recorded[0].token_texts[int(token)] for token in recorded[0].frames[5].top_tokens[:, 0])
    assert text_of(tab, 0) == top
    tab.select_option("#show", "input")
    levels = tab.locator(".trajectory0 .text span").evaluate_all(
        "(all) => all.map((s) => Number(/k(\\d)/.exec(s.className)[1]))"
    )
    assert levels == np.minimum(7, np.floor(8 * (1 - recorded[0].frames[5].deficit / 65535))).tolist()
    tab.select_option("#colour", "age")
    fresh = tab.locator(".trajectory0 .text span.k0").count()
    assert fresh == tab.locator(".trajectory0 .text span.changed").count() > 0


def test_hostile_texts_stay_texts(tab, recorded, tmp_path):
    one, masks = recorded[1], ["fixed", HOSTILE, "visible", "chosen"]
    header = replace(one.header, name=HOSTILE, model=HOSTILE, masks=masks)
    texts = one.token_texts | {int(one.frames[0].tokens[0]): HOSTILE}
    hostile = Trajectory(header, one.frames, texts, HOSTILE, {"judge": HOSTILE, "perplexity": 2.0})
    tab.goto(write_page(tmp_path, [hostile]))
    from_the_start(tab)
    assert HOSTILE in text_of(tab, 0)
    assert tab.locator("h2").text_content() == HOSTILE
    assert tab.locator("img").count() == 0
    tab.locator(".text span").first.hover()
    assert tab.locator("#position img").count() == 0


@pytest.mark.skipif("mini" not in model_files.builtin_names(), reason="mini is not built in here")
def test_the_readmes_pictures(opened, models, tmp_path):
    """The command that makes them, with fewer calls in the animation."""
    sudoku = pictures.recorded_sudoku(limpet.load("sudoku"), calls=6)
    animated = {"samplers": pictures.recorded_text(models["mini"], calls=6), "sudoku": sudoku}
    files = {file.stem: file for file in pictures.take(tmp_path, opened, animated)}
    assert set(files) == {"playground", "playground-dark", "playground-phone", "playground-phone-light", "report",
                         "report-phone-dark", "samplers", "sudoku"}  # fmt: skip
    assert files["playground"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {file.name for file in files.values()} <= {file.name for file in IMAGES.iterdir()}
    from PIL import Image

    for name in ("samplers", "sudoku"):
        with Image.open(files[name]) as animation:
            assert animation.n_frames == 7  # six calls, and the output


@pytest.mark.parametrize(("name", "clues"), [("sudoku", 32), ("sudoku-6x6", 14)])
def test_a_sudoku_is_a_grid_of_its_solution(tab, tmp_path, name, clues):
    """Clues, clashes and masks of every cell, against the trajectories; the marks and the puzzle are not drawn."""
    model = limpet.load(name)
    size = model.prompt_layout.board
    (puzzle,), first = puzzles(1, clues, seed=0, size=size), size.cells + 2
    trajectories = [record(model, sampler, seed=8200, prompt=puzzle) for sampler in (Native(nfe=8), Mend(nfe=8))]
    tab.goto(write_page(tmp_path, trajectories))
    from_the_start(tab)
    for r in (0, 5, 8):
        tab.evaluate(f"limpet.go({r})")
        for index, path in enumerate(trajectories):
            cells = tab.locator(f".trajectory{index} .text span").evaluate_all(
                "(all) => all.map((cell) => [cell.textContent, cell.offsetLeft, cell.offsetTop, [...cell.classList]])"
            )
            board, frame = cells[first:], path.frames[r]
            texts = [path.token_texts[int(token)] for token in frame.model_input]
            assert all(left == top == 0 for _, left, top, _ in cells[:first])
            assert [text for text, *_ in board] == texts[first:]
            assert len({left for _, left, _, _ in board}) == len({top for _, _, top, _ in board}) == size.side
            assert ["clue" in classes for *_, classes in board] == [clue != "." for clue in puzzle]
            assert ["clash" in classes for *_, classes in board] == clashes(texts[1 : first - 1], texts[first:])
            committed = path.header.mask(frame, "committed")[first:]
            assert ["committed" in classes for *_, classes in board] == committed.tolist()
    place = first + puzzle.index(".")
    tab.locator(".trajectory1 .text span").nth(place).click()
    row, column = divmod(place - first, size.side)
    assert tab.locator("#position h2").text_content().startswith(f"Row {row + 1}, column {column + 1}, pinned")
    assert tab.locator(".legend").text_content().count("clash") == 1


# For people


def test_the_recorded_run_plays_and_nothing_is_computed(tab, address):
    posted = []
    tab.on("request", lambda request: posted.append(request.url) if request.method == "POST" else None)
    tab.goto(address)
    tab.locator("#trajectories .trajectory2 .text span").first.wait_for()
    assert tab.locator("#intro").is_visible()
    tab.locator("#where", has_text=re.compile("call ([5-9]|1[0-6]) of 16")).wait_for()
    assert not posted
    tab.emulate_media(reduced_motion="reduce")
    tab.goto(address)
    tab.locator("#where", has_text="output after 16 calls").wait_for()


@pytest.mark.skipif("mini" not in model_files.builtin_names(), reason="mini is not built in here")
def test_the_recorded_run_is_of_the_model_that_is_built_in(models):
    trajectories = pictures.recorded(models["mini"])
    assert list(trajectories) == list(playground.RECORDED)
    for name, path in trajectories.items():
        kept = Trajectory.from_bytes((Path(playground.__file__).parent / "assets" / f"{name}.limpet").read_bytes())
        assert (kept.header, kept.text) == (path.header, path.text)


@pytest.mark.skipif("mini" not in model_files.builtin_names(), reason="mini is not built in here")
def test_run_gives_what_was_recorded(tab, address):
    """The form and the recorded run hold the same samplers, calls, seed, length and prompt."""
    read = """() => limpet.state.trajectories.map((one) => [one.header, one.text, one.scores.counted])"""
    tab.emulate_media(reduced_motion="reduce")
    tab.goto(address)
    tab.locator("#where", has_text="output after 16 calls").wait_for()
    assert tab.locator("#recorded").is_visible()
    assert tab.locator("#unrecorded").is_hidden()
    recorded = tab.evaluate(read)
    assert [header["name"] for header, *_ in recorded] == ["native", "CRS", "sharpness=0.25"]
    tab.click("#run")
    wait_done(tab)
    assert tab.evaluate(read) == recorded


def test_what_was_not_recorded_is_not_shown(tab, models, address):
    """Other samplers or models than those of the recorded run: the page asks for Run."""
    chosen = urllib.parse.quote(json.dumps({"a": {"sampler": "native"}}))
    only = in_this_process(Resources({"exact:words": models["exact:words"]}))
    with serving(application(only)) as other:
        for link in (other, f"{address}/?model=exact:words&samplers={chosen}"):
            tab.goto(link)
            tab.locator("#unrecorded", has_text="Press Run.").wait_for()
            assert tab.locator("#viewer").is_hidden()
            assert tab.locator("#recorded").is_hidden()


def test_the_first_text_comes_with_the_first_network_call(tab):
    """Before any sampler makes a second call. The texts of a recorded run need no call at all."""
    permits = threading.Semaphore(1)
    model = Counting(lambda: permits.acquire(timeout=GUARD))
    samplers = {"native": Native(nfe=16), "CRS": CRS(nfe=16)}
    with serving(application(in_this_process(Resources({"counting": model})), samplers=samplers)) as address:
        tab.goto(address)
        tab.click("#run")
        tab.locator("#status", has_text="1 of 16 calls").wait_for()
        assert text_of(tab, 0) == text_of(tab, 1) != ""
        tab.click("#stop")
        permits.release(100)


@pytest.mark.long
@pytest.mark.skipif("mini" not in model_files.builtin_names(), reason="mini is not built in here")
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_the_first_text_is_there_within_a_second(tab, address, width, scheme):
    """After the page was asked for, and after Run. It measures time, so it is no test of the default run."""
    on_screen(tab, width, scheme)
    seconds = []
    for _ in range(3):
        tab.goto(address, wait_until="commit")
        tab.locator(".trajectory0 .text span").first.wait_for()
        opened = tab.evaluate("performance.getEntriesByName('opened')[0].startTime / 1000")
        tab.click("#run")
        wait_for(lambda: tab.evaluate("performance.getEntriesByName('first frame').length"), "the first frame")
        run, frame = (tab.evaluate(f"performance.getEntriesByName('{name}')[0].startTime") for name in MARKS)
        seconds.append((opened, (frame - run) / 1000))
        wait_done(tab)
    assert min(opened for opened, _ in seconds) < 1
    assert min(ran for _, ran in seconds) < 1


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_the_legend_is_above_the_fold(tab, address, width, scheme):
    """And explains each of its words in three at most; the first words of a text are above the fold, too."""
    on_screen(tab, width, scheme)
    tab.goto(address)
    tab.locator("#trajectories .trajectory2 .text span").first.wait_for()
    fold = tab.evaluate("innerHeight - (innerWidth < 600 ? document.getElementById('acts').offsetHeight : 0)")
    for part in ("#legend", ".trajectory0 .facts", ".trajectory0 .text span >> nth=20"):
        box = tab.locator(part).bounding_box()
        assert box["y"] + box["height"] <= fold, part
    about = {
        item.split()[0]: item.split()[1:]
        for item in tab.locator("#legend li").all_text_contents()
        if "unsure" not in item
    }
    assert set(about) == {"fixed", "committed", "visible", "chosen", "revised", "changed", "t", "deficit"}
    assert all(1 <= len(words) <= 3 for words in about.values())


def test_a_model_has_example_prompts_and_its_outputs_are_drawn(tab):
    """Puzzles for sudoku, drawn as boards; none for molecules, whose drawing stands below the text."""
    pytest.importorskip("rdkit", reason="RDKit draws molecules: limpet[molecules]")
    worker = in_this_process(Resources({name: limpet.load(name, device="cpu") for name in ("sudoku", "molecules")}))
    with serving(application(worker, samplers={"native": Native(nfe=16), "Mend": Mend(nfe=16)})) as address:
        tab.goto(address)
        for clues in (40, 32):
            tab.locator("#examples button", has_text=f"{clues} clues").click()
            assert tab.input_value("#prompt") == puzzles(1, clues)[0]
        tab.locator("#examples button").first.click()
        tab.click("#run")
        wait_done(tab)
        assert tab.locator(".text.board").count() == 2
        assert tab.locator(".trajectory1 .text .clue").count() == 40
        assert "solved" in tab.locator(".trajectory1 .scores").text_content()
        tab.select_option("#model", "molecules")
        assert tab.locator("#examples button").count() == 0
        assert tab.input_value("#prompt") == ""
        tab.click("#run")
        wait_done(tab)
        drawn = tab.locator(".trajectory1 img.drawing")
        assert drawn.evaluate("(image) => image.complete && image.naturalWidth") > 0
        assert drawn.get_attribute("alt") == f"Drawing of {text_of(tab, 1).strip()}"
        tab.evaluate("limpet.go(3)")
        assert not drawn.is_visible()


def test_example_prompts_are_filled_in(tab, address):
    tab.goto(address)
    tab.select_option("#model", "exact:words")
    assert tab.input_value("#prompt") == "moon tide "
    assert tab.locator("#examples button").all_text_contents() == ["moon tide "]
    tab.fill("#prompt", "sand ")
    tab.select_option("#model", "exact:verses")
    assert tab.input_value("#prompt") == "sand "  # what was typed stays


def test_the_dial_decides_the_parameters_below_it(tab, address):
    """They are folded. The dial is that of `limpet.recommended`, whatever the number of calls."""
    tab.goto(address)
    tab.select_option("#model", "exact:words")
    box = tab.locator(".samplers fieldset:nth-child(3)")
    assert box.locator("legend").text_content() == "3: sharpness=0.25"
    assert not box.locator(".params").is_visible()
    for calls, stop in ((16, 20), (7, 8), (7, 0)):
        tab.fill("#nfe", str(calls))
        box.locator(".dial input").fill(str(stop))
        assert box.locator("output").text_content() == f"{stop / 20:g}"
        tab.click("#run")
        wait_done(tab)
        header = tab.evaluate("limpet.state.trajectories[2].header")
        assert header["name"] == f"sharpness={stop / 20:g}"
        assert limpet.samplers.from_dict(header["sampler"]) == limpet.recommended(calls, stop / 20)
    box.locator("summary").click()
    box.locator(".params").locator("label", has_text="Budget").locator("input").fill("5")
    box.locator(".params").locator("label", has_text="Budget").locator("input").press("Tab")
    assert box.locator("label", has_text="Preset").locator("select").input_value() == "custom"
    assert box.locator(".dial").is_hidden()
    box.locator("label", has_text="Preset").locator("select").select_option("recommended")
    assert box.locator(".dial").is_visible()
    assert box.locator(".params").locator("label", has_text="Budget").locator("input").input_value() != "5"


@pytest.mark.parametrize("width", [1280, 390])
def test_tooltips_do_not_collide(tab, address, width):
    """Each is whole on the screen, beside its field, and hides neither the field nor a history that is open.

    On a phone the history is a sheet: what stands behind it cannot be pointed at."""
    on_screen(tab, width, "light")
    tab.goto(address)
    tab.locator("#trajectories .trajectory2 .text span").first.wait_for()
    if width == 1280:
        tab.locator("#samplers summary").last.click()
    tab.locator(".trajectory0 .text span").nth(20).click()
    tab.locator("#position.pinned").wait_for()
    collisions = """(described) => {
      described.scrollIntoView({ block: innerWidth < 600 ? "start" : "center" });
      described.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
      const anchor = described.querySelector("input, select") ?? described, tip = document.getElementById("tip");
      const of = (e) => e.getClientRects()[0] ?? e.getBoundingClientRect(), one = tip.getBoundingClientRect();
      const hits = (two) => one.left < two.right && two.left < one.right
        && one.top < two.bottom && two.top < one.bottom;
      const opened = document.getElementById("position"), sheet = opened.getBoundingClientRect();
      if (innerWidth < 600 && of(anchor).bottom > sheet.top) return null;
      const found = [anchor, opened].filter((e) => hits(of(e))).map((e) => e.id || e.tagName);
      if (one.left < 0 || one.right > innerWidth || one.top < 0 || one.bottom > innerHeight) found.push("edge");
      return tip.hidden ? ["hidden"] : found;
    }"""
    described = [one for one in tab.locator("[data-tip]").all() if one.is_visible()]
    found = {one.get_attribute("data-tip"): one.evaluate(collisions) for one in described}
    assert sum(hits is not None for hits in found.values()) >= 20
    assert {tip: hits for tip, hits in found.items() if hits} == {}


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_the_playground_is_accessible(tab, address, width, scheme):
    """axe-core before and after a run and with a position open; no sideways scroll."""
    on_screen(tab, width, scheme)
    tab.goto(address)
    tab.locator("#where", has_text="output after 16 calls").wait_for()
    assert serious(tab) == []
    tab.evaluate("document.getElementById('setup').open = true")
    tab.select_option("#model", "exact:words")
    tab.locator("#samplers summary").first.click()
    tab.click("#run")
    wait_done(tab)
    tab.evaluate("limpet.go(8)")
    tab.locator(".trajectory0 .text span").nth(20).click()
    assert serious(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_a_page_is_accessible(tab, file, width, scheme):
    on_screen(tab, width, scheme)
    tab.goto(file)
    from_the_start(tab)
    tab.evaluate("limpet.go(8)")
    tab.locator(".trajectory0 .text span").nth(20).click()
    assert serious(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_on_a_phone_run_is_in_reach_and_tabs_switch_trajectories(tab, address):
    on_screen(tab, 390, "light")
    tab.goto(address)
    tab.locator("#trajectories .trajectory2").wait_for()
    for scrolled in (0, 10_000):
        tab.evaluate(f"scrollTo(0, {scrolled})")
        run = tab.locator("#run").bounding_box()
        assert 0 <= run["y"] <= 844 - run["height"]
    tab.evaluate("scrollTo(0, 0)")

    def shown_now():
        box = tab.locator("#trajectories").bounding_box()
        where = [tab.locator(f"#trajectories .trajectory{i}").bounding_box()["x"] - box["x"] for i in range(3)]
        return [i for i, x in enumerate(where) if abs(x) < 2]

    assert shown_now() == [0]
    tab.locator("#tabs button", has_text="sharpness").click()
    tab.locator("#tabs button[aria-current=true]", has_text="sharpness").wait_for()
    assert shown_now() == [2]
    tab.evaluate("document.getElementById('trajectories').scrollBy({left: -390})")  # as a swipe does
    tab.locator("#tabs button[aria-current=true]", has_text="CRS").wait_for()
    tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    small = tab.evaluate("""[...document.querySelectorAll("button, select, input, summary")]
      .filter((e) => e.checkVisibility() && !e.closest("#intro"))  // but words in a sentence
      .map((e) => [e.id || e.textContent || e.parentNode.textContent, e.getBoundingClientRect()])
      .filter(([, box]) => box.width < 44 || box.height < 44).map(([name, box]) => [name, box.width, box.height])""")
    assert small == []
    clipped = tab.evaluate("""[...document.querySelectorAll("button, h2, p, .row > *, summary, li")]
      .filter((e) => !e.matches(".visually-hidden") && e.checkVisibility() && e.scrollWidth > e.clientWidth + 1)
      .filter((e) => getComputedStyle(e).display !== "inline").map((e) => e.textContent)""")
    assert clipped == []
    tab.locator(".trajectory1 .text span").nth(10).click()
    sheet = tab.locator("#position").bounding_box()
    assert (sheet["x"], sheet["width"], round(sheet["y"] + sheet["height"])) == (0, 390, 844)


def test_each_term_and_parameter_has_its_help_on_hover_and_focus(tab, address):
    tab.goto(address)
    tip = tab.locator("#tip")
    assert tip.is_hidden()
    for family, kind in (("native", Native), ("crs", CRS), ("mend", Mend)):
        tab.locator(f"#intro .is-{family}").hover()
        assert tip.text_content() == samplers.describe(kind)
        tab.locator(f"#intro .is-{family}").focus()
        assert tip.is_visible()
    tab.locator("#nfe").focus()
    assert tip.text_content() == samplers.params(Native)["nfe"].help
    assert tab.locator("#nfe").get_attribute("aria-describedby") == "tip"
    tab.keyboard.press("Escape")
    assert tip.is_hidden()
    box = tab.locator(".samplers fieldset").first
    box.locator("summary").click()
    fields = box.locator(".params").locator("label")
    for name, kind in samplers.available().items():  # every parameter of every sampler
        box.locator("label", has_text="Sampler").locator("select").select_option(name)
        tips = fields.evaluate_all("(all) => all.map((one) => one.dataset.tip)")
        assert tips == [param.help for param in samplers.params(kind).values()]
        assert all(tips)
    fields.last.locator("input, select").focus()
    assert tip.text_content() == tips[-1]
    tab.click("#add")
    inputs = tab.locator("#samplers").locator("label", has_text="Name").locator("input")
    names = inputs.evaluate_all("(all) => all.map((one) => one.value)")
    assert len(set(names)) == len(names) == 4


def test_a_word_is_fixed_by_clicking_it(tab, address, models):
    tab.goto(address)
    tab.select_option("#model", "exact:words")
    tab.fill("#prompt", "")
    tab.fill("#nfe", "4")
    tab.click("#run")
    wait_done(tab)
    word = text_of(tab, 0)[8]
    tab.locator(".trajectory0 .text span").nth(8).click()
    tab.locator("#position button", has_text="Fix").click()
    assert tab.locator("#position").is_hidden()
    assert tab.input_value("#fixed input[type=number]") == "9"
    assert tab.input_value("#fixed input[type=text]") == word
    tab.fill("#seed", "77")
    tab.click("#run")
    wait_done(tab)
    assert all(text_of(tab, index)[8] == word for index in (0, 1))
    assert tab.locator(".trajectory0 .text span.fixed").count() == 1


def test_a_server_that_stopped_is_named(tab, models):
    with serving(application(in_this_process(Resources({"exact:words": models["exact:words"]})))) as address:
        tab.goto(address)
    tab.click("#run")
    where = address.removeprefix("http://")
    tab.locator("#problem", has_text=f"The server at {where} does not answer.").wait_for()
    assert tab.locator("#run").text_content() == "Run"
    tab.trouble[:] = [each for each in tab.trouble if "ERR_CONNECTION_REFUSED" not in each]


def test_a_link_made_with_other_weights_says_so(tab, address):
    chosen = urllib.parse.quote(json.dumps({"a": {"sampler": "native"}}))
    tab.goto(f"{address}/?model=exact:words&digest=0123456789ab&seed=1&samplers={chosen}")
    tab.locator("#notice", has_text="made with other weights of exact:words (0123456789ab, here ").wait_for()


def test_a_sampler_has_the_colour_of_its_family(tab, models, tmp_path):
    chosen = {"native": Native(nfe=4), "sharp": Native(nfe=4, top_p=0.9), "crs": CRS(nfe=4), "mend": Mend(nfe=4),
            "again": Mend(nfe=4, revise=0), "psi": samplers.Psi(nfe=4)}  # fmt: skip
    trajectories = [record(models["exact:words"], sampler, name=name) for name, sampler in chosen.items()]
    families = ["native", "top-p", "crs", "mend", "mend", "rival0"]

    def own(group):
        tab.goto(write_page(tmp_path, group))
        from_the_start(tab)
        return tab.locator(".trajectory").evaluate_all(
            "(all) => all.map((one) => getComputedStyle(one).getPropertyValue('--own').trim())"
        )

    tab.emulate_media(color_scheme="light")
    for group, expected in ((trajectories, families), (trajectories[2:3], ["crs"]), (trajectories[5:], ["rival0"])):
        assert own(group) == [colours()[family] for family in expected]
