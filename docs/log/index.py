"""Write the table of README.md beside this file from the entries. Run: python docs/log/index.py [--check]

An entry is DATE-question.md: its first line is the question, its third line the verdict. With --check nothing is
written, and the exit code is 1 where the table is not that of the entries.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
TABLE = "| date | question | verdict |\n|---|---|---|\n"
ENTRY = re.compile(r"# (?P<question>.+)\n\n\*\*Verdict:\*\* (?P<verdict>.+)\n")


def line(file: Path) -> str:
    """The line of the table for one entry. Raises SystemExit for a file that does not begin as entries do."""
    found = ENTRY.match(file.read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"{file.name}: must begin with '# question', an empty line and '**Verdict:** ...'")
    return f"| {file.name[:10]} | [{found['question']}]({file.name}) | {found['verdict']} |\n"


def main() -> None:
    """Write the table, or check it."""
    entries = sorted(sorted(FOLDER.glob("2*.md")), key=lambda file: file.name[:10], reverse=True)
    page = PAGE.read_text(encoding="utf-8")
    wanted = page.partition(TABLE)[0] + TABLE + "".join(map(line, entries))
    if "--check" not in sys.argv:
        PAGE.write_text(wanted, encoding="utf-8")
    elif page != wanted:
        raise SystemExit("docs/log/README.md is not the table of the entries; run: python docs/log/index.py")


if __name__ == "__main__":
    main()
