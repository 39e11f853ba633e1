from __future__ import annotations

from pathlib import Path

import pytest
from tests.disk import MESSAGE, full_after

from aquiline.writing import write_whole, writing


def test_a_file_is_written_whole_or_is_as_before(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_whole(file, "first", "nothing")
    with full_after(1000), pytest.raises(OSError, match=rf"result\.json: {MESSAGE}\. The first one stays$"):
        write_whole(file, "x" * 10_000, "The first one stays")
    assert file.read_text() == "first" and [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_an_error_that_names_its_file_or_is_no_writes_stays_as_it_is(tmp_path: Path) -> None:
    for error in (FileNotFoundError(2, "No such file", "other"), OSError(28, "No space left", "other"), OSError("x")):
        with pytest.raises(OSError) as caught, writing(tmp_path, "kept"):
            raise error
        assert caught.value is error
    told = r"/dev/full: cannot be written: No space left on device\. kept$"
    with pytest.raises(OSError, match=told), writing(Path("/dev/full"), "kept"), open("/dev/full", "w") as out:
        out.write("x")
