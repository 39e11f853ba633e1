"""A mistake planted in a pair fails the comparison, and is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import needs_native
from tests.parity.planting import PLANTS, change, copied, judge, pair_of

CHEAP = ("gate and up", "capture +1", "draft biases", "input_norm")
RARE = ("rotation", "d2t as ids", "mask -1", "sinks", "router", "NVIDIA's ids -1", "fc_norm", "draft o bias")


def costs(name: str) -> object:
    marks = [] if name in CHEAP else [pytest.mark.rare if name in RARE else pytest.mark.slow]
    return pytest.param(name, marks=marks)


@needs_native
@pytest.mark.parametrize("name", [costs(name) for name in PLANTS])
def test_a_planted_mistake_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = PLANTS[name]
    found = plant.planted(tmp_path, monkeypatch)
    [finding] = found.findings
    assert finding.stage.startswith(plant.model) and finding.causes and plant.cause in finding.causes[0], finding


@needs_native
def test_what_no_known_mistake_explains_has_no_cause(tmp_path: Path) -> None:
    """Stage, position and phase are named alone."""
    sound = pair_of(tmp_path)
    assert sound.draft is not None
    bad = copied(sound.draft, tmp_path / "copy", change("o_proj", lambda weight: weight.flip(0)))
    [finding] = judge(replace(sound, draft=bad), sound, "eager").findings
    assert (finding.stage, finding.phase, finding.causes) == ("draft.pre_head_hidden", "decode", ())
