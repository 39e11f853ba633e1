"""What `from aquiline import ...` gives: every name that the package lists is there, and is what its module has."""

from __future__ import annotations

import subprocess
import sys

import aquiline


def test_every_listed_name_is_there() -> None:
    for name in aquiline.__all__:
        found = getattr(aquiline, name)
        assert name == "__version__" or (found.__name__ == name and found.__module__.startswith("aquiline."))


def test_another_name_is_an_error() -> None:
    try:
        aquiline.SpecConfig  # noqa: B018
    except AttributeError as error:
        assert "SpecConfig" in str(error)
    else:
        raise AssertionError("an unknown name was found")


def test_the_package_alone_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, aquiline.cli.main; print('torch' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"
