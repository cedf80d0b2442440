"""Whether what is about to be released is whole: `python tools/release.py DIST` says what is wrong, or its sizes."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import limpet

MOST = 45 * 10**6  # bytes of a file
HERE = Path(__file__).parents[1]


def wrong(dist: Path) -> list[str]:
    """What is wrong with a wheel and a source archive: their names and sizes, and whether all of the package is there
    and nothing else that was lying about."""
    stem = f"limpet-{limpet.__version__}"
    wheel, source = dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"
    if sorted(dist.iterdir()) != sorted([wheel, source]):
        return [f"{dist} holds {', '.join(path.name for path in dist.iterdir())}, not {wheel.name} and {source.name}"]
    said = [f"{path.name} has {path.stat().st_size:,} bytes" for path in (wheel, source) if path.stat().st_size > MOST]
    own = {
        path.relative_to(HERE / "src").as_posix()
        for path in (HERE / "src/limpet").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }  # fmt: skip
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    with tarfile.open(source) as archive:
        given = {name.removeprefix(f"{stem}/") for name in archive.getnames()}
    lacks = {"the wheel": own - held, "the source archive": {f"src/{name}" for name in own} - given}
    said += [f"{what} lacks {', '.join(sorted(names)[:5])}" for what, names in lacks.items() if names]
    return said + ([f"the wheel also holds {', '.join(sorted(held - own)[:5])}"] if held - own else [])


if __name__ == "__main__":
    dist = Path(sys.argv[1])
    for line in (found := wrong(dist)) or [f"{path.name}: {path.stat().st_size:,} bytes" for path in dist.iterdir()]:
        print(line)
    sys.exit(bool(found))
