"""What latent keys (MLA) could save of a cycle if a draft had them, by arithmetic, beside what a window saves.

Run: python benchmarks/latent_keys.py [--device h100]. Prints Markdown.

A draft has one layer. A latent draft keeps LATENT elements a token instead of a key and a value per head; here that is
all it changes: no time is charged for the projections from the latent, nor for dot products that are as wide as the
latent. So a cell is the most that latents can save. The target is of Llama-3.1-8B's geometry, with one key and value
head for 1, 2, 4 (the published one) or 8 query heads; the draft is the one that `aquiline limits` assumes, chain of K.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from aquiline.bench.theory.ceilings import Ceilings, ceilings_of
from aquiline.bench.theory.choice import LimitsChoice
from aquiline.bench.theory.roofline import Roofline
from aquiline.models.counting import assumed_draft, shape_of_fields
from aquiline.models.shape import DraftShape, ModelShape
from aquiline.spec.drafting import Chain

CONTEXTS, BATCHES, GROUPS = (8192, 32768, 131_072), (1, 4, 16, 64), (1, 2, 4, 8)
LATENT = 256 + 32
"""Elements of a token: a latent of 256 and a rotated key of 32 for all heads; 0.28 of a GQA of 4, 0.56 of 8."""
WINDOW, K, TAU = 128, 3, 2.5


def target_of(group: int) -> ModelShape:
    """An 8B target with one key and value head for `group` query heads."""
    fields = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32 // group, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
    }  # fmt: skip
    return shape_of_fields(fields, Path("config.json"), "bfloat16")


def with_keys(draft: DraftShape, *, elements: int | None = None, window: int = 0) -> DraftShape:
    """The draft with that many elements of keys and values a token, or with a window."""
    (layer,), precision = draft.body.layers, draft.body.precision
    if elements is not None:  # the same layer and its arithmetic; its keys in fewer bytes
        precision = replace(precision, kv=replace(precision.kv, bits=precision.kv.bits * elements / layer.kv_per_token))
    layer = replace(layer, attention=replace(layer.attention, window=window))
    return replace(draft, body=replace(draft.body, layers=(layer,), precision=precision))


def seconds(target: ModelShape, draft: DraftShape, ceilings: Ceilings, batch: int, context: int) -> float:
    """The least time of a cycle."""
    return Roofline(target, draft, ceilings).cycle(Chain(K), TAU, batch, context).seconds


def cell(target: ModelShape, ceilings: Ceilings, batch: int, context: int) -> str:
    """Of a cycle whose draft keeps all keys per head: the share that latents save, that a window saves, and that
    latents save of a cycle whose draft has the window already. In brackets where the device cannot hold it."""
    draft = assumed_draft(target)
    few = min(LATENT, draft.body.layers[0].kv_per_token)
    full = seconds(target, draft, ceilings, batch, context)
    latent = seconds(target, with_keys(draft, elements=few), ceilings, batch, context)
    window = seconds(target, with_keys(draft, window=WINDOW), ceilings, batch, context)
    both = seconds(target, with_keys(with_keys(draft, elements=few), window=WINDOW), ceilings, batch, context)
    told = f"{1 - latent / full:.1%}, {1 - window / full:.1%}, {1 - both / window:.2%}"
    keys = batch * context * (target.body.kv_bytes_per_token + draft.body.kv_bytes_per_token)
    need = target.stored_bytes + draft.stored_bytes + keys
    has = ceilings.memory_bytes
    return told if has is None or need <= has else f"({told})"


def main() -> None:
    """Print a table for each grouping of heads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--bandwidth", type=float, help="GB/s, in the place of the device's")
    parser.add_argument("--flops", type=float, help="TFLOP/s, in the place of the device's")
    asked = parser.parse_args()
    is_named = asked.bandwidth is None or asked.flops is None
    choice = LimitsChoice(device=asked.device if is_named else None, bandwidth=asked.bandwidth, flops=asked.flops)
    ceilings = ceilings_of(choice, "bfloat16", lambda stage: None)
    print(f"| query heads to a key | context | {' | '.join(f'batch {batch}' for batch in BATCHES)} |")
    print(f"|---|---|{'---|' * len(BATCHES)}")
    for group in GROUPS:
        target = target_of(group)
        for context in CONTEXTS:
            cells = " | ".join(cell(target, ceilings, batch, context) for batch in BATCHES)
            print(f"| {group} | {context // 1024}K | {cells} |")


if __name__ == "__main__":
    main()
