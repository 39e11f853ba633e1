"""A run on conversations: what `aquiline train` says of its data, and which tokens it trains on."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
from tokenizers import Tokenizer, models, pre_tokenizers

from aquiline.train.distributed import World
from aquiline.train.prepare import prepare
from aquiline.train.train_config import TrainConfig

SOURCE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% if m.role == 'assistant' %} <end>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["?", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("chats")
    target = tiny.write_target(folder / "target")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<user>", "<assistant>", "<end>"])
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "chat_template.jinja").write_text(SOURCE)
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a b c d e"},
                {"role": "assistant", "content": "f g h i " * (1 + i % 9)},
            ]
        }
        for i in range(80)
    ]
    path = folder / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, {"messages": rows[0]["messages"][:1]}])))
    return TrainConfig(
        target=target, data=(path,), out=folder / "out", capture=tiny.CAPTURE, draft_vocab_size=40, context=32,
        batch_size=4, ttt_steps=3, eval_rows=4, steps=1,
    )  # fmt: skip


def test_the_counts_of_a_run_and_the_tokens_it_trains_on(config: TrainConfig) -> None:
    said: list[str] = []
    corpus = prepare(config, None, World(), said.append).batches.corpus
    line, rejected = said[0], said[1]
    longer = int((np.diff(corpus.starts) > 32).sum())
    assert longer > 0 and f"{corpus.num_documents} documents, {longer} of them longer than 32 tokens and cut" in line
    assert f"{len(corpus.tokens)} tokens, {corpus.mask.mean():.0%} counted" in line and corpus.mask.mean() < 0.9
    assert "not used: 1 x a user turn without an answer (first: chats.jsonl:80)" in rejected
    first = corpus.tokens[: corpus.starts[1]]
    words = [*WORDS, "<user>", "<assistant>", "<end>"]
    told = " ".join(words[t] for t in first)
    assert told.startswith("<user> a b c d e <assistant> f g h i") and told.endswith("<end>")
    assert corpus.mask[: len(first)].tolist() == [False] * 7 + [True] * (len(first) - 7)


def test_loss_on_all_and_nothing_else(config: TrainConfig) -> None:
    corpus = prepare(replace(config, loss_on="all"), None, World(), lambda text: None).batches.corpus
    assert corpus.mask.all()
    with pytest.raises(ValueError, match="loss_on='prompts': must be one of answers, all"):
        replace(config, loss_on="prompts")
