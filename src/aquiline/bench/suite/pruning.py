"""Drafts of one head with vocabularies of several sizes, served beside each other on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median

from aquiline.bench.data.datasets import load_questions
from aquiline.bench.results.intervals import rotated
from aquiline.bench.suite.suite_plan import PruningWork
from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.models.known_pairs import pair_of
from aquiline.spec.drafting import Drafting
from aquiline.text.chat_template import conversation
from aquiline.text.questions import Question


@dataclass(eq=False)
class ServedDraft:
    """One draft's figures: tau over all answers, and the tok/s of each, prompts included."""

    label: str
    llm: LLM
    num_committed: int = 0
    num_steps: int = 0
    rates: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens that a step commits, over all rounds."""
        return self.num_committed / max(1, self.num_steps)

    @property
    def tokens_per_s(self) -> float:
        """The median of the answers."""
        return median(self.rates)


def questions_of(pair: PairConfig, work: PruningWork) -> list[Question]:
    """The questions that drafts are served on. Raises as load_questions."""
    source = pair_of(pair.target).demo if work.questions is None else work.questions
    return load_questions(source)[: work.num_questions] if work.num_questions else []


def serve_drafts(
    pair: PairConfig, drafts: dict[str, str], drafting: Drafting, questions: Sequence[Question], work: PruningWork,
    say: Callable[[str], None],
) -> list[ServedDraft]:  # fmt: skip
    """Serve each draft on the same questions, greedily, taking turns at every question; one run of each warms up.

    Raises AssertionError if two drafts give different texts: no draft may change what its target writes."""
    config = EngineConfig(max_batch=1, prefix_cache=False)
    with ExitStack() as loaded:
        served = [
            ServedDraft(label, loaded.enter_context(LLM.open(replace(pair, draft=path), config)))
            for label, path in drafts.items()
        ]
        template = served[0].llm.template()
        asked = [template.encode(conversation(question.turns[:1])) for question in questions]
        sampling = SamplingParams(max_tokens=work.new_tokens, temperature=0.0, seed=0, ignore_eos=True)
        for each in served:
            each.llm.run(asked[:1], sampling, drafting=drafting)
        for number in range(work.rounds):
            say(f"serving, round {number + 1} of {work.rounds}")
            for place, prompt in enumerate(asked):
                for each in rotated(served, number + place):
                    _run(each, prompt, sampling, drafting)
    assert all(each.answers == served[0].answers for each in served), "a draft changed a text"
    return served


def _run(served: ServedDraft, prompt: list[int], sampling: SamplingParams, drafting: Drafting) -> None:
    began = time.perf_counter()
    result = served.llm.run([prompt], sampling, drafting=drafting)
    [output] = result.outputs
    served.rates.append(len(output.token_ids) / (time.perf_counter() - began))
    served.num_committed += result.summary.counters.num_committed
    served.num_steps += result.summary.counters.num_steps
    served.answers.append(output.token_ids)
