"""Who wrote each token: the draft model, a copy, or the target; in outputs, in deltas and in the pieces of a text."""

from __future__ import annotations

import pytest

from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.chat import pieces_of
from aquiline.engine.llm import LLM
from aquiline.engine.sequence import TokenDelta
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, NoDraft
from aquiline.spec.lookup import Lookup

PROMPT = "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2, 3]\nx = [1"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(engine=EngineConfig(max_batch=1, max_context=300, calibration=False))


@pytest.mark.parametrize(
    ("spec", "writers"),
    [
        (NoDraft(), {"target"}),
        (Chain(3), {"draft", "target"}),
        (Lookup(), {"lookup", "target"}),
        (Adaptive(), {"draft", "lookup", "target"}),
    ],
    ids=lambda value: value.name if isinstance(value, Drafting) else "",
)
def test_every_token_has_its_writer(llm: LLM, spec: Drafting, writers: set[str]) -> None:
    deltas: list[TokenDelta] = []
    result = llm.run([PROMPT], SamplingParams(max_tokens=60, ignore_eos=True), spec=spec, on_delta=deltas.append)
    (output,) = result.outputs
    assert len(output.sources) == 60 and set(output.sources) <= writers
    assert writers - set(output.sources) <= ({"draft", "lookup"} if spec.is_adaptive else set())
    assert not spec.is_speculative or set(output.sources) > {"target"}, "a text that repeats itself is drafted"
    assert output.sources == [source for delta in deltas for source in delta.sources]
    assert sum(output.by_draft) == 60 - output.sources.count("target") == sum(delta.num_accepted for delta in deltas)
    assert llm.models.tokenizer is not None
    pieces = pieces_of(output, llm.models.tokenizer)
    assert "".join(piece.text for piece in pieces) == output.text
    assert [piece.source for piece in pieces] == output.sources, "each token of this text is one piece"
