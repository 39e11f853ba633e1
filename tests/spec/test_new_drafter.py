"""A way to draft is added in one file: subclass Drafting, bring a Proposer, hand a value to an LLM.

The example below proposes the same few tokens in every step. Whatever it proposes, the text stays that of plain
decoding; when the target would have written a proposed token, a step commits more than one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
from tests.conftest import engine_config, needs_native, tiny_llm, tiny_pair, weights_of

from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels
from aquiline.spec.drafting import Chain, Drafting, NoDraft, Proposal, Proposer
from aquiline.spec.past_outputs import PastSpace

PARAMS = [SamplingParams(max_tokens=40, ignore_eos=True), SamplingParams(max_tokens=40, temperature=0.6, seed=4)]
PROMPTS = [[7, 3, 11], list(range(1, 40)), [5]]


@dataclass(frozen=True)
class Fixed(Drafting):
    """Proposes `tokens` behind every token: as a chain, or each as a child of the root."""

    name: ClassVar[str] = "fixed"
    needs_draft_model: ClassVar[bool] = False
    tokens: tuple[int, ...] = ()
    is_wide: bool = False

    @property
    def max_nodes(self) -> int:
        return 1 + len(self.tokens)

    @property
    def max_depth(self) -> int:
        return 1 if self.is_wide else len(self.tokens)

    def proposer(
        self, prompt: Sequence[int], prediction: Sequence[int], shared: None, past: PastSpace | None = None
    ) -> Proposer:
        return FixedProposer(self)


@dataclass
class FixedProposer:
    """Sees the tokens of one sequence, and does not care."""

    drafting: Fixed
    num_seen: int = 0

    def propose(self, tokens: Sequence[int], max_tokens: int) -> Proposal:
        assert len(tokens) > self.num_seen, "every step brings a token"
        self.num_seen = len(tokens)
        assert max_tokens == len(self.drafting.tokens)
        return Proposal(self.drafting.tokens, (-1,) * len(self.drafting.tokens) if self.drafting.is_wide else ())


def torch_llm() -> LLM:
    return LLM.from_models(
        LoadedModels(TorchPair(*weights_of(*tiny_pair()), "float32"), None, "float32", 0), engine_config(2)
    )


@pytest.fixture(scope="module", params=[pytest.param("native", marks=needs_native), "torch"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return tiny_llm("float32", max_batch=2) if request.param == "native" else torch_llm()


@pytest.mark.parametrize("sampling", PARAMS, ids=["greedy", "sampled"])
def test_it_runs_without_touching_the_engine(llm: LLM, sampling: SamplingParams) -> None:
    plain = llm.run(PROMPTS, sampling, drafting=NoDraft())
    texts = [o.token_ids for o in plain.outputs]
    frequent = tuple(token for token, _ in Counter(t for text in texts for t in text).most_common(6))
    for drafting in (Fixed(frequent[:1]), Fixed(frequent[:1] * 3), Fixed(frequent, is_wide=True), Fixed()):
        result = llm.run(PROMPTS, sampling, drafting=drafting)
        assert [o.token_ids for o in result.outputs] == texts, drafting
        found = result.summary.counters
        assert found.num_draft_tokens == len(drafting.tokens) * found.num_steps
        assert (found.num_accepted_tokens > 0) == drafting.is_speculative
        right = [sum(token in drafting.tokens for token in text[1:]) for text in texts]
        if drafting.is_wide:  # a proposed token is accepted wherever a step begins before it
            assert sum(right) / 2 <= found.num_accepted_tokens <= sum(right)
        assert [sum(o.by_draft) for o in result.outputs] <= right


@needs_native
def test_it_runs_beside_others_and_without_a_draft_model() -> None:
    """Requests of one batch may draft in different ways; the draft model's keys are no business of this one."""
    llm = tiny_llm(max_batch=3)
    expected = [llm.run([prompt], PARAMS[0], drafting=NoDraft()).outputs[0].token_ids for prompt in PROMPTS]
    specs = (Fixed((9, 9)), Chain(3), NoDraft())
    requests = [
        llm.request(i, prompt, PARAMS[0], drafting)
        for i, (prompt, drafting) in enumerate(zip(PROMPTS, specs, strict=True))
    ]
    found = {output.request_id: output.token_ids for output in llm.outputs(requests)}
    assert [found[i] for i in range(3)] == expected
    alone = LLM.from_models(
        LoadedModels(TorchPair(*weights_of(tiny_pair()[0], None), "float32"), None, "float32", 0), engine_config(1)
    )
    assert alone.run([[5]], PARAMS[0], drafting=Fixed((9,))).outputs[0].token_ids


def test_what_it_is_called_in_results() -> None:
    assert Fixed((4, 5)).as_dict() == {"drafter": "fixed", "tokens": (4, 5), "is_wide": False}
    assert Fixed((4, 5)).label == "fixed" and Fixed((4, 5)).lookahead == 3


@pytest.mark.parametrize(
    ("tokens", "parents", "named"),
    [
        ((1, 2, 3), (), r"drafter='fixed': proposed 3 tokens, 3 deep; its max_nodes=3 and max_depth=2"),
        ((1, 2), (1, -1), r"parents=\(1, -1\): entry 0 follows 1, must be one before it"),
    ],
)
def test_more_than_the_value_reserves_is_refused_by_name(
    tokens: tuple[int, ...], parents: tuple[int, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedProposer, "propose", lambda self, known, max_tokens: Proposal(tokens, parents))
    llm = torch_llm()
    with pytest.raises(ValueError, match=named):
        llm.run(PROMPTS, PARAMS[0], drafting=Fixed(tokens=(1, 2)))
    assert llm.run(PROMPTS, PARAMS[0], drafting=NoDraft()).outputs[0].finish_reason == "length", "nothing is lost"
