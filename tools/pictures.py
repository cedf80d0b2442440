"""The run that the playground opens with, and the pictures of the README and the docs, taken by a browser.

    $ python tools/pictures.py docs/images
    $ python tools/pictures.py docs/images --stills    # without the animations

It needs a Chromium on this machine (LIMPET_CHROMIUM names one that is not on the path), playwright and pillow."""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limpet.errors import LimpetError, import_extra
from limpet.evaluation import load_judge
from limpet.evaluation.checkers.sudoku import puzzles
from limpet.generation import SEED as DEFAULT_SEED
from limpet.models import Denoiser
from limpet.models.loading import load
from limpet.recording import page
from limpet.recording.trajectory import Trajectory, record
from limpet.samplers import Mend, Native, Sampler
from limpet.server import playground as playground_page
from limpet.server.connections import LOOPBACK, Server
from limpet.server.handlers import Request, Resources, examples, page_length
from limpet.server.handlers import trajectories as run
from limpet.server.http import CALLS, application, first_samplers, listen
from limpet.server.workers import in_this_process

if TYPE_CHECKING:
    from starlette.applications import Starlette

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SEED, TEXT_CALLS, LENGTH = 8202, 24, 96  # of the animation of a text
CAPTIONS = {  # of the two samplers in the animation
    "native": "every token may change until the end", "Mend": "confident tokens are kept, and may be revised",
}  # fmt: skip
SUDOKU_CALLS, CLUES = 16, 32  # of the animation of a sudoku: the first puzzle of seed 0, sampled with the default seed
MOST_SUDOKU = 600_000  # bytes
SHOWN = 10  # the call that the screenshots show: some tokens are committed, and the rest still change
COLOURS, FEW = 96, 24  # of a still picture, and of a moving one
MOST = 1_000_000  # bytes of a picture
DESK, PHONE = {"width": 1280, "height": 1000}, {"width": 390, "height": 844}
ASSETS = Path(playground_page.__file__).parent / "assets"
REPORT = Path(__file__).parents[1] / "docs/reports/mini/frontier-mini-gpu/index.html"


def chromium() -> str | None:
    """The browser to drive, if there is one; the headless shell takes three fifths of the processor time."""
    named = os.environ.get("LIMPET_CHROMIUM")
    names = [named] if named else ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome"]
    return next((path for path in map(shutil.which, names) if path), None)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium, driven by playwright."""
    path = chromium()
    if path is None:
        raise LimpetError("there is no Chromium here: install one, or name it in LIMPET_CHROMIUM")
    with import_extra("playwright.sync_api", "dev").sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """The application on a thread of its own, at a free port; gives its address."""
    listener = listen(LOOPBACK[0], 0)
    server = Server(app)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK[0]}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def recorded(model: Denoiser, calls: int = CALLS) -> dict[str, Trajectory]:
    """The run that the playground opens with: what its form says at first, one sample of each sampler, with scores."""
    samplers, prompt = first_samplers(calls), examples(model)[0][1]
    described = {name: sampler.to_dict() for name, sampler in samplers.items()}
    resources = Resources({model.name: model}, load_judge(device="cpu"), any_text=False)
    request = Request(model.name, samplers, described, DEFAULT_SEED, 1, page_length(model), prompt, {}, score=True)
    return dict(zip(playground_page.RECORDED, run(resources, request, lambda *_: None), strict=True))


def recorded_text(model: Denoiser, calls: int = TEXT_CALLS) -> list[Trajectory]:
    """One text under native sampling and under Mend, on the same randomness."""
    samplers: dict[str, Sampler] = {"native": Native(nfe=calls), "Mend": Mend(nfe=calls)}
    return [record(model, one, SEED, length=LENGTH, name=name) for name, one in samplers.items()]


def recorded_sudoku(model: Denoiser, calls: int = SUDOKU_CALLS) -> list[Trajectory]:
    """One puzzle under native sampling and under Mend, on the same randomness. The seeds were not chosen by results."""
    puzzle = puzzles(1, CLUES, seed=0)[0]
    samplers: dict[str, Sampler] = {"native": Native(nfe=calls), "Mend": Mend(nfe=calls)}
    return [record(model, one, DEFAULT_SEED, prompt=puzzle, name=name) for name, one in samplers.items()]


def playground(opened: Any, address: str, file: Path, viewport: dict[str, int], scheme: str) -> None:
    """The playground as it opens, at a call in the middle, on a desk with the history of a committed token."""
    with tab(opened, viewport, scheme) as shown:
        shown.goto(address)
        shown.locator("#play.playing").wait_for()
        shown.click("#play")
        shown.evaluate(f"limpet.go({SHOWN})")
        if viewport is DESK:
            shown.locator(".trajectory1 .text span.visible").nth(1).hover()
        still(shown.screenshot(), file)


def report(opened: Any, file: Path, viewport: dict[str, int], scheme: str) -> None:
    with tab(opened, viewport, scheme) as shown:
        shown.goto(REPORT.as_uri())
        still(shown.screenshot(), file)


@contextmanager
def tab(opened: Any, viewport: dict[str, int], scheme: str) -> Iterator[Any]:
    context = opened.new_context(viewport=viewport, color_scheme=scheme)
    yield context.new_page()
    context.close()


def still(shot: bytes, file: Path) -> None:
    """A screenshot in few colours, which takes a third of the bytes."""
    image: Any = import_extra("PIL.Image", "figures")
    image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS, dither=image.Dither.NONE).save(file, optimize=True)


def animation(opened: Any, trajectories: list[Trajectory], file: Path, colours: int = FEW) -> None:
    """Two trajectories as a GIF of texts or boards, each with a caption."""
    image: Any = import_extra("PIL.Image", "figures")
    calls, shots = trajectories[0].header.calls, []
    with tab(opened, {"width": 980, "height": 700}, "light") as shown:
        shown.set_content(page.self_contained(trajectories))
        shown.locator("#where", has_text="output after").wait_for()
        shown.evaluate("document.querySelectorAll('.downloads').forEach((part) => { part.hidden = true; })")
        shown.select_option("#colour", "none")  # the masks are enough
        shown.evaluate("limpet.fixHeight()")
        for r in range(calls + 1):
            shown.evaluate(f"limpet.go({r})")
            when = f"after {calls} calls" if r == calls else f"call {r + 1} of {calls}"
            captions = [f"{when}: {CAPTIONS[one.header.name]}" for one in trajectories]
            if trajectories[0].header.layout == "sudoku":
                clashing = shown.locator(".text").evaluate_all(
                    "(all) => all.map((text) => text.querySelectorAll('.clash').length)"
                )
                captions = [
                    f"{when}: {'no clash' if count == 0 else f'{count} of 81 cells clash'}" for count in clashing
                ]
            shown.locator(".facts").evaluate_all(
                "(all, captions) => all.forEach((p, i) => { p.textContent = captions[i]; })", captions
            )
            shots.append(image.open(io.BytesIO(shown.locator("#trajectories").screenshot())).convert("RGB"))
    palette = shots[2 * calls // 3].quantize(colours)  # one for all frames: what does not change costs nothing
    frames = [shot.quantize(palette=palette, dither=image.Dither.NONE) for shot in shots]
    times = [240] * calls + [6000]  # milliseconds
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)


def take(folder: Path, opened: Any, animated: Mapping[str, list[Trajectory]]) -> list[Path]:
    """Every picture, each below its limit. animated: the trajectories of each animation, by name."""
    if not folder.is_dir():
        raise LimpetError(f"{folder} is no folder: make it, or name another")
    app = application(in_this_process(Resources({"mini": load("mini", device="cpu")})))
    with serving(app) as address:
        for name, viewport, scheme in (
            ("playground", DESK, "light"),
            ("playground-dark", DESK, "dark"),
            ("playground-phone", PHONE, "dark"),
            ("playground-phone-light", PHONE, "light"),
        ):
            playground(opened, address, folder / f"{name}.png", viewport, scheme)
    report(opened, folder / "report.png", DESK, "light")
    report(opened, folder / "report-phone-dark.png", PHONE, "dark")
    for name, trajectories in animated.items():
        animation(opened, trajectories, folder / f"{name}.gif", COLOURS if name == "sudoku" else FEW)
    animations = [folder / f"{name}.gif" for name in animated]
    files = sorted([*folder.glob("playground*.png"), *folder.glob("report*.png"), *animations])
    for file in files:
        most = MOST_SUDOKU if file.stem == "sudoku" else MOST
        if file.stat().st_size > most:
            raise LimpetError(f"{file} has {file.stat().st_size} bytes; a README's picture should stay below {most}")
    return files


if __name__ == "__main__":
    mini = load("mini", device="cpu")
    words = [word for word in sys.argv[1:] if word != "--stills"]
    recordings: dict[str, list[Trajectory]] = {}
    if "--stills" not in sys.argv:
        recordings = {"samplers": recorded_text(mini), "sudoku": recorded_sudoku(load("sudoku", device="cpu"))}
    for name, trajectory in recorded(mini).items():
        trajectory.save(ASSETS / f"{name}.limpet")
    with browser() as chrome:
        take(Path(*words or ["docs/images"]), chrome, recordings)
