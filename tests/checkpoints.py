"""Small random checkpoints on disk, laid out as Hugging Face, SpecForge, SafeAILab, speculators and ModelOpt do it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aquiline.models.model_config import ModelConfig

Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "eos_token_id": 2,
    "bos_token_id": 1,
}

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 4, "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 96}
MOES: dict[str, dict[str, Any]] = {
    "gpt_oss": EXPERTS | {
        "num_local_experts": 8, "intermediate_size": 96, "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 128,
        },
    },
    "qwen3_moe": EXPERTS | {"num_experts": 8, "moe_intermediate_size": 96, "norm_topk_prob": True},
}  # fmt: skip


MARKS: dict[str, Any] = {
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
}  # fmt: skip
"""What ModelOpt exports as eagle_config, for a target of 8 layers."""


def write_target(
    directory: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "1GB",
    **overrides: Any,
) -> Any:
    """Write a random target with transformers' own classes and return the transformers model (eager, eval).

    Norm weights and biases are random too, so that forgetting one shows. Overrides are config fields."""
    import transformers

    name = {
        "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gpt_oss": "GptOss",
        "qwen3_moe": "Qwen3Moe", "gemma3_text": "Gemma3",
    }[family]  # fmt: skip
    kind = "TextConfig" if family == "gemma3_text" else "Config"
    fields = {key: value for key, value in SMALL.items() if family != "qwen2" or key != "head_dim"}
    fields |= MOES.get(family, {})
    if family == "qwen2":
        fields["hidden_size"] = 64
    if family == "mistral":
        fields["sliding_window"] = None
    if family == "gemma3_text":
        fields |= {"sliding_window": 24, "query_pre_attn_scalar": 16}
    config = getattr(transformers, name + kind)(**fields | overrides)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 or key.endswith("bias"):
                is_from_zero = (
                    key.endswith(("bias", "sinks")) or family == "gemma3_text"
                )  # whose norms add 1 themselves
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (0.0 if is_from_zero else 1.0))
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def write_mxfp4(directory: str | Path, *, seed: int = 0, **overrides: Any) -> None:
    """Write a random gpt_oss target whose experts are in MXFP4: random nibbles, and scales around 2^-6."""
    place = Path(directory)
    write_target(place, "gpt_oss", seed=seed, dtype=torch.bfloat16, **overrides)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(place / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, rows = tensors.pop(name).shape
        shape = num_experts, rows, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    edit_json(place / "config.json", lambda c: c.update(quantization_config={"quant_method": "mxfp4"}))


def edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(file.read_text())
    edit(data)
    file.write_text(json.dumps(data))


def draft_vocabulary(target_vocab: int, size: int, seed: int = 0) -> Tensor:
    """`size` ascending target ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(target_vocab, generator=generator)[:size].sort().values


def draft_tensors(
    config: dict[str, Any], target: ModelConfig, layer: str = "midlayer", *, seed: int = 1, num_features: int = 3
) -> dict[str, Tensor]:
    """Random tensors of an EAGLE-3 head of `config`, d2t and t2d included, embedding not."""
    generator = torch.Generator().manual_seed(seed)
    H, Dh, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    Hq, Hkv, Vd = config["num_attention_heads"], config["num_key_value_heads"], config["draft_vocab_size"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.12

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": normal(H, num_features * target.hidden_size),
        f"{layer}.self_attn.q_proj.weight": normal(Hq * Dh, 2 * H),
        f"{layer}.self_attn.k_proj.weight": normal(Hkv * Dh, 2 * H),
        f"{layer}.self_attn.v_proj.weight": normal(Hkv * Dh, 2 * H),
        f"{layer}.self_attn.o_proj.weight": normal(H, Hq * Dh),
        f"{layer}.mlp.gate_proj.weight": normal(inner, H),
        f"{layer}.mlp.up_proj.weight": normal(inner, H),
        f"{layer}.mlp.down_proj.weight": normal(H, inner),
        f"{layer}.hidden_norm.weight": norm(H),
        f"{layer}.input_layernorm.weight": norm(H),
        f"{layer}.post_attention_layernorm.weight": norm(H),
        "norm.weight": norm(H),
        "lm_head.weight": normal(Vd, H),
    }
    ids = draft_vocabulary(target.vocab_size, Vd, seed)
    tensors["d2t"] = ids - torch.arange(Vd)
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool)
    tensors["t2d"][ids] = True
    generator.manual_seed(seed + 2)
    sizes = {"q": Hq * Dh, "k": Hkv * Dh, "v": Hkv * Dh, "o": H} if config.get("attention_bias") else {}
    tensors |= {f"{layer}.self_attn.{n}_proj.bias": normal(size) for n, size in sizes.items()}
    sizes = {"gate": inner, "up": inner, "down": H} if config.get("mlp_bias") else {}
    tensors |= {f"{layer}.mlp.{n}_proj.bias": normal(size) for n, size in sizes.items()}
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(target.hidden_size) for i in range(num_features)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(num_features * target.hidden_size)
    return tensors


def write_draft(
    directory: str | Path,
    target: ModelConfig,
    format: str = "specforge",
    *,
    seed: int = 1,
    ship_embed: bool = False,
    dtype: torch.dtype = torch.float32,
    edit: Edit | None = None,
    **overrides: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a random draft for a target and return its config and tensors; `edit` may change both before they go out.

    format is specforge (model.safetensors), safeailab (pytorch_model.bin, no RoPE base), speculators (nested config) or
    nvidia (its marks, no t2d). Overrides are config fields, flat in every format."""
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    flat: dict[str, Any] = {
        "model_type": "llama", "vocab_size": target.vocab_size, "draft_vocab_size": target.vocab_size // 2,
        "hidden_size": target.hidden_size, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }  # fmt: skip
    if format != "safeailab":
        flat["rope_theta"] = 500000.0
    flat |= overrides
    layer = "layers.0" if format in ("speculators", "nvidia") else "midlayer"
    tensors = draft_tensors(flat, target, layer, seed=seed)
    if format == "nvidia":
        del tensors["t2d"]
    if ship_embed:
        generator = torch.Generator().manual_seed(seed + 1)
        tensors["embed_tokens.weight"] = torch.randn(target.vocab_size, flat["hidden_size"], generator=generator)
    config = _layout(flat, format)
    if edit is not None:
        edit(config, tensors)
    tensors = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
    (place / "config.json").write_text(json.dumps(config, indent=2))
    if format == "safeailab":
        torch.save(tensors, place / "pytorch_model.bin")
    else:
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return config, tensors


def _layout(flat: dict[str, Any], format: str) -> dict[str, Any]:
    if format == "safeailab":
        return {"architectures": ["LlamaForCausalLM"], **flat}
    if format == "specforge":
        return {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "bfloat16", "rope_scaling": None, **flat}
    if format == "nvidia":
        own = flat.pop("eagle_config", {})
        return {"architectures": ["LlamaForCausalLMEagle3"], **flat, "eagle_config": MARKS | own}
    top = {"draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
           "eagle_aux_hidden_state_layer_ids"}  # fmt: skip
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "norm_before_residual": False,
        "transformer_layer_config": {k: v for k, v in flat.items() if k not in top},
        **{k: v for k, v in flat.items() if k in top},
    }
