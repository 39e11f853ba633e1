"""A draft that has learnt one text by heart is never wrong along it: served tau reaches the most a chain can commit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import Chain, NoDraft
from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import train

NUM_SPEC_TOKENS, NUM_NEW = 3, 49


@pytest.mark.rare
def test_served_tau_reaches_its_maximum_on_the_text_learnt(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "target")
    prompt = np.random.default_rng(0).integers(1, 48, 8).tolist()
    sampling = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    written = LLM(target, drafting=NoDraft()).generate([prompt], sampling)[0].token_ids
    row = {"input_ids": prompt + written, "loss_mask": [0] * len(prompt) + [1] * len(written)}
    (tmp_path / "one.jsonl").write_text(json.dumps(row) + "\n")
    config = TrainConfig(
        target=target, data=(tmp_path / "one.jsonl",), held_out=(tmp_path / "one.jsonl",), out=tmp_path / "draft",
        capture=tiny.CAPTURE, context=len(prompt + written) + NUM_SPEC_TOKENS + 2, batch_size=1,
        ttt_steps=NUM_SPEC_TOKENS, steps=200, lr=5e-3, eval_every=1000, eval_tokens=NUM_NEW,
    )  # fmt: skip
    result = train(config, quiet=True)
    assert result is not None
    llm = LLM(target, tmp_path / "draft", drafting=Chain(NUM_SPEC_TOKENS))
    served = llm.run([prompt], sampling)
    assert served.outputs[0].token_ids == written
    assert served.summary.counters.tau == NUM_SPEC_TOKENS + 1, "48 tokens behind the first one, 4 a step"
