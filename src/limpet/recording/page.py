"""Pages: one HTML template with its style and script inline, for self-contained files and for the playground.

What is filled in is escaped for its place. The page's security policy names the hashes of its script and its style, so
nothing else runs, and a self-contained page can reach no network."""

from __future__ import annotations

import base64
import html
import re
from importlib import resources
from typing import Any, NamedTuple

from limpet import samplers
from limpet.html import for_script, frame, policy_hash
from limpet.recording.trajectory import Trajectory
from limpet.samplers import CRS, Mend, Native, params
from limpet.style import style_sheet


def asset(name: str, package: str = "limpet.recording") -> str:
    """A text file in the assets folder of a package."""
    return resources.files(package).joinpath("assets", name).read_text(encoding="utf-8")


def descriptions() -> dict[str, str]:
    """One line on each sampler that has a colour of its own, on top-p and on network calls: texts of tooltips."""
    native = params(Native)
    known = {name: samplers.describe(kind) for name, kind in (("native", Native), ("crs", CRS), ("mend", Mend))}
    return {**known, "top-p": native["top_p"].help, "calls": native["nfe"].help}


def self_contained(trajectories: list[Trajectory], title: str | None = None) -> str:
    """One HTML page that shows trajectories side by side. title: its heading (default: the models' names)."""
    models = ", ".join(dict.fromkeys(trajectory.header.model for trajectory in trajectories))
    files = [base64.b64encode(trajectory.to_bytes()).decode() for trajectory in trajectories]
    subtitle = " · ".join(trajectory.header.name for trajectory in trajectories)
    data = {"files": files, "descriptions": descriptions()}
    return fill(title or f"{models}: sampling step by step", subtitle, data, asset("open.js"), connect="'none'")[0]


class Inline(NamedTuple):
    """A page that a notebook shows in a frame."""

    page: str

    def __repr__(self) -> str:
        return f"<a page of {len(self.page):,} characters>"

    def _repr_html_(self) -> str:
        return frame(self.page)


def inline(*trajectories: Trajectory, title: str | None = None) -> Inline:
    """The page of some trajectories, for a notebook."""
    return Inline(self_contained(list(trajectories), title))


def fill(
    title: str, subtitle: str, data: Any, page_script: str, *, connect: str, form: str = ""
) -> tuple[str, str]:  # fmt: skip
    """The page and its security policy, which a server also sends as a header.

    data: what the script reads, as JSON. page_script: runs after the viewer's script. connect: what the page may
    connect to. form: HTML above the viewer."""
    style, script = style_sheet() + asset("viewer.css"), asset("viewer.js") + page_script
    csp = (
        f"default-src 'none'; script-src {policy_hash(script)}; style-src {policy_hash(style)}; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    tips = {name: html.escape(text) for name, text in descriptions().items()}
    parts = {
        "title": html.escape(title), "subtitle": html.escape(subtitle), "csp": html.escape(csp), "style": style,
        "script": script, "form": _substitute(form, tips), "data": for_script(data), **tips,
    }  # fmt: skip
    return _substitute(asset("page.html"), parts), csp


def _substitute(template: str, parts: dict[str, str]) -> str:
    """Replace each {{name}} in one pass, so that braces in a part stay as they are."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], template)
