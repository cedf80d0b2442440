"""What the site takes from outside of docs: the README as its first page, and the changelog; and links that lead out of
docs, which on a site lead nowhere, as plain text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parents[1]
FROM_OUTSIDE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!\w+:|#)([^)#]*)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for page, source in FROM_OUTSIDE.items():
        text = (HERE / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A link to a file that is there, but not on the site, is its text; whatever leads nowhere is left to mkdocs, which
    says so."""
    place = posixpath.dirname(page.file.src_uri)
    base = HERE if page.file.src_uri in FROM_OUTSIDE else HERE / "docs" / place

    def kept(found: re.Match[str]) -> str:
        on_site = files.get_file_from_path(posixpath.normpath(posixpath.join(place, found[2])))
        return found[1] if on_site is None and (base / found[2]).exists() else found[0]

    return LINK.sub(kept, markdown)
