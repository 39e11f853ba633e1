"""A draft in another producer's format and back: the same bytes, or a refusal that names the field."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import edit_json, write_draft, write_target
from torch import Tensor

from aquiline.config import ConvertConfig, DraftFormat
from aquiline.errors import CheckpointError
from aquiline.models.conversion import convert
from aquiline.models.draft_config import DraftOverrides
from aquiline.models.formats import CONFIG, WEIGHTS, open_draft, read_draft_config
from aquiline.models.load import read_model_config
from aquiline.models.model_config import LAYER_IDS
from aquiline.models.producers import FORMATS

FOLDERS = [name for name in FORMATS if name != "gguf"]
UNREAD = {"initializer_range": 0.02, "pad_token_id": 0, "torch_dtype": "bfloat16", "note": "\u2028 ½"}
"""Fields that no loader reads."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("target")
    write_target(place)
    return place


def file_of(folder: Path, name: str) -> Path:
    return folder / (f"{name}.gguf" if name.endswith("gguf") else name)


def published(place: Path, target: Path, name: str) -> Path:
    """A plain bfloat16 draft as that producer's own code would write it: fields that nobody reads, its indentation."""
    edit_of = {"aquiline": {"producer": "aquiline"}}
    format = "specforge" if name == "aquiline" else name
    write_draft(place, read_model_config(target), format, dtype=torch.bfloat16, **UNREAD, **edit_of.get(name, {}))
    if name == "safeailab":
        tensors = torch.load(place / "pytorch_model.bin")
        (place / "pytorch_model.bin").unlink()
        save_file(tensors, place / WEIGHTS)  # without metadata
    if name == "nvidia":
        config = json.loads((place / CONFIG).read_text())
        (place / CONFIG).write_text(json.dumps(config, indent=4, ensure_ascii=False) + "\n\n")
    return place


def test_every_format_has_a_name_on_the_command_line() -> None:
    assert list(get_args(DraftFormat)) == list(FORMATS)


@pytest.mark.parametrize("name", FOLDERS)
def test_there_and_back_by_every_format_gives_the_same_files(name: str, target: Path, tmp_path: Path) -> None:
    first = published(tmp_path / "first", target, name)
    for other in FORMATS:
        there, back = file_of(tmp_path, f"to-{other}"), tmp_path / f"from-{other}"
        convert(first, there, ConvertConfig(other), target)
        assert convert(there, back, ConvertConfig(name), target).is_restored
        for file in (CONFIG, WEIGHTS):
            assert (back / file).read_bytes() == (first / file).read_bytes(), (other, file)


@pytest.mark.parametrize(("one", "other"), product(FORMATS, FORMATS))
def test_tensors_keep_their_bytes(one: str, other: str, target: Path, tmp_path: Path) -> None:
    """Through both formats: every parameter under its new name, d2t, and t2d where the last format has it."""
    write_draft(tmp_path / "first", read_model_config(target), dtype=torch.bfloat16)
    there, last = file_of(tmp_path, f"a-{one}"), file_of(tmp_path, f"b-{other}")
    convert(tmp_path / "first", there, ConvertConfig(one), target)
    convert(there, last, ConvertConfig(other), target)
    model = read_model_config(target)
    before, after = (open_draft(place, model, DraftOverrides()) for place in (tmp_path / "first", last))
    assert not after.problems and after.reading.config.capture == (1, 3, 4)
    named = {name.replace(before.layer, after.layer): name for name in before.tensors.names}
    if not FORMATS[other].has_t2d:
        del named["t2d"]
    assert set(named) == set(after.tensors.names)
    for new, old in named.items():
        assert (
            after.tensors.get(new).tobytes() == before.tensors.get(old).astype(after.tensors.get(new).dtype).tobytes()
        )


def test_a_chain_of_conversions_comes_back_to_any_of_its_formats(target: Path, tmp_path: Path) -> None:
    places = {"nvidia": published(tmp_path / "nvidia", target, "nvidia")}
    before = "nvidia"
    for name in ("speculators", "gguf", "specforge", "aquiline"):
        places[name] = file_of(tmp_path, name)
        convert(places[before], places[name], ConvertConfig(name), target)
        before = name
    for name in ("nvidia", "speculators", "specforge"):
        assert convert(places["aquiline"], tmp_path / f"again-{name}", ConvertConfig(name), target).is_restored
        for file in (CONFIG, WEIGHTS):
            assert (tmp_path / f"again-{name}" / file).read_bytes() == (places[name] / file).read_bytes()


def test_a_changed_config_is_not_undone_on_the_way_back(target: Path, tmp_path: Path) -> None:
    published(tmp_path / "a", target, "specforge")
    convert(tmp_path / "a", tmp_path / "b", ConvertConfig("speculators"), target)
    edit_json(tmp_path / "b" / CONFIG, lambda c: c["transformer_layer_config"].update(rope_theta=250000.0))
    assert not convert(tmp_path / "b", tmp_path / "c", ConvertConfig("specforge"), target).is_restored
    assert read_draft_config(tmp_path / "c", target).model.rope.theta == 250000.0
    tensors = load_file(tmp_path / "b" / WEIGHTS)
    tensors["norm.weight"] += 1
    save_file(tensors, tmp_path / "b" / WEIGHTS)
    convert(tmp_path / "b", tmp_path / "d", ConvertConfig("specforge"), target)
    assert load_file(tmp_path / "d" / WEIGHTS)["norm.weight"].equal(tensors["norm.weight"])


LAST = [4, 6, 8]
CANNOT: list[tuple[str, dict[str, Any], str, str]] = [
    ("specforge", {"eagle_config": {LAYER_IDS: [0, 3, 6]}}, "safeailab", LAYER_IDS),
    ("specforge", {"fc_norm": True}, "safeailab", "fc_norm=true"),
    ("specforge", {"fc_norm": True}, "gguf", "fc_norm=true"),
    ("specforge", {"norm_before_residual": True}, "nvidia", "norm_before_residual=true"),
    ("speculators", {"norm_output": True}, "specforge", "norm_output=true"),
    ("speculators", {"norm_output": True}, "gguf", "norm_output=true"),
    ("speculators", {"layer_types": ["sliding_attention"], "sliding_window": 6}, "specforge", "sliding_window=6"),
    ("speculators", {"layer_types": ["sliding_attention"], "sliding_window": 6}, "nvidia", "sliding_window=6"),
    ("speculators", {"attention_bias": True}, "specforge", "attention_bias=true"),
    ("nvidia", {"mlp_bias": True}, "gguf", "mlp_bias=true"),
    ("speculators", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "specforge", "rope_scaling=linear"),
    ("speculators", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "gguf", "rope_type='yarn'"),
    ("speculators", {LAYER_IDS: [3, 5]}, "gguf", f"{LAYER_IDS}=[2, 4]"),
    ("speculators", {LAYER_IDS: [3, 5, 6]}, "specforge", "input numbering"),
]
CAN: list[tuple[str, dict[str, Any], str]] = [
    ("speculators", {LAYER_IDS: LAST}, "nvidia"),
    ("speculators", {LAYER_IDS: LAST}, "gguf"),
    ("nvidia", {"eagle_config": {LAYER_IDS: LAST}, "norm_before_fc": True}, "gguf"),
    ("nvidia", {"eagle_config": {"return_hidden_post_norm": True}}, "speculators"),
    ("speculators", {"norm_output": True, "fc_norm": True}, "nvidia"),
    ("speculators", {"attention_bias": True, "mlp_bias": True}, "nvidia"),
    ("nvidia", {"attention_bias": True, "mlp_bias": True}, "aquiline"),
    ("specforge", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "speculators"),
    ("speculators", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                      "high_freq_factor": 4.0}}, "gguf"),
    ("specforge", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "gguf"),
    ("specforge", {"hidden_size": 32, "target_hidden_size": 48, "ship_embed": True}, "gguf"),
    ("speculators", {"norm_before_residual": True, "sliding_window": 6, "layer_types": ["sliding_attention"]},
     "aquiline"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "fields", "to", "named"), CANNOT, ids=str)
def test_what_a_format_cannot_say_is_refused_by_field(
    format: str, fields: dict[str, Any], to: str, named: str, target: Path, tmp_path: Path
) -> None:
    if isinstance(fields.get(LAYER_IDS), list) and len(fields[LAYER_IDS]) == 2:
        fields |= {"edit": lambda config, tensors: tensors.update({"fc.weight": torch.zeros(48, 96)})}
    write_draft(tmp_path / "a", read_model_config(target), format, **fields)
    place = file_of(tmp_path, to)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "a", place, ConvertConfig(to), target)
    assert named in str(caught.value), str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("format", "fields", "to"), CAN, ids=str)
def test_what_a_format_can_say_is_the_same_head(
    format: str, fields: dict[str, Any], to: str, target: Path, tmp_path: Path
) -> None:
    """And the way back gives the same files."""
    write_draft(tmp_path / "a", read_model_config(target), format, **fields)
    place, model = file_of(tmp_path, to), read_model_config(target)
    convert(tmp_path / "a", place, ConvertConfig(to), target)
    ours, theirs = (read_draft_config(where, model) for where in (tmp_path / "a", place))
    if to != "gguf":  # whose rotation is a tensor of factors
        assert theirs == ours
    assert (theirs.capture, theirs.norm_feedback) == (ours.capture, ours.norm_feedback)
    convert(place, tmp_path / "b", ConvertConfig(format), target)
    for file in (CONFIG, WEIGHTS):
        assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()


def test_a_norm_output_of_two_meanings_needs_to_be_told(target: Path, tmp_path: Path) -> None:
    write_draft(tmp_path / "a", read_model_config(target), norm_output=True)
    with pytest.raises(CheckpointError, match="norm_output=true means two things"):
        convert(tmp_path / "a", tmp_path / "b", ConvertConfig("speculators"), target)
    told = DraftOverrides(norm_feedback=True)
    convert(tmp_path / "a", tmp_path / "b", ConvertConfig("speculators"), target, told)
    assert read_draft_config(tmp_path / "b", target).norm_feedback
    convert(tmp_path / "b", tmp_path / "c", ConvertConfig("specforge"), target)
    assert (tmp_path / "c" / CONFIG).read_bytes() == (tmp_path / "a" / CONFIG).read_bytes()


def test_without_a_target_layers_must_be_named(target: Path, tmp_path: Path) -> None:
    model = read_model_config(target)
    write_draft(tmp_path / "named", model, eagle_config={LAYER_IDS: [0, 3, 6]})
    convert(tmp_path / "named", tmp_path / "b", ConvertConfig("speculators"))
    assert read_draft_config(tmp_path / "b", target).capture == (0, 3, 6)
    write_draft(tmp_path / "unnamed", model)
    write_draft(tmp_path / "nvidia", model, "nvidia")
    for source, to in (("unnamed", "speculators"), ("named", "safeailab"), ("nvidia", "speculators")):
        with pytest.raises(CheckpointError, match="target: "):
            convert(tmp_path / source, tmp_path / "c", ConvertConfig(to))


def test_a_destination_that_exists_is_left_alone(target: Path, tmp_path: Path) -> None:
    write_draft(tmp_path / "a", read_model_config(target))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    (tmp_path / "c.gguf").write_text("mine")
    for place, to in (("b", "speculators"), ("c.gguf", "gguf")):
        with pytest.raises(OSError, match=f"{place}: exists and is left alone; pass --force"):
            convert(tmp_path / "a", tmp_path / place, ConvertConfig(to), target)
        convert(tmp_path / "a", tmp_path / place, ConvertConfig(to, force=True), target)
        assert read_draft_config(tmp_path / place, target).capture == (1, 3, 4)
    assert (tmp_path / "b" / "mine.txt").read_text() == "mine"
    (tmp_path / "b" / "pytorch_model.bin").write_text("mine")
    with pytest.raises(OSError, match=r"holds pytorch_model.bin"):
        convert(tmp_path / "a", tmp_path / "b", ConvertConfig("speculators", force=True), target)
    for place, to in (("d.gguf", "nvidia"), ("d", "gguf")):
        with pytest.raises(ValueError, match=f"DST=.*{place}: to={to} writes a"):
            convert(tmp_path / "a", tmp_path / place, ConvertConfig(to), target)
    assert not [path for path in tmp_path.iterdir() if ".part" in path.name]


def test_a_layer_that_llama_cpp_does_not_have_is_told(target: Path, tmp_path: Path) -> None:
    for name, ids in (("last", LAST), ("earlier", [3, 5, 7])):
        write_draft(tmp_path / name, read_model_config(target), "speculators", **{LAYER_IDS: ids})
        done = convert(tmp_path / name, tmp_path / f"{name}.gguf", ConvertConfig("gguf"), target)
        assert ["llama.cpp has no output of layer 7" in notice for notice in done.notices] == [True] * (name == "last")


def test_a_head_that_is_the_drafts_own_embedding_stays_so(target: Path, tmp_path: Path) -> None:
    model = read_model_config(target)
    write_draft(tmp_path / "a", model, ship_embed=True, tie_word_embeddings=True,
                edit=lambda config, tensors: tensors.pop("lm_head.weight"))  # fmt: skip
    for name in [name for name in FOLDERS if name != "specforge"]:
        convert(tmp_path / "a", tmp_path / name, ConvertConfig(name), target)
        assert open_draft(tmp_path / name, model, DraftOverrides()).has_tied_head
        convert(tmp_path / name, tmp_path / f"{name}-back", ConvertConfig("specforge"), target)
        assert (tmp_path / f"{name}-back" / CONFIG).read_bytes() == (tmp_path / "a" / CONFIG).read_bytes()
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings=true: llama\.cpp takes the target's head"):
        convert(tmp_path / "a", tmp_path / "a.gguf", ConvertConfig("gguf"), target)


def test_any_provenance_is_read_or_passed_over(target: Path, tmp_path: Path) -> None:
    write_draft(tmp_path / "a", read_model_config(target))
    origin = {"format": "speculators", "layer": "layers.0", "tensors": {}, "metadata": None, "config": "[]"}
    metadata = ({"metadata": each} for each in ("x", ["x"], {"format": 1}))
    origins = (origin, origin | {"config": 1}, origin | {"config": '{"a": 1}'}, *(origin | each for each in metadata))
    for i, value in enumerate((None, 1, "x", [], {}, *origins)):
        edit_json(tmp_path / "a" / CONFIG, lambda config, value=value: config.update(provenance=value))
        done = convert(tmp_path / "a", tmp_path / f"b{i}", ConvertConfig("speculators"), target)
        assert not done.is_restored


def test_blocks_of_a_gguf_draft_become_floats_and_are_told(target: Path, tmp_path: Path) -> None:
    from aquiline.backends.torch.decoder import load_target
    from aquiline.backends.torch.eagle import load_draft
    from aquiline.models.formats import draft_arrays
    from aquiline.models.gguf.draft_file import GGUFDraft

    write_target(tmp_path / "wide", hidden_size=64)
    decoder = load_target(tmp_path / "wide", dtype="float32")
    write_draft(tmp_path / "a", decoder.config)
    weights = load_draft(tmp_path / "a", decoder).weights()
    arrays = draft_arrays(weights, "layers.0", embed=False) | {"d2t": weights.d2t}
    GGUFDraft(weights.config, arrays, "int8").write(tmp_path / "q.gguf")
    done = convert(tmp_path / "q.gguf", tmp_path / "b", ConvertConfig("specforge"), tmp_path / "wide")
    assert "fc.weight (Q8_0)" in done.notices[-1]
    found: dict[str, Tensor] = load_file(tmp_path / "b" / WEIGHTS)
    error = (found["fc.weight"] - torch.from_numpy(arrays["fc.weight"])).abs().max()
    assert found["fc.weight"].dtype == torch.float32 and 0 < error < 0.01
