"""A small target that answers in the Harmony format, and a random draft for it.

Its layers add nothing, so a token alone decides the next one. Where a token comes twice, as <|channel|> does, it has
several next tokens, one after the other: those that were written are made less likely by presence_penalty 2."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import write_draft, write_target
from tests.text.families import HARMONY, byte_tokenizer
from tokenizers import Tokenizer

from aquiline.models.load import read_model_config

WORDS = ("assistant", "analysis", "final", "commentary to=functions.add ", "json", "Hm", "Yes", '{"a": 2}')
ARGUMENTS = '{"a": 2}'
NEXT = {
    "assistant": ["<|channel|>"],
    "<|channel|>": ["analysis", "final", "commentary to=functions.add "],
    "analysis": ["<|message|>"],
    "final": ["<|message|>"],
    "commentary to=functions.add ": ["<|constrain|>"],
    "<|constrain|>": ["json"],
    "json": ["<|message|>"],
    "<|message|>": ["Hm", "Yes", ARGUMENTS],
    "<|end|>": ["<|start|>"],
    "<|start|>": ["assistant"],
    ARGUMENTS: ["<|call|>"],
}
"""The likely next tokens, the likeliest first."""

ENDINGS = {"Hm": ("🦅", "<|end|>"), "Yes": ("é", "<|return|>")}
"""A character after a word, byte by byte, and the token after it."""

ANSWER = "<|channel|>analysis<|message|>Hm🦅<|end|><|start|>assistant<|channel|>final<|message|>Yesé<|return|>"
CALL = (
    "<|channel|>analysis<|message|>Hm🦅<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)


def harmony_tokenizer() -> Tokenizer:
    """A token per byte, the markers, and a token for each word of the answers."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(WORDS))
    return tokenizer


def next_tokens(tokenizer: Tokenizer) -> dict[int, list[int]]:
    """NEXT and ENDINGS as token ids."""
    found = {tokenizer.token_to_id(a): [tokenizer.token_to_id(b) for b in several] for a, several in NEXT.items()}
    for word, (character, end) in ENDINGS.items():
        chain = tokenizer.encode(word + character + end, add_special_tokens=False).ids
        found |= {a: [b] for a, b in pairwise(chain)}
    return found


def write_harmony_pair(root: Path) -> None:
    """Write root/target and root/draft."""
    tokenizer, target = harmony_tokenizer(), root / "target"
    ends = [tokenizer.token_to_id(end) for end in ("<|return|>", "<|endoftext|>", "<|call|>")]
    size = tokenizer.get_vocab_size()
    write_target(target, vocab_size=size, max_position_embeddings=2048, eos_token_id=ends)
    file = target / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name or "embed_tokens" in name or "lm_head" in name:
            tensor.zero_()
    tensors["model.norm.weight"].fill_(1.0)
    scale = tensors["model.norm.weight"].shape[0] ** 0.5  # what the norm makes of a one
    for place, (token, several) in enumerate(next_tokens(tokenizer).items()):
        tensors["model.embed_tokens.weight"][token, place] = 1.0
        tensors["lm_head.weight"][several, place] = (10 - torch.arange(len(several)) * 0.8) / scale
    save_file(tensors, file, {"format": "pt"})
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "chat_template.jinja").write_text(HARMONY)
    write_draft(root / "draft", read_model_config(target))
