"""Heads in every format, with every quirk, as the engine serves them: each drafted token is what an independent head
computes from the raw tensors and from the hidden states of transformers, in chains and in trees."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_reference import Reference
from test_rope import transformers_rotary
from tests.backends.playing import Player, Text, words
from tests.checkpoints import MARKS, write_draft, write_target
from tests.conftest import needs_native
from torch import Tensor

from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.config import ConvertConfig, EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.errors import CheckpointError
from aquiline.models.conversion import convert
from aquiline.models.formats import read_draft_config, read_draft_weights
from aquiline.models.load import read_model_config, read_target
from aquiline.models.model_config import LAYER_IDS
from aquiline.spec.drafting import Chain, Static

pytestmark = needs_native
WAYS = (Chain(3), Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))))
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LAST = [4, 6, 8]
"""What enters layers 4 and 6, and what leaves the last of 8: as 24, 30, 36 of 36."""


@dataclass
class Case:
    """A head: its format, the fields of its config, and what of that the reference has to be told."""

    format: str
    fields: dict[str, Any] = field(default_factory=dict)
    capture: tuple[int, ...] = (1, 3, 4)
    theta: float = 500000.0
    told: dict[str, Any] = field(default_factory=dict)
    edit: Callable[[dict[str, Any], dict[str, Tensor]], None] | None = None
    norm_feedback: bool | None = None
    converted_to: str | None = None


def whole_vocabulary(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As gpt-oss-120b-Eagle3 is published: no vocabulary of its own, no head."""
    config["draft_vocab_size"] = None
    for name in ("lm_head.weight", "d2t"):
        del tensors[name]


def as_midlayer(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[f"midlayer.{name.removeprefix('layers.0.')}"] = tensors.pop(name)


BIASES = {"attention_bias": True, "mlp_bias": True}
CASES = {
    "SafeAILab": Case("safeailab", theta=10000.0),
    "SpecForge": Case("specforge"),
    "SpecForge, a norm per feature": Case("specforge", {"fc_norm": True}),
    "SpecForge, norm_output": Case("specforge", {"norm_output": True}, told={"feedback": True}, norm_feedback=True),
    "SpecForge, named layers": Case("specforge", {"eagle_config": {LAYER_IDS: [0, 3, 7]}}, (0, 3, 7)),
    "SpecForge, narrow": Case("specforge", {"hidden_size": 32, "target_hidden_size": 48, "ship_embed": True}),
    "speculators": Case("speculators"),
    "speculators, normed residual": Case("speculators", {"norm_before_residual": True, "norm_before_fc": True}),
    "speculators, norm_output": Case("speculators", {"norm_output": True, "fc_norm": True}, told={"feedback": True}),
    "speculators, the last layer": Case("speculators", {LAYER_IDS: LAST}, (3, 5, 7)),
    "speculators, a window": Case(
        "speculators", {"layer_types": ["sliding_attention"], "sliding_window": 6}, told={"window": 6}
    ),
    "speculators, biases": Case("speculators", BIASES),
    "aquiline, a window": Case("specforge", {"producer": "aquiline", "sliding_window": 6}, told={"window": 6}),
    "gpt-oss-120b-Eagle3": Case("nvidia", {"rope_scaling": LLAMA3}, edit=whole_vocabulary),
    "gpt-oss-120b-Eagle3-v3": Case(
        "nvidia", {"norm_before_fc": True, "eagle_config": {LAYER_IDS: LAST}}, (3, 5, 7), edit=whole_vocabulary
    ),
    "ModelOpt, its own vocabulary": Case("nvidia"),
    "ModelOpt, names of older exports": Case("nvidia", edit=as_midlayer),
    "ModelOpt, biases": Case("nvidia", BIASES),
    "ModelOpt, fed back normed": Case(
        "nvidia", {"eagle_config": {"return_hidden_post_norm": True}}, told={"feedback": True}
    ),
    "llama.cpp": Case("specforge", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, theta=10000.0,
                      converted_to="gguf"),
    "llama.cpp, normed": Case("speculators", {"norm_before_residual": True, "norm_before_fc": True},
                              converted_to="gguf"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    place = tmp_path_factory.mktemp("target")
    return place, write_target(place)


def features(model: Any, tokens: list[int], capture: tuple[int, ...]) -> Tensor:
    """What leaves the captured layers, [T, 3 H]."""
    found: dict[int, Tensor] = {}

    def keep(i: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            found[i] = (output[0] if isinstance(output, tuple) else output).reshape(len(tokens), -1)

        return hook

    hooks = [model.model.layers[i].register_forward_hook(keep(i)) for i in capture]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.cat([found[i] for i in capture], -1)


def check(text: Text, reference: Reference, ids: Tensor, model: Any, capture: tuple[int, ...]) -> int:
    """Every node's children are the tokens with the highest logits of the reference, within 1e-4. Returns how many
    nodes were looked at."""
    looked = 0
    for step, (tokens, parents, _) in zip(text.steps[:3], text.trees, strict=False):
        known = text.tokens[: step.root + 1]
        fused = reference.fuse(features(model, known[:-1], capture))
        for node in sorted(set(parents)):
            path, at = [], node
            while at > 0:
                path.append(tokens[at])
                at = parents[at]
            g, row = fused, torch.tensor(known[1:])
            a = reference.forward(g, row)
            for token in reversed(path):
                g, row = torch.cat((g, reference.next_g(a[-1:]))), torch.cat((row, torch.tensor([token])))
                a = reference.forward(g, row)
            logits = reference.logits(a)[-1]
            below = [i for i in range(1, len(tokens)) if parents[i] == node]  # a root is its own parent
            children = [ids.tolist().index(tokens[i]) for i in below]
            best = logits.topk(len(children)).values
            assert (logits[children] - best).abs().max() < 1e-4
            looked += len(children)
    return looked


@pytest.mark.parametrize("name", CASES)
def test_every_drafted_token_is_the_references(name: str, model: tuple[Path, Any], tmp_path: Path) -> None:
    case, (target_dir, reference_model) = CASES[name], model
    config = read_model_config(target_dir)
    written, tensors = write_draft(tmp_path / "draft", config, case.format, edit=case.edit, **case.fields)
    place = tmp_path / "draft"
    if case.converted_to is not None:
        place = tmp_path / "draft.gguf"
        convert(tmp_path / "draft", place, ConvertConfig(case.converted_to), target_dir)
    target = read_target(target_dir, dtype="float32", capture=case.capture)
    draft = read_draft_weights(place, target, norm_feedback=case.norm_feedback)
    assert draft.config.capture == case.capture

    flat = written | written.get("transformer_layer_config", {})
    table, head = (
        getattr(reference_model, which)().weight for which in ("get_input_embeddings", "get_output_embeddings")
    )
    scaling, inv_freq = flat.get("rope_scaling"), None
    if scaling:
        rest = {key: value for key, value in scaling.items() if key != "rope_type"}
        inv_freq, _ = transformers_rotary(scaling["rope_type"], case.theta, rest, 16)
    reference = Reference(
        flat, tensors, tensors.get("embed_tokens.weight", table), tensors.get("lm_head.weight", head), theta=case.theta,
        layer=next(iter({name.split(".self_attn")[0] for name in tensors if ".self_attn" in name})),
        inv_freq=inv_freq, **case.told,
    )  # fmt: skip
    ids = torch.arange(len(reference.head)) + tensors.get("d2t", torch.tensor(0))
    player = Player(CpuPair(target, draft, "float32", arithmetic="float32"), num_slots=2)
    for way in WAYS:
        player.add(words(13, 1), way, SamplingParams(max_tokens=16, seed=0))
    player.run(7)
    assert [check(text, reference, ids, reference_model, case.capture) for text in player.texts] == [9, 21]


def test_an_llm_drafts_with_a_gguf_file(model: tuple[Path, Any], tmp_path: Path) -> None:
    """A directory that holds nothing else stands for it."""
    write_draft(tmp_path / "draft", read_model_config(model[0]))
    (tmp_path / "file").mkdir()
    convert(tmp_path / "draft", tmp_path / "file" / "draft.gguf", ConvertConfig("gguf"), model[0])
    params = SamplingParams(max_tokens=16, temperature=2.0, seed=1, ignore_eos=True)
    told = []
    for draft in (tmp_path / "draft", tmp_path / "file" / "draft.gguf", tmp_path / "file"):
        with LLM(model[0], draft, dtype="float32", engine=EngineConfig(max_batch=1, calibration=False)) as llm:
            run = llm.run([words(13, 1)], params, drafting=Chain(3))
        told.append((run.outputs[0].token_ids, run.summary.counters))
    assert told[0] == told[1] == told[2]


V2 = {"use_aux_hidden_state": False, LAYER_IDS: []}
"""gpt-oss-120b-Eagle3-v2 reads the target's last hidden state."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (V2, ["use_aux_hidden_state is off", "last hidden state"]),
        ({"use_input_layernorm_in_first_layer": False}, ["use_input_layernorm_in_first_layer=False", "is True"]),
        ({"use_last_layernorm": False}, ["use_last_layernorm=False", "supported is True"]),
        ({"use_mtp_layernorm": True}, ["use_mtp_layernorm=True", "supported is False"]),
        ({"parallel_draft_step": 4}, ["parallel_draft_step=4", "supported is 1"]),
        ({"parallel_draft_step": True}, ["parallel_draft_step=True", "supported is 1"]),
        ({"eh_proj_before_attn": True}, ["eh_proj_before_attn=True", "supported is False"]),
        ({"return_hidden_post_norm": 1}, ["return_hidden_post_norm=1", "true or false"]),
        ({"window": 8}, ["eagle_config has window", "known are"]),
        ({LAYER_IDS: [1, 3, 9]}, [f"{LAYER_IDS}=[1, 3, 9] (output numbering)", "0 .. 7"]),
        ({LAYER_IDS: [2, 4, 5]}, ["input numbering", "NVIDIA ModelOpt declares the output numbering"]),
    ],
)  # fmt: skip
def test_other_heads_of_modelopt_are_refused_by_field(
    change: dict[str, Any], words: list[str], model: tuple[Path, Any], tmp_path: Path
) -> None:
    write_draft(tmp_path, read_model_config(model[0]), "nvidia", eagle_config=change)
    with pytest.raises(CheckpointError) as caught:
        read_draft_config(tmp_path, model[0])
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parallel_drafting": True, "ptd_token_id": 7}, ["parallel_drafting=True", "P-EAGLE"]),
        ({"ptd_token_id": 0}, ["ptd_token_id=0", "P-EAGLE"]),
        ({"pard_token": 7}, ["pard_token=7", "P-EAGLE"]),
        ({"dflash_config": {"mask_token_id": 7}, "num_hidden_layers": 5}, ["dflash_config: ", "DFlash"]),
        ({"speculators_model_type": "peagle"}, ["speculators_model_type='peagle'", "P-EAGLE"]),
        ({"speculators_model_type": "dflash"}, ["speculators_model_type='dflash'", "DFlash"]),
    ],
    ids=str,
)
def test_parallel_heads_are_refused_by_name(
    change: dict[str, Any], words: list[str], model: tuple[Path, Any], tmp_path: Path
) -> None:
    write_draft(tmp_path, read_model_config(model[0]), "specforge")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"parallel_drafting": False, "pard_token": None}))
    assert read_draft_config(tmp_path, model[0]).capture == (1, 3, 4)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError) as caught:
        read_draft_config(tmp_path, model[0])
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("format", ["safeailab", "specforge", "speculators", "nvidia", "aquiline"])
def test_heads_with_latent_keys_are_refused_by_their_field(
    format: str, model: tuple[Path, Any], tmp_path: Path
) -> None:
    target = read_model_config(model[0])
    write_draft(tmp_path, target, format)
    config = json.loads((tmp_path / "config.json").read_text())
    section = config["transformer_layer_config"] if format == "speculators" else config
    section["kv_lora_rank"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_draft_config(tmp_path, model[0]).model.num_kv_heads == 2
    section["kv_lora_rank"] = 64
    for named in (config, config | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}):
        (tmp_path / "config.json").write_text(json.dumps(named))
        with pytest.raises(CheckpointError, match=r"kv_lora_rank=64: its keys are latent \(MLA\).*--draft-window"):
            read_draft_config(tmp_path, model[0])


@pytest.mark.parametrize("change", [{}, {"next_layer_regular": False}, {"parallel_draft_heads_num_layers": 3}], ids=str)
def test_marks_without_effect_are_read(change: dict[str, Any], model: tuple[Path, Any], tmp_path: Path) -> None:
    write_draft(tmp_path, read_model_config(model[0]), "nvidia", eagle_config=change)
    assert read_draft_config(tmp_path, model[0]).capture == (1, 3, 4)


def test_published_heads_of_gpt_oss_120b_by_their_fields(tmp_path: Path) -> None:
    """Configs alone, of the published geometry: 36 layers, and all of the target's vocabulary."""
    target = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 201088, "max_position_embeddings": 131072, "num_local_experts": 128, "num_experts_per_tok": 4,
    }  # fmt: skip
    head = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 2880, "hidden_act": "silu",
        "intermediate_size": 17280, "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 201088, "draft_vocab_size": None, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": LLAMA3,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(target))
    for ids, capture in (([1, 17, 32], (1, 17, 32)), ([24, 30, 36], (23, 29, 35))):
        place = tmp_path / str(ids[0])
        place.mkdir()
        (place / "config.json").write_text(json.dumps(head | {"eagle_config": MARKS | {LAYER_IDS: ids}}))
        found = read_draft_config(place, tmp_path / "target")
        assert (found.capture, found.draft_vocab_size, found.model.intermediate_size) == (capture, 201088, 17280)
