"""A real trained target, where one is named by AQUILINE_TEST_TARGET (run with -m slow)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.dense import DenseAttention

from aquiline.backends.torch.decoder import load_target


@pytest.mark.slow
def test_trained_target_equals_transformers() -> None:
    directory = os.environ.get("AQUILINE_TEST_TARGET")
    if not directory:
        pytest.skip("set AQUILINE_TEST_TARGET to a checkpoint directory")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    ).eval()
    model = load_target(Path(directory), dtype="float32")
    tokens = torch.randint(model.config.vocab_size, (1, 200), generator=torch.Generator().manual_seed(0))
    ours = model.logits(model(tokens, torch.arange(200)[None], DenseAttention(model.config)).hidden)
    theirs = reference(tokens).logits
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    assert ours.argmax(-1).equal(theirs.argmax(-1))
