"""The page: one template with its style and script inline, for files that are embedded and for the playground.

Whatever is put in is escaped for where it stands, and the page's own security policy names the hash of its script and
of its style: nothing else runs, and a self-contained page cannot reach a network at all."""

from __future__ import annotations

import base64
import html
import re
from importlib import resources
from typing import Any, NamedTuple

from limpet import samplers
from limpet import style as looks
from limpet.html import for_script, framed, hashed
from limpet.recording.trajectory import Trajectory
from limpet.samplers import CRS, Mend, Native, params


def asset(name: str, package: str = "limpet.recording") -> str:
    """A text file in the assets folder of a package."""
    return resources.files(package).joinpath("assets", name).read_text(encoding="utf-8")


def words() -> dict[str, str]:
    """What the samplers with a colour of their own are, each in one line."""
    known, native = {"native": Native, "crs": CRS, "mend": Mend}, params(Native)
    said = {name: samplers.words(kind) for name, kind in known.items()}
    return {**said, "top-p": native["top_p"].words, "calls": native["nfe"].words}


def self_contained(trajectories: list[Trajectory], title: str | None = None) -> str:
    """One HTML page with the trajectories inside."""
    models = ", ".join(dict.fromkeys(trajectory.header.model for trajectory in trajectories))
    files = [base64.b64encode(trajectory.to_bytes()).decode() for trajectory in trajectories]
    title = title or f"{models}: a sample comes into being"
    lead = " · ".join(trajectory.header.arm for trajectory in trajectories)
    data = {"files": files, "words": words()}
    return fill(title, lead, data, asset("open.js"), connect="'none'")[0]


class Inline(NamedTuple):
    """A page that a notebook shows in a frame."""

    page: str

    def __repr__(self) -> str:
        return f"<a page of {len(self.page):,} characters>"

    def _repr_html_(self) -> str:
        return framed(self.page)


def inline(*trajectories: Trajectory, title: str | None = None) -> Inline:
    """Trajectories side by side, for a notebook."""
    return Inline(self_contained(list(trajectories), title))


def fill(title: str, lead: str, data: Any, opening: str, *, connect: str, form: str = "") -> tuple[str, str]:
    """The page, and the policy that stands in it: a server says it in a header too. `opening` is the script
    that gives the viewer the data."""
    style, script = looks.sheet() + asset("viewer.css"), asset("viewer.js") + opening
    csp = (
        f"default-src 'none'; script-src {hashed(script)}; style-src {hashed(style)}; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    said = {name: html.escape(text) for name, text in words().items()}
    parts = {
        "title": html.escape(title), "lead": html.escape(lead), "csp": html.escape(csp), "style": style,
        "script": script, "form": _put(form, said), "data": for_script(data), **said,
    }  # fmt: skip
    return _put(asset("page.html"), parts), csp


def _put(template: str, parts: dict[str, str]) -> str:
    """In one pass, so that what is put in is never itself filled."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], template)
