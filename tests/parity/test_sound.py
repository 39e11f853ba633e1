"""Sound pairs are within their tolerances: families, layouts of drafts, storages, backends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, RopeScalingType
from safetensors.numpy import load_file, save_file
from tests.conftest import needs_native
from tests.parity.planting import CAPTURE, NATIVE, PROMPT, TORCH, YARN, capturing, judge, named, pair_of

from aquiline.config import ConvertConfig
from aquiline.models.conversion import convert
from aquiline.models.families import FAMILIES
from aquiline.models.gguf.metadata import LLAMA3 as FACTORLESS
from aquiline.models.gguf.writer import finish
from aquiline.models.model_config import LAYER_IDS
from aquiline.parity.parity_choice import ParityChoice
from aquiline.parity.record import Row, StageRecord, load, save
from aquiline.parity.reference_files import read_reference
from aquiline.parity.run import beside, beside_references, compare_pair, observe

pytestmark = needs_native

IDS = CAPTURE["eagle_config"][LAYER_IDS]
ENTERED = {"eagle_config": None, LAYER_IDS: [i + 1 for i in IDS]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, **FACTORLESS}
PAIRS: dict[str, dict[str, Any]] = {
    **{family: {"family": family} for family, kind in FAMILIES.items() if kind.architecture},
    "torch": {"environment": TORCH, "producer": "aquiline", "sliding_window": 8},
    "speculators": {"draft": "speculators", "norm_output": True, **ENTERED},
    "yarn": {"rope_scaling": YARN},
    "fed back": {"producer": "aquiline", "norm_output": True, "norm_before_residual": True},
    "window": {"producer": "aquiline", "sliding_window": 8},
}
CHEAP = ("llama", "torch")
RARE = ("gpt_oss", "speculators")
WINDOWS = {"mistral": {"sliding_window": 24}}


def costs(name: str) -> object:
    marks = [] if name in CHEAP else [pytest.mark.rare if name in RARE else pytest.mark.slow]
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [costs(name) for name in PAIRS])
def test_sound_pairs_agree_with_both_references(name: str, tmp_path: Path) -> None:
    fields = dict(PAIRS[name])
    family = fields.get("family", "llama")
    pair = pair_of(tmp_path, target_fields=WINDOWS.get(family), **fields)
    found = judge(pair, pair)
    assert found.is_good, found.findings
    assert all(s.figures.relative.max() < 1e-4 for s in found.stages if s.stage != "draft.tokens")
    phases = {found.seen.record.phase(row) for stage in found.stages for row in stage.rows}
    assert phases == {"prompt", "decode", "tree"}
    seen = {stage.stage for stage in found.stages}
    assert {"target.layers.0", "target.layers.3", "target.logits", "draft.keys", "draft.logits", "draft.tokens"} <= seen
    assert ("draft.attn_out" in seen) == (pair.environment is TORCH) == ("draft.attn_out" not in found.unseen)


def test_of_a_long_text_what_the_window_drops_is_not_compared(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, producer="aquiline", sliding_window=8)
    found = beside_references(observe(pair, PROMPT * 3), pair, ParityChoice("both"))
    assert found.is_good, found.findings
    assert "draft.keys" in {stage.stage for stage in found.stages}


ENDS = {"attention_bias": True, "mlp_bias": True, "norm_before_fc": True}
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nvidia": ("nvidia", capturing(2, 3, 8, return_hidden_post_norm=True) | ENDS),
    "nvidia without ids": ("nvidia", {"eagle_config": {LAYER_IDS: None}, "rope_scaling": LLAMA3}),
    "fc_norm": ("specforge", {"fc_norm": True}),
    "biases": ("speculators", {"attention_bias": True, **ENTERED}),
    "gguf": ("gguf", {"norm_before_fc": True, "norm_before_residual": True}),
    "gguf llama3": ("gguf", {"rope_scaling": LLAMA3}),
    "gguf linear": ("gguf", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
}
"""A draft's format, and what it says beyond a plain head."""


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_of_every_producer_agree_with_the_reference(name: str, tmp_path: Path) -> None:
    """The reference reads fields and tensors by its own rules."""
    layout, fields = DRAFTS[name]
    own = {"producer": "aquiline"} if layout == "gguf" else {}
    target_fields = {"num_hidden_layers": 8}
    pair = pair_of(tmp_path, draft="specforge" if own else layout, target_fields=target_fields, **own, **fields)
    if layout == "gguf":
        assert pair.draft is not None
        convert(pair.draft, tmp_path / "draft.gguf", ConvertConfig(to="gguf"))
        pair = replace(pair, draft=tmp_path / "draft.gguf")
    found = judge(pair, pair, "eager")
    assert found.is_good, found.findings
    assert all(s.figures.relative.max() < 1e-4 for s in found.stages if s.stage != "draft.tokens")


def test_a_rotation_that_the_reference_cannot_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "draft.gguf", "eagle3")
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_tensor("fc.weight", np.zeros((4, 12), np.float32))
    finish(writer)
    with pytest.raises(ValueError, match=r"scaling.type='yarn'.*aquiline convert DRAFT DIR --to aquiline"):
        read_reference(tmp_path / "draft.gguf", 8, np.zeros((6, 4), np.float32), np.zeros((6, 4), np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["auto", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "int4"])
def test_every_storage_is_within_its_tolerance(dtype: str, arithmetic: str, tmp_path: Path) -> None:
    pair = pair_of(tmp_path)
    how = replace(pair.how, dtype=dtype, draft_dtype=dtype, arithmetic=arithmetic)
    stored = replace(pair, how=how, asked=replace(how, draft_dtype="auto"))
    found = judge(stored, pair)
    assert found.is_good, found.findings
    exact = judge(pair, pair)
    assert max(s.figures.max.max() for s in found.stages[:1]) > 10 * max(s.figures.max.max() for s in exact.stages[:1])


def test_a_dump_is_a_reference(tmp_path: Path) -> None:
    pair = pair_of(tmp_path)
    seen = observe(pair, PROMPT)
    save(seen.record, tmp_path / "dump")
    again = load(tmp_path / "dump")
    assert {name: set(rows) for name, rows in again.stages.items()} == {
        name: set(rows) for name, rows in seen.record.stages.items()
    }
    found = beside(seen, again, ParityChoice(f"dump:{tmp_path / 'dump'}"), {})
    assert found.is_good and all(s.figures.max.max() == 0 for s in found.stages if s.stage != "draft.tokens")
    row = Row(tuple(PROMPT[:9]))
    values = again.stages["target.layers.2"][row]
    for other in (-values, 1.1 * values, values + np.float32("nan"), np.roll(values, 1)):
        again.stages["target.layers.2"][row] = other
        [finding] = beside(seen, again, ParityChoice(), {}).findings
        assert (finding.stage, finding.position, finding.phase, finding.causes) == (
            "target.layers.2",
            8,
            "prompt",
            None,
        )
    assert seen.record.stages["target.layers.2"][row].shape == (64,)
    for part, told in (("format", "format="), ("rows", "KeyError"), ("texts", "KeyError")):
        manifest = json.loads((tmp_path / "dump" / "manifest.json").read_text())
        manifest.pop(part)
        manifest |= {"format": "other"} if part == "format" else {}
        (tmp_path / part).mkdir()
        (tmp_path / part / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=told):
            load(tmp_path / part)
    manifest = json.loads((tmp_path / "dump" / "manifest.json").read_text())
    manifest["stages"]["target.sums"] = manifest["stages"].pop("target.logits")
    tensors = load_file(tmp_path / "dump" / "stages.safetensors")
    tensors["target.sums"] = tensors.pop("target.logits")
    save_file(tensors, tmp_path / "dump" / "stages.safetensors")
    (tmp_path / "dump" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest.json: stages='target.sums': must be one of target.layers, "):
        load(tmp_path / "dump")


def test_stages_are_chosen_and_bad_choices_refused(tmp_path: Path) -> None:
    record = StageRecord((1, 2))
    for stage in ("target.layers.3", "target.layers.13", "target.logits", "draft.logits", "draft.keys"):
        record.add(stage, [Row((1,))], np.zeros((1, 2), np.float32))
    for names, kept in {
        ("layers",): 2, ("layers.3",): 1, ("logits",): 2, ("draft.logits", "keys"): 2, ("draft",): 2, (): 5,
    }.items():  # fmt: skip
        assert len(record.only(names).stages) == kept, names
    record.unseen = {"draft.qkv": "inside", "draft.keys": "inside"}
    assert record.only(("keys",)).unseen == {"draft.keys": "inside"} and record.only(()).unseen == record.unseen
    for fields, told in (
        ({"stages": ("attention",)}, "stages='attention'"), ({"reference": "vllm"}, "reference='vllm'"),
        ({"length": 3}, "length=3"), ({"prompt": ""}, "prompt="),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            ParityChoice(**fields)  # type: ignore[arg-type]
    (tmp_path / "manifest.json").touch()
    with pytest.raises(ValueError, match="dump="):
        ParityChoice(dump=tmp_path)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    pair = pair_of(tmp_path)
    alone = named(pair.target, None, NATIVE)
    with pytest.raises(ValueError, match="there is no draft"):
        compare_pair(alone, ParityChoice("eager"))
    with pytest.raises(ValueError, match="length=500: the target has 512 positions"):
        compare_pair(pair, ParityChoice("eager", length=500))
    with pytest.raises(ValueError, match=r"stages='layers.4': the target's last layer is layers.3"):
        compare_pair(pair, ParityChoice("eager", stages=("layers.4",)))
    with pytest.raises(ValueError, match="have none of them in common"):
        compare_pair(pair, ParityChoice("eager", stages=("attn_out",), length=8))
    found = beside_references(observe(alone, PROMPT[:8]), alone, ParityChoice("both"))
    assert found.is_good and {stage.stage.partition(".")[0] for stage in found.stages} == {"target"}
