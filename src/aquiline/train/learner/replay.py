"""The replay of what a draft was trained for: texts that the target wrote unasked, kept in DIR/replay.

A target of chats writes a question where its template has the user's turn, and answers it; any other target begins a
text and goes on with it. Half of the answers are greedy. Whoever brings a pair so needs no data of its training.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from aquiline.checks import parse_json
from aquiline.engine.learning.store import LearningStore, Served
from aquiline.engine.model import LoadedModels, ResolvedPair
from aquiline.text.chat_template import ChatTemplate
from aquiline.train.simulated_tau import TEMPERATURE, write_texts
from aquiline.types import Int32
from aquiline.writing import write_whole

NUM_FILES, FILE_TEXTS = 8, 12
PROMPT_TOKENS, ANSWER_TOKENS = 64, 320
"""Of a text; a target of few positions writes less."""
_QUESTION = "?question?"


def read_replay(store: LearningStore) -> list[Served]:
    """The texts that are there."""
    files = sorted((store.folder / "replay").glob("*.json"))
    return [Served(*each) for file in files for each in parse_json(file.read_bytes())]


def write_replay(store: LearningStore, pair: ResolvedPair) -> None:
    """Write the texts that are missing; a killed run loses one file. Raises OSError, and what loading a pair raises."""
    folder = store.folder / "replay"
    folder.mkdir(mode=0o700, exist_ok=True)
    missing = [number for number in range(NUM_FILES) if not _file(folder, number).exists()]
    if not missing:
        return
    models = replace(pair, draft=None).load()
    for number in missing:
        first = number * FILE_TEXTS
        room = min(ANSWER_TOKENS, models.max_positions // 2)
        answered = write_texts(models, _prompts(models, first), room, TEMPERATURE * (number % 2), first)
        texts = [Served(text.tokens.tolist(), text.num_prompt, [], text.temperature) for text in answered]
        write_whole(_file(folder, number), json.dumps(texts), "The texts before it are whole")


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:02d}.json"


def _prompts(models: LoadedModels, seed: int) -> list[Int32]:
    """Prompts that the target writes itself at temperature 1."""
    template, config = models.template, models.target_config
    begin = [config.bos_token_id if config.bos_token_id is not None else config.eos_token_ids[0]]
    if template.has_template:
        begin = _before_question(template)
    room = min(PROMPT_TOKENS, models.max_positions // 8)
    written = write_texts(models, [np.array(begin, np.int32)] * FILE_TEXTS, room, 1.0, seed)
    if not template.has_template:
        return [text.tokens for text in written]
    assert models.tokenizer is not None
    asked = [models.tokenizer.decode(text.tokens[text.num_prompt :].tolist()).strip() for text in written]
    turns = [[{"role": "user", "content": question}] for question in asked if question]
    return [np.array(template.encode(turn), np.int32) for turn in turns]


def _before_question(template: ChatTemplate) -> list[int]:
    """The tokens of a conversation up to the user's first words."""
    text = template.render([{"role": "user", "content": _QUESTION}]).partition(_QUESTION)[0]
    assert template.tokenizer is not None
    ids: list[int] = template.tokenizer.encode(text, add_special_tokens=False).ids
    return ids
