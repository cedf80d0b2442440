"""Checks of a page in a browser: the screens that it must fit, and what axe-core finds."""

import pytest

SCREENS = [  # by default each width and each scheme once
    (1280, "light"),
    (390, "dark"),
    *(pytest.param(*one, marks=pytest.mark.more) for one in ((1280, "dark"), (390, "light"))),
]


def on_screen(tab, width, scheme):
    tab.set_viewport_size({"width": width, "height": 844 if width < 600 else 900})
    tab.emulate_media(color_scheme=scheme)


def serious(tab):
    """What axe-core finds that keeps somebody out, with the first places."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: limpet[dev]")
    found = axe.Axe().run(tab).response["violations"]
    return [
        (one["id"], [node["target"] for node in one["nodes"]][:4])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
