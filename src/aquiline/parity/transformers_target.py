"""A target in transformers, eager and float32: the values of its stages, and its layers as the reference has layers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from aquiline.backends.torch.rounding import rounded
from aquiline.models.files import is_gguf
from aquiline.ops.quantise import QUANTISED
from aquiline.parity.record import Row, StageRecord
from aquiline.parity.reference_draft import Array, Layer, ReferenceRope

_ACTIVATIONS: dict[str, Literal["geglu", "clamped"]] = {"gemma3_text": "geglu", "gpt_oss": "clamped"}


class TransformersTarget:
    """transformers' own model of a checkpoint that `resolve` found, its linears rounded as `dtype` stores them: to the
    values of codes for int8 and int4, else not at all. A router is never rounded, nor are experts that are blocks."""

    def __init__(self, checkpoint: Path, dtype: str = "float32") -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        place, how = (checkpoint.parent, {"gguf_file": checkpoint.name}) if is_gguf(checkpoint) else (checkpoint, {})
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, **how
        )
        self.model, self.config = model.eval(), model.config
        if dtype in QUANTISED:
            round_linears(model, dtype)
        self.texts: dict[tuple[int, ...], list[Array]] = {}

    def values(self, tokens: tuple[int, ...]) -> list[Array]:
        """The input of every layer, the output of the last one, and the logits, [T, ...] each, of a whole text."""
        if tokens not in self.texts:
            seen: list[Array] = []
            layers = self.model.model.layers
            hooks = [layer.register_forward_pre_hook(_keep(seen), with_kwargs=True) for layer in layers]
            hooks.append(layers[-1].register_forward_hook(lambda _, args, out: seen.append(_floats(out))))
            try:
                with torch.inference_mode():
                    logits = self.model(torch.tensor([tokens]), use_cache=False).logits
            finally:
                for hook in hooks:
                    hook.remove()
            self.texts[tokens] = [*seen, _floats(logits)]
        return self.texts[tokens]

    def record(self, prompt: tuple[int, ...], rows: Iterable[Row]) -> StageRecord:
        """The target's stages at rows. Rows of one text are computed in one forward."""
        found, whole = StageRecord(prompt), dict[tuple[int, ...], list[Row]]()
        for row in sorted(rows, key=lambda row: -len(row.tokens)):
            text = next((text for text in whole if text[: len(row.tokens)] == row.tokens), row.tokens)
            whole.setdefault(text, []).append(row)
        for text, own in whole.items():
            *layers, logits = self.values(text)
            at = [row.position for row in own]
            for number, values in enumerate(layers[1:]):
                found.add(f"target.layers.{number}", own, values[at])
            found.add("target.final_hidden", own, layers[-1][at])
            found.add("target.logits", own, logits[at])
        return found

    def text_of(self, row: Row) -> tuple[int, ...]:
        """A text that was computed and has the row."""
        return next(text for text in self.texts if text[: len(row.tokens)] == row.tokens)

    def layer(self, number: int) -> Layer:
        """A layer as the reference runs it, from transformers' weights and what its modules say of themselves."""
        module, c = self.model.model.layers[number], self.config
        own = {name: _numpy(weight) for name, weight in module.named_parameters()}
        attention, one = module.self_attn, 1.0 if c.model_type == "gemma3_text" else 0.0
        norms = {name.removesuffix(".weight"): w + one for name, w in own.items() if "norm" in name}
        has_four = "pre_feedforward_layernorm" in norms
        after = norms["post_attention_layernorm"]
        biases = {n: own[at] for n in "qkvo" if (at := f"self_attn.{n}_proj.bias") in own}
        mlp, mlp_biases = _mlp(own)
        window = getattr(attention, "sliding_window", None) or (c.sliding_window if c.model_type == "mistral" else 0)
        matrices: dict[str, Any] = {n: own[f"self_attn.{n}_proj.weight"] for n in "qkvo"}
        return Layer(
            **matrices, **mlp, biases=biases | mlp_biases, input_norm=norms["input_layernorm"],
            post_norm=norms["pre_feedforward_layernorm"] if has_four else after,
            attention_out_norm=after if has_four else None, mlp_out_norm=norms.get("post_feedforward_layernorm"),
            q_norm=norms.get("self_attn.q_norm"), k_norm=norms.get("self_attn.k_norm"),
            sinks=own.get("self_attn.sinks"), num_heads=c.num_attention_heads, num_kv_heads=c.num_key_value_heads,
            eps=c.rms_norm_eps, rope=self._rope(number), scale=float(attention.scaling), window=int(window or 0),
            activation=_ACTIVATIONS.get(c.model_type, "swiglu"), limit=getattr(c, "swiglu_limit", 0.0) or 0.0,
            per_token=getattr(c, "num_experts_per_tok", 0) or 0,
            over_all=not getattr(c, "norm_topk_prob", True),
        )  # fmt: skip

    def final_norm(self) -> tuple[Array, Array]:
        """The weights of the final norm and of the head [V, H]."""
        one = 1.0 if self.config.model_type == "gemma3_text" else 0.0
        return _numpy(self.model.model.norm.weight) + one, _numpy(self.model.lm_head.weight)

    def _rope(self, number: int) -> ReferenceRope:
        fields = dict(self.config.rope_parameters)
        if all(isinstance(value, dict) for value in fields.values()):
            fields = fields[self.config.layer_types[number]]
        numbers = {name: float(v) for name, v in fields.items() if isinstance(v, int | float)}
        numbers.setdefault("original_max_position_embeddings", float(self.config.max_position_embeddings))
        return ReferenceRope(numbers.pop("rope_theta", 10000.0), fields.get("rope_type", "default"), numbers)


@torch.no_grad()
def round_linears(model: Any, dtype: str) -> None:
    """Replace the weights of all linears, stacks of experts included, by those that their codes stand for."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            is_stack = weight.dim() == 3 and not hasattr(model.config, "quantization_config")
            if not (is_stack or (isinstance(module, torch.nn.Linear) and weight.dim() == 2)):
                continue
            turns = is_stack and model.config.model_type == "gpt_oss"  # [E, In, Out]
            rows = weight.mT if turns else weight
            stored = rows.reshape(-1, rows.shape[-1]).bfloat16()  # as weights are read that become codes
            values = rounded(name, stored, dtype).view(rows.shape)
            setattr(module, name, torch.nn.Parameter(values.mT if turns else values))


def _mlp(own: dict[str, Array]) -> tuple[dict[str, Any], dict[str, Array]]:
    """gate, up, down and, of experts, router, with the biases of those that have one."""
    if "mlp.gate_proj.weight" in own:
        names = ("gate", "up", "down")
        return (
            {n: own[f"mlp.{n}_proj.weight"] for n in names},
            {n: own[at] for n in names if (at := f"mlp.{n}_proj.bias") in own},
        )
    gate_up, down = own["mlp.experts.gate_up_proj"], own["mlp.experts.down_proj"]
    if "mlp.gate.weight" in own:  # Qwen: [E, 2 I, H], the gate's rows first
        gate, up = np.split(gate_up, 2, axis=1)
        return {"gate": gate, "up": up, "down": down, "router": own["mlp.gate.weight"]}, {}
    rows, bias = gate_up.swapaxes(1, 2), own["mlp.experts.gate_up_proj_bias"]  # gpt-oss: [E, H, 2 I], rows alternate
    return (
        {"gate": rows[:, ::2], "up": rows[:, 1::2], "down": down.swapaxes(1, 2), "router": own["mlp.router.weight"]},
        {"gate": bias[:, ::2], "up": bias[:, 1::2], "down": own["mlp.experts.down_proj_bias"],
         "router": own["mlp.router.bias"]},
    )  # fmt: skip


def _keep(seen: list[Array]) -> Any:
    def hook(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(_floats(args[0] if args else kwargs["hidden_states"]))

    return hook


def _floats(value: Any) -> Array:
    """A module's output, without the batch."""
    return _numpy((value[0] if isinstance(value, tuple) else value)[0])


def _numpy(tensor: torch.Tensor) -> Array:
    found: Array = tensor.detach().float().numpy()
    return found
