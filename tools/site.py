"""Hooks of the documentation site: the README as its first page, the changelog, and links that lead out of docs."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!\w+:|#)([^)#]*)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs."""
    sources = {source: page for page, source in FROM_ROOT.items()}
    for page, source in FROM_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, target in sources.items():
            text = text.replace(f"]({other})", f"]({target})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links to files of the repository that are not on the site by their texts. mkdocs reports dead links."""
    folder = posixpath.dirname(page.file.src_uri)
    base = ROOT if page.file.src_uri in FROM_ROOT else ROOT / "docs" / folder

    def link_or_text(found: re.Match[str]) -> str:
        on_site = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, found[2])))
        return found[1] if on_site is None and (base / found[2]).exists() else found[0]

    text = LINK.sub(link_or_text, markdown)
    copy = Path(config.site_dir) / page.file.src_uri  # llms.txt names the pages as Markdown
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text, encoding="utf-8")
    return text
