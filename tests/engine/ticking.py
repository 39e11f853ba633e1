"""A trainer that does nothing but count: it writes a line to a file in its folder, twenty times a second."""

from __future__ import annotations

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    while True:
        with Path(sys.argv[1], "ticks").open("a") as file:
            file.write("tick\n")
        time.sleep(0.05)
