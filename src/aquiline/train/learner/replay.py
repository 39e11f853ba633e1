"""The replay of what a draft was trained for: texts that the target wrote unasked, kept in DIR/replay.

A target of chats writes a question where its template has the user's turn, and answers it; any other target begins a
text and goes on with it. Half of the answers are greedy. Whoever brings a pair so needs no data of its training.
A pair that is known by a name also answers prompts of its own, greedily and sampled: some are trained on, and others,
which never are, judge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aquiline.checks import parse_json
from aquiline.engine.learning.store import LearningStore, Served
from aquiline.engine.model import LoadedModels, ResolvedPair
from aquiline.models.known_pairs import PAIRS
from aquiline.text.chat_template import ChatTemplate
from aquiline.text.questions import read_questions
from aquiline.train.simulated_tau import TEMPERATURE, JudgedText, write_texts
from aquiline.types import Int32
from aquiline.writing import write_whole

NUM_FILES, FILE_TEXTS = 8, 12
PROMPT_TOKENS, ANSWER_TOKENS = 64, 320
"""Of a text; a target of few positions writes less."""
JUDGED = 4
"""One text in so many judges, where no known prompts do; the rest is trained on."""
KNOWN_PROMPTS = 32
"""Of a known pair that judge."""
_KNOWN, _TRAINED, _QUESTION = "known.json", "trained.json", "?question?"


class Replay(NamedTuple):
    """Texts that are trained on, and texts that judge what is left of old skills."""

    train: list[Served]
    judged: list[Served]


def read_replay(store: LearningStore) -> Replay:
    """The texts that `write_replay` wrote."""
    folder = store.folder / "replay"
    written = [each for number in range(NUM_FILES) for each in _read(_file(folder, number))]
    known, trained = (_read(folder / name) for name in (_KNOWN, _TRAINED))
    unasked = [each for i, each in enumerate(written) if known or i % JUDGED]
    return Replay(trained + unasked, known or written[::JUDGED])


def _read(file: Path) -> list[Served]:
    return [Served(*each) for each in parse_json(file.read_bytes())]


def write_replay(store: LearningStore, pair: ResolvedPair) -> None:
    """Write the texts that are missing; a killed run loses one file. Raises OSError, and what loading a pair raises."""
    folder = store.folder / "replay"
    folder.mkdir(mode=0o700, exist_ok=True)
    missing = [number for number in range(NUM_FILES) if not _file(folder, number).exists()]
    if not missing and all((folder / name).exists() for name in (_KNOWN, _TRAINED)):
        return
    models = replace(pair, draft=None).load()
    room = min(ANSWER_TOKENS, models.max_positions // 2)
    for number in missing:
        first = number * FILE_TEXTS
        answered = write_texts(models, _prompts(models, first), room, TEMPERATURE * (number % 2), first)
        _write(_file(folder, number), answered)
    known = next((each for each in PAIRS.values() if each.is_here and each.target == pair.target), None)
    files = (known.questions, known.replay) if known else (None, None)
    for name, file, most in zip((_KNOWN, _TRAINED), files, (KNOWN_PROMPTS, None), strict=True):
        if (folder / name).exists():
            continue
        prompts = _prompts_of(models, file)[:most] if file else []
        both = (write_texts(models, prompts, room, drawn, 0) for drawn in (0.0, TEMPERATURE) if prompts)
        _write(folder / name, [text for answered in both for text in answered])


def _write(file: Path, texts: Sequence[JudgedText]) -> None:
    rows = [Served(text.tokens.tolist(), text.num_prompt, [], text.temperature) for text in texts]
    write_whole(file, json.dumps(rows), "The texts before it are whole")


def _prompts_of(models: LoadedModels, file: Path) -> list[Int32]:
    """The prompts of a file of questions, as the target reads them; none without a tokenizer."""
    if models.tokenizer is None:
        return []
    asked = [question.turns[0] for question in read_questions(file)]
    if models.template.has_template:
        ids = [models.template.encode([{"role": "user", "content": text}]) for text in asked]
    else:
        ids = [[*_beginning(models), *models.tokenizer.encode(text).ids] for text in asked]
    return [np.array(each[: models.max_positions // 2], np.int32) for each in ids]


def _beginning(models: LoadedModels) -> list[int]:
    """The token that a text begins with."""
    config = models.target_config
    return [config.bos_token_id if config.bos_token_id is not None else config.eos_token_ids[0]]


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:02d}.json"


def _prompts(models: LoadedModels, seed: int) -> list[Int32]:
    """Prompts that the target writes itself at temperature 1."""
    template = models.template
    begin = _before_question(template) if template.has_template else _beginning(models)
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
