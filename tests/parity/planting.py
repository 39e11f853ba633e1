"""Pairs with one mistake in each: in a copy of a checkpoint, in weights, or in a module."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import edit_json, write_draft, write_target

from aquiline.backends.torch import decoder as modules
from aquiline.backends.torch.decoder import DecoderLayer
from aquiline.backends.torch.torch_pages import PagedAttention
from aquiline.config import Environment
from aquiline.engine.model import LoadedModels, Loading, ResolvedPair, from_weights
from aquiline.models.families import read_model_config
from aquiline.models.formats import read_draft_weights
from aquiline.models.load import read_target
from aquiline.models.model_config import LAYER_IDS
from aquiline.parity.diagnose import transposed
from aquiline.parity.parity_choice import ParityChoice
from aquiline.parity.run import Parity, beside_references, observe

PROMPT = [int(i) for i in np.random.default_rng(3).integers(3, 96, 40)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
NATIVE, TORCH = Environment(None, 1), Environment("off", 1)


def capturing(*ids: int, **marks: Any) -> dict[str, Any]:
    """The fields of a config that captures these layers, in the numbering of its producer."""
    return {"eagle_config": {LAYER_IDS: list(ids), **marks}}


CAPTURE = capturing(0, 1, 2)


def pair_of(
    folder: Path, family: str = "llama", draft: str = "specforge", environment: Environment = NATIVE,
    target_fields: dict[str, Any] | None = None, is_tame: bool = False, **fields: Any,
) -> ResolvedPair:  # fmt: skip
    """Write a random pair and name it. is_tame: its d2t may be negated and stays in the vocabulary."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96}
    write_target(folder / "target", family, **(sizes | (target_fields or {})))
    config = read_model_config(folder / "target")

    def tame(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        Vd = len(tensors["d2t"])
        tensors["d2t"] = torch.where(torch.arange(Vd) < Vd // 2, 0, Vd // 4)
        tensors["t2d"][:] = False
        tensors["t2d"][torch.arange(Vd) + tensors["d2t"]] = True

    write_draft(folder / "draft", config, draft, edit=tame if is_tame else None, **CAPTURE | fields)
    return named(folder / "target", folder / "draft", environment)


def named(target: Path, draft: Path | None, environment: Environment) -> ResolvedPair:
    return ResolvedPair.find(target, draft, Loading("float32"), environment)


def judge(
    planted: ResolvedPair, sound: ResolvedPair, reference: str = "both", models: LoadedModels | None = None
) -> Parity:
    """What a planted pair computes, beside the references of the sound one."""
    return beside_references(observe(planted, PROMPT, models), sound, ParityChoice(reference))


Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def copied(place: Path, to: Path, edit: Edit) -> Path:
    """A copy of a checkpoint with one change."""
    shutil.copytree(place, to)
    tensors = load_file(to / "model.safetensors")
    edit_json(to / "config.json", lambda config: edit(config, tensors))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, to / "model.safetensors", {"format": "pt"})
    return to


@dataclass(frozen=True)
class Plant:
    """A mistake. edit: of a copy of the draft, or of the target; weights: d2t of the draft; module: patches torch's
    modules. cause: words that its name must have; model: whose stages differ."""

    cause: str
    model: str = "draft"
    edit: Edit | None = None
    offsets: Callable[[np.ndarray], np.ndarray] | None = None
    module: Callable[[pytest.MonkeyPatch, Any], None] | None = None
    family: str = "llama"
    target_fields: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    draft: str = "specforge"

    def planted(self, folder: Path, patch: pytest.MonkeyPatch) -> Parity:
        """The comparison of the planted pair with the sound one's references."""
        environment = NATIVE if self.module is None else TORCH
        fields = {"target_fields": self.target_fields, **self.fields}
        sound = pair_of(folder, self.family, self.draft, environment, **fields)
        assert sound.draft is not None
        bad, models = sound, None
        if self.edit is not None:
            place = sound.draft if self.model == "draft" else sound.target
            copy = copied(place, folder / "copy", self.edit)
            bad = replace(sound, **{self.model: copy})
        if self.offsets is not None:
            target = read_target(sound.target, dtype="float32", capture=(0, 1, 2))
            draft = read_draft_weights(sound.draft, target)
            models = from_weights(target, replace(draft, d2t=self.offsets(draft.d2t)), None, sound.how, environment)
        if self.module is not None:
            models = sound.load()
            self.module(patch, models.pair)
        reference = "eager" if self.model == "draft" else "transformers"
        return judge(bad, sound, reference, models)


def set_field(**values: Any) -> Edit:
    return lambda config, tensors: config.update(values)


def swap(one: str, two: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if one in name]:
            other = name.replace(one, two)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return edit


def change(part: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if part in name]
        assert names, part
        tensors.update({name: how(tensors[name]) for name in names})

    return edit


def turned(num_heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rows: torch.from_numpy(transposed(rows.numpy(), num_heads).copy())


def turned_columns(num_heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda weight: torch.from_numpy(transposed(weight.numpy().T, num_heads).T.copy())


def neighbours(patch: pytest.MonkeyPatch, pair: Any) -> None:
    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second, cos, sin = x[..., ::2], x[..., 1::2], cos[..., None, :], sin[..., None, :]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)

    patch.setattr(modules.ops, "rope", rope)


def mask(by: int) -> Callable[[pytest.MonkeyPatch, Any], None]:
    def plant(patch: pytest.MonkeyPatch, pair: Any) -> None:
        sound = PagedAttention._attend

        def attend(self: Any, layer: int, block: Any, *rest: Any) -> torch.Tensor:
            order, keys = block.order[..., None], block.key_order[:, None]
            visible = block.visible & (keys != order) if by < 0 else block.visible | (keys == order + 1)
            empty = ~visible.any(-1, keepdim=True)  # a row that sees nothing sees a key without a value
            out = sound(self, layer, replace(block, visible=visible | empty), *rest)
            return torch.where(empty.flatten(0, 1), 0.0, out)

        patch.setattr(PagedAttention, "_attend", attend)

    return plant


def without_norm(name: str, of_draft: bool) -> Callable[[pytest.MonkeyPatch, Any], None]:
    def plant(patch: pytest.MonkeyPatch, pair: Any) -> None:
        sound, head = DecoderLayer.norm, pair.head

        def norm(self: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            owner = head if name in ("hidden_norm", "norm") else self
            is_planted = (self is head.layer) == of_draft and weight is getattr(owner, name)
            return x if is_planted else sound(self, x, weight)

        patch.setattr(DecoderLayer, "norm", norm)

    return plant


def drop(part: str, **values: Any) -> Edit:
    """Leave out tensors, and say so in the config."""

    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if part in name]
        assert names, part
        for name in names:
            del tensors[name]
        config.update(values)

    return edit


def unit_norm(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["norm_before_fc"] = True
    tensors["input_norm.weight"] = torch.ones(tensors["fc.weight"].shape[1])


OURS = {"producer": "aquiline"}
BIASED = {"attention_bias": True, "mlp_bias": True}
MARK = {"use_last_layernorm": True}
"""One of those that tell NVIDIA's drafts."""
GPT_OSS = {"num_hidden_layers": 4}
PLANTS: dict[str, Plant] = {
    "base": Plant("RoPE base", edit=set_field(rope_theta=10000.0)),
    "scaling": Plant("scaling is off", edit=set_field(rope_scaling=None), fields=OURS | {"rope_scaling": YARN}),
    "truncate": Plant("truncate", edit=set_field(rope_scaling=YARN | {"truncate": False}),
                      fields=OURS | {"rope_scaling": YARN | {"truncate": True}}),
    "attention factor": Plant("factor on cos", edit=set_field(rope_scaling=YARN | {"attention_factor": 1.0}),
                              fields=OURS | {"rope_scaling": YARN}),
    "rotation": Plant("neighbours", module=neighbours),
    "gate and up": Plant("gate and up are swapped", edit=swap("gate_proj", "up_proj")),
    "q heads": Plant("heads of q", edit=change("q_proj", turned(4))),
    "k heads": Plant("heads of k", edit=change("k_proj", turned(2))),
    "v heads": Plant("heads of v", edit=change("v_proj", turned(2))),
    "o heads": Plant("heads of o", edit=change("o_proj", turned_columns(4))),
    "capture +1": Plant("captured layers are +1", edit=set_field(**capturing(1, 2, 3))),
    "capture -1": Plant("captured layers are -1", edit=set_field(**capturing(0, 1, 2)), fields=capturing(1, 2, 3)),
    "NVIDIA's ids -1": Plant("captured layers are -1", edit=set_field(**capturing(0, 1, 2, **MARK)),
                             fields=capturing(1, 2, 3), draft="nvidia"),
    "NVIDIA's ids +1": Plant("captured layers are +1", edit=set_field(**capturing(1, 2, 3, **MARK)), draft="nvidia"),
    "d2t as ids": Plant("read as ids", offsets=lambda d2t: d2t - np.arange(len(d2t))),
    "d2t negated": Plant("d2t is negated", offsets=np.negative, fields={"is_tame": True}),
    "d2t ignored": Plant("d2t is ignored", offsets=np.zeros_like),
    "hidden_norm": Plant("hidden_norm is missing", module=without_norm("hidden_norm", True)),
    "embedding": Plant("before attention is missing", module=without_norm("input_norm", True)),
    "post_norm": Plant("before the MLP is missing", module=without_norm("post_norm", True)),
    "norm": Plant("norm is missing", module=without_norm("norm", True)),
    "residual": Plant("residual is the normed", edit=set_field(norm_before_residual=True), fields=OURS),
    "raw residual": Plant("residual is the raw", edit=set_field(norm_before_residual=False),
                          fields=OURS | {"norm_before_residual": True}),
    "feedback": Plant("normed output is fed back", edit=set_field(norm_output=True), fields=OURS),
    "fc norm added": Plant("features are normed", edit=unit_norm, fields=OURS),
    "input_norm": Plant("input_norm is missing", edit=drop("input_norm.weight", norm_before_fc=False),
                        fields={"norm_before_fc": True}),
    "fc_norm": Plant("fc_norm is missing", edit=drop("fc_norm", fc_norm=False), fields={"fc_norm": True}),
    "draft biases": Plant("biases of every linear", edit=drop(".bias", attention_bias=False, mlp_bias=False),
                          fields=BIASED, draft="nvidia"),
    "draft attention biases": Plant("biases of every linear", edit=drop(".bias", attention_bias=False),
                                    fields={"attention_bias": True}, draft="nvidia"),
    "draft o bias": Plant("biases of o", edit=change("o_proj.bias", torch.zeros_like), fields=OURS | BIASED),
    "draft down bias": Plant("biases of down", edit=change("down_proj.bias", torch.zeros_like), fields=OURS | BIASED),
    "mask -1": Plant("mask -1", module=mask(-1)),
    "mask +1": Plant("mask +1", module=mask(1)),
    "window": Plant("window is off", edit=set_field(sliding_window=None), fields=OURS | {"sliding_window": 8}),
    "window + 1": Plant("one key longer", edit=set_field(sliding_window=9), fields=OURS | {"sliding_window": 8}),
    "target base": Plant("RoPE base", "target", set_field(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
                         target_fields={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "target scaling": Plant("scaling is off", "target",
                            set_field(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
                            target_fields={"rope_parameters": YARN | {"rope_theta": 1e4}}),
    "target rotation": Plant("neighbours", "target", module=neighbours),
    "target gate and up": Plant("gate and up are swapped", "target", swap("gate_proj", "up_proj")),
    "target heads": Plant("heads of q", "target", change("q_proj", turned(4))),
    "target mask -1": Plant("mask -1", "target", module=mask(-1)),
    "target mask +1": Plant("mask +1", "target", module=mask(1)),
    "target window": Plant("window is off", "target", set_field(sliding_window=None), family="mistral",
                           target_fields={"sliding_window": 8}),
    "biases": Plant("biases of q, k and v", "target", change("_proj.bias", torch.zeros_like), family="qwen2"),
    "q_norm": Plant("norm of q is missing", "target", module=without_norm("q_norm", False), family="qwen3"),
    "norms from one": Plant("adds 1", "target", change("input_layernorm", lambda w: w + 1), family="gemma3_text"),
    "router": Plant("router", "target", set_field(norm_topk_prob=False), family="qwen3_moe"),
    "sinks": Plant("sinks are off", "target", change("sinks", lambda s: s * 0 - 1e4), family="gpt_oss",
                   target_fields=GPT_OSS),
    "experts' biases": Plant("biases of down", "target", change("down_proj_bias", torch.zeros_like),
                             family="gpt_oss", target_fields=GPT_OSS),
    "target window of gpt-oss": Plant("one key shorter", "target", set_field(sliding_window=7), family="gpt_oss",
                                      target_fields=GPT_OSS),
}  # fmt: skip
"""One mistake each; what names it."""
