from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from tests.conftest import needs_native

from aquiline.backends.torch.eagle import save_head
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import Chain
from aquiline.train.batches import Assembler
from aquiline.train.simulated_tau import DraftJudgement, HeldOut, JudgedText, expected_cycles, write_texts
from aquiline.train.teacher import Teacher, Views

STEPS = 3


def test_certain_matches_are_walked_as_decoding_walks() -> None:
    match = np.array([[1, 0, 1], [1, 1, 1], [0, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 1, 1]], float)
    # row 0 accepts 1 and commits 2; row 2 commits 1; row 3 accepts 2 and commits 3; row 6 commits 1
    assert expected_cycles(match) == 4
    assert expected_cycles(np.ones((7, 3))) == 2, "4 + 3: the last cycle is cut at the end of the text"
    assert expected_cycles(np.zeros((7, 3))) == 7


def test_expected_cycles_are_the_mean_of_many_walks() -> None:
    rng = np.random.default_rng(0)
    match = rng.random((40, 4))
    walks = []
    for _ in range(4000):
        i = cycles = 0
        while i < len(match):
            a = 0
            while a < 4 and rng.random() < match[i, a]:
                a += 1
            i += a + 1
            cycles += 1
        walks.append(cycles)
    assert abs(np.mean(walks) - expected_cycles(match)) < 4 * np.std(walks) / len(walks) ** 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Teacher:
    return Teacher(tiny.write_target(folder / "target"), tiny.CAPTURE, "cpu", 512)


@pytest.fixture(scope="module")
def texts(teacher: Teacher) -> list[JudgedText]:
    prompts = [np.random.default_rng(i).integers(1, 48, 5 + i).astype(np.int32) for i in range(10)]
    assert teacher.models is not None
    return [t for temperature in (0.0, 0.8) for t in write_texts(teacher.models, prompts, 60, temperature, 7)]


@needs_native
def test_simulated_tau_is_the_served_one(folder: Path, teacher: Teacher, texts: list[JudgedText]) -> None:
    """Greedy to the digit: the same drafts meet the same text. At a temperature as a mean over noise."""
    head = tiny.head(teacher.decoder.float(), num_ids=40)
    head.embed.data = teacher.decoder.embed.data.float().clone()
    head = head.to(torch.bfloat16).float()
    views = Views(teacher.views, None)
    scale = torch.ones(len(tiny.CAPTURE) * tiny.CONFIG.hidden_size)
    assembler = Assembler(views, scale, tiny.all_ids(head), teacher.head, "cpu")
    simulated = HeldOut(assembler, texts, STEPS).judge(head.eval())
    save_head(head.to(torch.bfloat16), folder / "draft")
    llm = LLM(folder / "target", folder / "draft", engine=EngineConfig(max_batch=4, prefix_cache=False))
    drafting = Chain(STEPS)
    prompts = [t.tokens[: t.num_prompt].tolist() for t in texts if t.temperature == 0]
    served = {}
    for temperature, rounds in ((0.0, 1), (0.8, 12)):
        tokens = cycles = 0
        for seed in range(rounds):
            sampling = [
                SamplingParams(max_tokens=60, temperature=temperature, seed=100 * seed + i) for i in range(len(prompts))
            ]
            for output in llm.run(prompts, sampling, drafting=drafting).outputs:
                tokens += len(output.token_ids) - 1
                cycles += round((len(output.token_ids) - 1) / output.metrics.tau) if len(output.token_ids) > 1 else 0
        served[temperature] = tokens / cycles
    assert simulated.tau == pytest.approx(served[0.0], rel=0.03)
    assert simulated.tau_sampled == pytest.approx(served[0.8], rel=0.08)
    assert simulated.tau > 1.02 and simulated.tau_sampled > 1.1, (
        "a test of drafts that are never accepted shows nothing"
    )


def test_texts_are_the_targets_own(teacher: Teacher, texts: list[JudgedText]) -> None:
    for text in (t for t in texts if t.temperature == 0):
        best = teacher.views([text.tokens])[0].best.numpy()
        own = slice(text.num_prompt, len(text.tokens))
        agree = (best[text.num_prompt - 1 : -1] == text.tokens[own]).mean()
        assert agree > 0.9, "but for ties that rounding the hidden state to bfloat16 decides"


def test_the_target_looks_at_held_out_texts_once(teacher: Teacher, texts: list[JudgedText]) -> None:
    views = Views(teacher.views, None)
    head = tiny.head(teacher.decoder.float(), num_ids=40)
    scale = torch.ones(len(tiny.CAPTURE) * tiny.CONFIG.hidden_size)
    held_out = HeldOut(Assembler(views, scale, tiny.all_ids(head), teacher.head, "cpu"), texts, STEPS)
    first = held_out.judge(head)
    assert views.num_computed > 0
    views.num_computed = 0
    assert held_out.judge(head) == first and views.num_computed == 0


def test_a_draft_is_judged_from_its_first_token_on(teacher: Teacher) -> None:
    """Two new tokens: the first is the target's own, and the second is the only one that the draft guesses."""
    head = tiny.head(teacher.decoder.float(), num_ids=48)
    scale = torch.ones(len(tiny.CAPTURE) * tiny.CONFIG.hidden_size)
    assembler = Assembler(Views(teacher.views, None), scale, tiny.all_ids(head), teacher.head, "cpu")
    text = JudgedText(np.arange(1, 10, dtype=np.int32), 7, 0.0)
    assert HeldOut(assembler, [text], 1).judge(head).loss > 0
    assert HeldOut(assembler, [JudgedText(text.tokens, 8, 0.0)], 1).judge(head).loss == 0, "nothing is left to guess"


def test_a_kind_of_text_that_is_missing_does_not_hide_the_other() -> None:
    """Without greedy texts, or without sampled ones, checkpoints are still told apart."""
    nan = float("nan")
    scores = [DraftJudgement(1.0, (), *taus).score for taus in ((2.0, 1.5), (nan, 1.5), (2.0, nan), (nan, nan))]
    assert scores == [1.75, 1.5, 2.0, 0.0]
