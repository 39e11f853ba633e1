"""What `aquiline inspect` tells of a draft and of a target, sound or broken."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import write_draft, write_target
from tests.gguf_files import write_gguf_target
from tests.json_values import TRAPS

from aquiline.config import ConvertConfig
from aquiline.errors import CheckpointError
from aquiline.models.conversion import convert
from aquiline.models.inspection import Inspection, inspect_checkpoint
from aquiline.models.load import read_model_config
from aquiline.models.model_config import LAYER_IDS

FORMATS = ("specforge", "safeailab", "speculators", "nvidia")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, also as GGUF, and a draft of it in every format."""
    place = tmp_path_factory.mktemp("sound")
    write_target(place / "target")
    config = read_model_config(place / "target")
    for name in FORMATS:
        write_draft(place / name, config, name)
    convert(place / "specforge", place / "draft.gguf", ConvertConfig("gguf"), place / "target")
    write_gguf_target(place / "target.gguf", place / "target")
    return place


@pytest.mark.parametrize(
    ("name", "title", "told"),
    [
        ("specforge", "SpecForge", "architectures=['LlamaForCausalLMEagle3']"),
        ("safeailab", "SafeAILab", "architectures=['LlamaForCausalLM'] and no mark of another producer"),
        ("speculators", "speculators", "speculators_model_type"),
        ("nvidia", "NVIDIA ModelOpt", "eagle_config.use_input_layernorm_in_first_layer=True"),
        ("draft.gguf", "llama.cpp", "general.architecture='eagle3'"),
    ],
)
def test_a_draft_beside_its_target(name: str, title: str, told: str, place: Path) -> None:
    found = inspect_checkpoint(place / name, place / "target")
    assert (found.kind, found.problems) == ("draft", [])
    assert found.sections["producer"] == {"format": title, "told by": told}
    assert found.sections["capture"] == {"outputs": [1, 3, 4], "inputs": [2, 4, 5]}
    assert found.sections["vocabulary"]["share"] == 0.5
    assert found.sections["rope"]["base"] == (10000.0 if name == "safeailab" else 500000.0)
    assert found.draft_ids is not None and len(found.draft_ids) == 80
    json.dumps(found.as_dict())


def test_without_a_target_layers_are_told_where_the_config_names_them(place: Path, tmp_path: Path) -> None:
    unknown = {"outputs": None, "inputs": None}
    assert inspect_checkpoint(place / "specforge").sections["capture"] == unknown
    assert inspect_checkpoint(place / "nvidia").sections["capture"] == unknown  # an id may be the number of layers
    assert inspect_checkpoint(place / "draft.gguf").sections["capture"]["outputs"] == [1, 3, 4]


def test_every_mismatch_and_every_field_without_effect(place: Path, tmp_path: Path) -> None:
    write_target(tmp_path / "other", vocab_size=96, hidden_size=32, num_hidden_layers=4)
    write_draft(tmp_path / "draft", read_model_config(place / "target"), sliding_window=8, attention_bias=True,
                eagle_config={LAYER_IDS: [1, 3, 6]})  # fmt: skip
    found = inspect_checkpoint(tmp_path / "draft", tmp_path / "other")
    told = "\n".join(found.problems)
    for words in ("vocab_size=160, the target has 96", "hidden_size=48, the target has 32", "[1, 3, 6]"):
        assert words in told
    assert [notice.split("=")[0] for notice in found.notices] == ["attention_bias", "sliding_window"]


def test_bytes_of_a_pass_are_those_of_the_tensors_it_reads(place: Path, tmp_path: Path) -> None:
    """fc, the layer, norms and head once, and a row of the embedding; without a head the target's rows in its place."""
    config = read_model_config(place / "target")
    _, tensors = write_draft(tmp_path / "own", config, ship_embed=True)
    read = {name: t.numel() for name, t in tensors.items() if name not in ("d2t", "t2d", "embed_tokens.weight")}
    found = inspect_checkpoint(tmp_path / "own").sections["tensors"]
    assert found["bytes of a pass"] == 4 * (sum(read.values()) + 48)
    write_draft(tmp_path / "none", config, edit=lambda config, tensors: tensors.pop("lm_head.weight"))
    assert inspect_checkpoint(tmp_path / "none").sections["tensors"]["bytes of a pass"] == found["bytes of a pass"]


@pytest.mark.parametrize("name", ["target", "target.gguf"])
def test_a_target_alone(name: str, place: Path) -> None:
    found = inspect_checkpoint(place / name)
    assert (found.kind, found.problems) == ("target", [])
    assert found.sections["default capture"] == {"outputs": [1, 3, 4], "inputs": [2, 4, 5]}


def test_a_target_given_as_a_draft_and_a_draft_as_a_target(place: Path) -> None:
    for target, draft in (("target", "target"), ("target", "target.gguf")):
        with pytest.raises(CheckpointError, match="this is no draft"):
            inspect_checkpoint(place / draft, place / target)
    for draft in ("specforge", "draft.gguf"):
        with pytest.raises(CheckpointError, match="this is no target"):
            inspect_checkpoint(place / "specforge", place / draft)


def test_a_model_behind_text_config_is_named(tmp_path: Path) -> None:
    inner = {"model_type": "gemma3_text", "num_hidden_layers": 8}
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"text_config holds the text model .model_type='gemma3_text'"):
        inspect_checkpoint(tmp_path)


def change_a_field(file: Path, chance: random.Random) -> None:
    config = json.loads(file.read_text())
    section = chance.choice([config, *(value for value in config.values() if isinstance(value, dict) and value)])
    section[chance.choice(sorted(section))] = chance.choice(TRAPS)
    file.write_text(json.dumps(config))


def drop_a_field(file: Path, chance: random.Random) -> None:
    config = json.loads(file.read_text())
    del config[chance.choice(sorted(config))]
    file.write_text(json.dumps(config))


def cut(file: Path, chance: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: chance.randrange(file.stat().st_size)])


def flip(file: Path, chance: random.Random) -> None:
    """Some bytes of the first kilobyte, where headers are."""
    data = bytearray(file.read_bytes())
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(min(1024, len(data)))] = chance.randrange(256)
    file.write_bytes(data)


def write_nonsense(file: Path, chance: random.Random) -> None:
    file.write_bytes(chance.choice([b"", b"[]", b"null", b'"x"', b"{", b"\xff\xfe", b'{"a": 1e999}', b"[" * 3000]))


def change_the_architecture(file: Path, chance: random.Random) -> None:
    config = json.loads(file.read_text())
    config["architectures"] = chance.choice([["Eagle3DeepseekV2ForCausalLM"], ["MambaForCausalLM"], [], "x"])
    config["model_type"] = chance.choice(["mamba", "llama", "kimi_k2"])
    file.write_text(json.dumps(config))


CONFIGS: tuple[Callable[[Path, random.Random], None], ...] = (
    change_a_field, change_a_field, drop_a_field, cut, write_nonsense, change_the_architecture,
)  # fmt: skip


def test_two_hundred_broken_checkpoints_are_told_or_refused_by_name(place: Path, tmp_path: Path) -> None:
    answered = refused = 0
    for seed in range(200):
        chance = random.Random(seed)
        name = chance.choice([*FORMATS, "draft.gguf", "target", "target.gguf"])
        copy = tmp_path / str(seed) / name
        copy.parent.mkdir()
        if copy.suffix:
            shutil.copy(place / name, copy)
            chance.choice([cut, flip])(copy, chance)
        else:
            shutil.copytree(place / name, copy)
            weights = next(file for file in sorted(copy.iterdir()) if file.suffix in (".safetensors", ".bin"))
            if chance.random() < 0.7:
                chance.choice(CONFIGS)(copy / "config.json", chance)
            else:
                chance.choice([cut, flip])(weights, chance)
        beside: dict[str, Any] = {} if name.startswith("target") and seed % 3 else {"target": place / "target"}
        try:
            found = inspect_checkpoint(copy, **beside)
        except CheckpointError as error:
            refused += 1
            assert str(copy) in str(error), f"seed {seed}: {error}"
        else:
            answered += 1
            check(found)
    assert answered > 40 and refused > 40


def check(found: Inspection) -> None:
    """It can be printed as JSON, and says what it is."""
    assert json.loads(json.dumps(found.as_dict()))["kind"] in ("draft", "target")
