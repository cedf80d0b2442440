"""The pictures of the README, taken from the playground itself by a browser.

    $ python tools/pictures.py docs/images

It needs a Chromium on this machine (LIMPET_CHROMIUM names one that is not on the path), playwright and pillow."""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limpet.denoisers import Denoiser
from limpet.denoisers.catalog import load
from limpet.errors import LimpetError, extra
from limpet.judges import load_judge
from limpet.samplers import CRS, Mend, Native, Sampler
from limpet.view import page
from limpet.view.answers import Stock
from limpet.view.hands import here
from limpet.view.server import application, listen
from limpet.view.trajectory import Trajectory, record
from limpet.view.wire import LOOPBACK, Server

if TYPE_CHECKING:
    from starlette.applications import Starlette

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SEED, CALLS, WORDS = 8202, 24, 96  # of the recorded run
SHOWN = 0.66  # how far the screenshot's run has come
COLOURS = 64
MOST = 1_000_000  # bytes of a picture


def chromium() -> str | None:
    """The browser to drive, if there is one."""
    named = os.environ.get("LIMPET_CHROMIUM")
    names = [named] if named else ["chromium", "chromium-browser", "google-chrome", "chrome"]
    return next((path for path in map(shutil.which, names) if path), None)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium, driven by playwright."""
    path = chromium()
    if path is None:
        raise LimpetError("there is no Chromium here: install one, or name it in LIMPET_CHROMIUM")
    with extra("playwright.sync_api", "dev").sync_playwright() as driver:
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


def recorded(model: Denoiser) -> dict[str, Trajectory]:
    """The run that the playground opens with: one sample under each of its arms, on the same randomness."""
    arms: dict[str, Sampler] = {"native": Native(nfe=CALLS), "CRS": CRS(nfe=CALLS), "Mend": Mend(nfe=CALLS)}
    return {name.lower(): record(model, one, SEED, length=WORDS, arm=name) for name, one in arms.items()}


def screenshot(tab: Any, address: str, file: Path, calls: int) -> None:
    """The playground after a comparison, at a call where labels hold and the rest still moves."""
    tab.goto(address)
    tab.fill("#nfe", str(calls))
    tab.click("#run")
    tab.locator("#status", has_text="Done.").wait_for(timeout=300_000)
    tab.evaluate(f"limpet.go({round(SHOWN * calls)})")
    held = tab.locator(".arm1 .text span.visible")
    held.nth(held.count() // 3).hover()
    tab.screenshot(path=file, full_page=True)


def animation(tab: Any, file: Path, calls: int) -> None:
    """One sample under native and CRS, on the same randomness, as a GIF: in a grid, where what holds stays in place
    (and a frame costs only what changes), and at the end as a text."""
    image: Any = extra("PIL.Image", "figures")
    model = load("mini", device="cpu")
    arms: dict[str, Sampler] = {"native": Native(nfe=calls), "CRS": CRS(nfe=calls)}
    paths = [record(model, sampler, SEED, arm=name) for name, sampler in arms.items()]
    tab.set_content(page.self_contained(paths))
    tab.locator(".arm1 .text span.k0").first.wait_for()
    tab.select_option("#layout", "grid")
    beyond = f".downloads, .text span:nth-child(n + {WORDS + 1})"
    tab.evaluate(f"document.querySelectorAll('{beyond}').forEach((part) => {{ part.hidden = true; }})")
    tab.evaluate("limpet.fixHeight()")
    shots = []
    for r in range(calls + 2):
        if r > calls:
            tab.select_option("#layout", "prose")
        tab.evaluate(f"limpet.go({min(r, calls)})")
        shots.append(image.open(io.BytesIO(tab.locator("#arms").screenshot())).convert("RGB"))
    palette = _palette(image, [shots[calls // 2], shots[-1]])
    frames = [shot.quantize(palette=palette, dither=image.Dither.NONE) for shot in shots]
    times = [160] * calls + [1500, 4000]  # milliseconds
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)


def _palette(image: Any, shots: list[Any]) -> Any:
    """Colours for all frames, from some of them: with one palette, what does not change costs nothing."""
    width, height = shots[0].size
    together = image.new("RGB", (width, height * len(shots)))
    for i, shot in enumerate(shots):
        together.paste(shot, (0, i * height))
    return together.quantize(COLOURS)


def take(folder: Path, opened: Any, calls: int = CALLS) -> list[Path]:
    """Both pictures, each below its limit."""
    if not folder.is_dir():
        raise LimpetError(f"{folder} is no folder: make it, or name another")
    files = [folder / "playground.png", folder / "native-vs-crs.gif"]
    app = application(here(Stock({"mini": load("mini", device="cpu")}, load_judge(device="cpu"))))
    with serving(app) as address:
        screenshot(opened.new_page(viewport={"width": 1180, "height": 900}), address, files[0], calls)
        animation(opened.new_page(viewport={"width": 940, "height": 700}), files[1], calls)
    for file in files:
        if file.stat().st_size > MOST:
            raise LimpetError(f"{file} has {file.stat().st_size} bytes; a README's picture should stay below {MOST}")
    return files


if __name__ == "__main__":
    with browser() as chrome:
        take(Path(*sys.argv[1:2] or ["docs/images"]), chrome)
