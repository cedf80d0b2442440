"""Check a wheel and a source archive before a release: `python tools/release.py DIST` prints problems, or the sizes."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import limpet

MAX_BYTES = 60 * 10**6  # of a file: five built-in models take 56 million
ROOT = Path(__file__).parents[1]


def problems(dist: Path) -> list[str]:
    """What is wrong with the names, sizes and contents of the files in a folder."""
    stem = f"limpet-{limpet.__version__}"
    wheel, source = dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"
    if sorted(dist.iterdir()) != sorted([wheel, source]):
        return [f"{dist} holds {', '.join(path.name for path in dist.iterdir())}, not {wheel.name} and {source.name}"]
    found = [f"{path.name} has {path.stat().st_size:,} bytes" for path in (wheel, source)
             if path.stat().st_size > MAX_BYTES]  # fmt: skip
    package = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/limpet").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    with tarfile.open(source) as archive:
        in_source = {name.removeprefix(f"{stem}/src/") for name in archive.getnames()}
    for what, names in (("the wheel", in_wheel), ("the source archive", in_source)):
        if missing := sorted(package - names):
            found.append(f"{what} lacks {', '.join(missing[:5])}")
    if extra := sorted(in_wheel - package):
        found.append(f"the wheel also holds {', '.join(extra[:5])}")
    return found


if __name__ == "__main__":
    dist = Path(sys.argv[1])
    for line in (found := problems(dist)) or [f"{path.name}: {path.stat().st_size:,} bytes" for path in dist.iterdir()]:
        print(line)
    sys.exit(bool(found))
