"""Ways to draft that take turns on the same running sequences, and the texts they write: what never_slower.py and
phases.py share.

The requests are adaptive ones. A Controller imposes another way to draft for some steps, and lets the adaptive one
choose in its own turns. In a round every setting continues the same texts from the same place, since texts differ more
than settings do: the sequences go back there, by the prefix cache, and the next round begins where the longest
continuation ended. Adaptive drafting keeps what it has learnt of a sequence, and learns in its own turns alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from aquiline.backends.base import Decode
from aquiline.bench.data.prompts import text_prompts
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.control.controller import PLAIN, Controller, _SequenceState
from aquiline.engine.control.plans import REPLAN_STEPS
from aquiline.engine.llm import LLM
from aquiline.engine.pipeline import Step, StepChoice
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Sequence
from aquiline.metrics import mean, repeated_share
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic

ADAPTIVE = "adaptive"
FIXED: dict[str, Drafting] = {
    PLAIN.label: PLAIN, "chain-1": Chain(1), "chain-2": Chain(2), "chain-3": Chain(3), "chain-5": Chain(5),
    "tree-6": Dynamic(),
}  # fmt: skip
SETTINGS = (*FIXED, ADAPTIVE)
STEPS = 32
"""Steps of a turn. One more step before them is not timed: it pays for the change, as draft keys that are missing."""

MOST = 1 + Adaptive().max_depth
"""Tokens of a sequence that one step adds at most."""

DOCUMENTS = Path(__file__).parent.parent
QUESTIONS = ("What is this text about?", "Explain the main points of this text.", "Who should read this text, and why?",
             "Write a short story about the people behind this text.")  # fmt: skip
HEAD = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n"
)
TAIL = "<|im_end|>\n<|im_start|>assistant\n"


class Turns(Controller):
    """The controller that imposes `setting`, one of SETTINGS, on all sequences. It begins with what an earlier run has
    kept, as an engine's own does, and what it finds is kept."""

    def __init__(self, llm: LLM) -> None:
        llm.engine.prepare_choosing()
        own = llm.engine.controller
        assert own is not None
        super().__init__(own.costs, draft_window=own.draft_window, pools=own.pools, rivals=own.rivals)
        self.setting = ADAPTIVE
        self.kept: dict[int | str, _SequenceState] = {}  # by request id, what was learnt of sequences that went back

    def choose(self, plan: StepPlan) -> StepChoice | None:
        """How each sequence drafts in this step. A fixed way may stand for many steps."""
        if self.setting == ADAPTIVE:
            return super().choose(plan)
        drafting = FIXED[self.setting]
        drafting = drafting if drafting.is_speculative else PLAIN
        return StepChoice({s: Decode(s.slot, drafting) for s in plan.decoding}, (), REPLAN_STEPS)

    def repeated(self, num_steps: int) -> None:
        """Of the adaptive turns."""
        if self.setting == ADAPTIVE:
            super().repeated(num_steps)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ends, or goes back and is a new one."""
        choice = self._states.pop(sequence, None)
        if choice is not None:
            self.kept[sequence.request.id] = choice

    def _state_of(self, sequence: Sequence) -> _SequenceState:
        if sequence not in self._states and sequence.request.id in self.kept:
            self._states[sequence] = self.kept[sequence.request.id]
        return super()._state_of(sequence)

    def learn(self, step: Step) -> None:
        """Learn from the adaptive turns."""
        if self.setting == ADAPTIVE:
            super().learn(step)

    def end_step(self, seconds: float) -> None:
        """Learn the host's time from the adaptive turns."""
        if self.setting == ADAPTIVE:
            super().end_step(seconds)


@dataclass(frozen=True)
class Turn:
    """The timed steps of one turn."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second of all sequences."""
        return self.tokens / self.seconds


@dataclass(eq=False)
class Texts:
    """The sequences of a run: prompts of cached tokens, and how far each text has come. A text that has no room for
    another turn begins anew, a little earlier in its prompt and with another seed."""

    llm: LLM
    prompts: list[list[int]]
    temperature: float
    drafting: Drafting | None = None

    def __post_init__(self) -> None:
        self.lives = [0] * len(self.prompts)
        self.tokens = list(self.prompts)
        self.longest = list(self.prompts)  # of this round
        self.go_back()

    def go_back(self) -> None:
        """All sequences stand where the round began, and decode."""
        engine = self.llm.engine
        self._end_turn()
        if isinstance(engine.controller, Turns):
            engine.controller.setting = PLAIN.label
        for i, tokens in enumerate(self.tokens):
            sampling = SamplingParams(
                max_tokens=engine.max_context - len(tokens), temperature=self.temperature,
                seed=1000 * self.lives[i] + i, ignore_eos=True,
            )  # fmt: skip
            engine.add(self.llm.request(i, tokens, sampling, self.drafting))
        while any(s.is_prefilling or not s.output_ids for s in engine.sequences.values()):
            engine.step()

    def next_round(self, num_steps: int = STEPS) -> None:
        """The next round begins where the longest texts of this one ended."""
        self._end_turn()
        limit = self.llm.engine.max_context - (num_steps + 3) * MOST
        for i, longest in enumerate(self.longest):
            self.tokens[i] = list(longest)
            if len(longest) > limit:
                self.lives[i] += 1
                self.tokens[i] = self.prompts[i][: len(self.prompts[i]) - 5 * (self.lives[i] % 12)]
                controller = self.llm.engine.controller
                if isinstance(controller, Turns):
                    controller.kept.pop(i, None)
            self.longest[i] = self.tokens[i]

    @property
    def repeated_share(self) -> float:
        """Of what was written behind the prompts in the last round, and of the rounds before it in the same life."""
        return mean([repeated_share(t[len(p) :]) for t, p in zip(self.longest, self.prompts, strict=True)])

    def _end_turn(self) -> None:
        for i, sequence in self.llm.engine.sequences.items():
            if len(sequence.tokens) > len(self.longest[int(i)]):
                self.longest[int(i)] = sequence.tokens
        self.llm.engine.reset()


def take_turn(llm: LLM, setting: str, num_steps: int = STEPS) -> Turn:
    """Run a step that is not timed and num_steps that are, and those that were computed together with them. What the
    proposers have not seen is indexed before."""
    engine = llm.engine
    assert isinstance(engine.controller, Turns)
    engine.controller.setting = setting
    for sequence in engine.sequences.values():
        if sequence.proposer is not None:
            sequence.proposer.propose(sequence.tokens, 1)
    engine.step()
    while engine.is_ahead:
        engine.step()
    tokens, num_done, began = 0, 0, time.perf_counter()
    while num_done < num_steps or engine.is_ahead:
        num_done += 1
        for delta in engine.step():
            tokens += len(delta.token_ids)
    return Turn(tokens, time.perf_counter() - began)


def open_llm(target: str, draft: str | None, batch: int, max_context: int) -> LLM:
    """A pair, with room for the batch. draft: None is the target's own, if it has a name."""
    page = EngineConfig().page_size
    pages = batch * -(-(max_context + 320) // page)
    config = EngineConfig(max_batch=batch, max_context=max_context, num_pages=pages, row_budget=512)
    llm = LLM(target, draft, drafting=Adaptive(), engine=config)
    llm.engine.controller = Turns(llm)
    return llm


def prompts_of(llm: LLM, is_chat: bool, text: str, context: int, batch: int) -> list[list[int]]:
    """Prompts of so many tokens. text: "library", windows of the standard library's source; "documents", windows of
    this repository's documents; or "chat", such a window and a question about it, as a chat model expects it."""
    tokenizer = llm.models.tokenizer
    assert tokenizer is not None
    if text == "library":
        return [prompt.token_ids for prompt in text_prompts(context, batch, tokenizer)]
    if text == "documents":
        return _windows(tokenizer, context, batch)
    assert is_chat, "the bundled pair knows no chat"
    head = tokenizer.encode(HEAD).ids
    tails = [tokenizer.encode(f"\n\n{QUESTIONS[i % len(QUESTIONS)]}{TAIL}").ids for i in range(batch)]
    longest = max(map(len, tails))
    windows = _windows(tokenizer, context - len(head) - longest, batch)
    return [[*head, *window, *tail] for window, tail in zip(windows, tails, strict=True)]


def chat(message: str) -> str:
    """A message as SmolLM2 expects it."""
    return HEAD + message + TAIL


def _windows(tokenizer: Tokenizer, length: int, count: int) -> list[list[int]]:
    """Windows of the documents, evenly spread over them; they overlap where there is less text than asked for."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(DOCUMENTS.glob("*.md"))]
    stream = tokenizer.encode("\n".join(texts), add_special_tokens=False).ids
    assert len(stream) >= length + count, (len(stream), length)
    return [
        stream[start : start + length] for start in range(0, len(stream) - length, (len(stream) - length) // count)
    ][:count]
