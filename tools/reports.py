"""What docs/reports/mini and the table of claims in docs/reproduce.md are made of: numbers made elsewhere, as JSON.

python tools/reports.py NUMBERS.json     # {"nfe-scaling-mini-gpu": lab.collect(...).to_dict(), ...}, any of them
python tools/reports.py                  # from the numbers that are committed, again"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from limpet import studies
from limpet.lab import Results, report, units

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "reports" / "mini"
START, END = "<!-- claims: report.tally and report.overview of reports/mini -->\n", "<!-- end of claims -->"


def main(numbers: Path | None) -> None:
    made = {} if numbers is None else json.loads(numbers.read_text(encoding="utf-8"))
    sections = []
    for one in studies.whole(studies.preset("mini-gpu")):
        name = units.name(one)
        results = Results.from_dict(one, made[name]) if name in made else report.read(one, FOLDER / name)
        report.write(results, FOLDER / name, among=True)
        for picture in (FOLDER / name).glob("figures/*.png"):
            picture.unlink()  # the SVG beside it is smaller, and what pages show
        sections.append(report.section(results))
    report.write_index(sections, FOLDER)
    page = DOCS / "reproduce.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    table = f"{report.tally(sections)}\n\n{report.overview(sections, 'reports/mini/')}"
    page.write_text(f"{before}{START}{table}{END}{after}", encoding="utf-8")
    print(report.tally(sections))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
