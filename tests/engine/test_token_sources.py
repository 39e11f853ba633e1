"""Who wrote each token: the draft model, a copy, or the target; in outputs, in deltas and in the pieces of a text."""

from __future__ import annotations

import pytest

from aquiline.backends.base import Decode, Decoded
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.chat_session import pieces_of
from aquiline.engine.llm import LLM
from aquiline.engine.sequence import TokenDelta, drafter_of
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.confidence import NUM_MARGINS, Cut
from aquiline.spec.drafting import Chain, Drafting, NoDraft, Proposal
from aquiline.spec.lookup import Lookup

CUT = Cut((0.5,) * NUM_MARGINS, (0.2,) * NUM_MARGINS, 0.1, 0.2)
PROMPT = "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2, 3]\nx = [1"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", engine=EngineConfig(max_batch=1, max_context=300, calibration=False))


@pytest.mark.parametrize(
    ("drafting", "writers"),
    [
        (NoDraft(), {"target"}),
        (Chain(3), {"draft", "target"}),
        (Lookup(), {"lookup", "target"}),
        (Adaptive(), {"draft", "lookup", "target"}),
    ],
    ids=lambda value: value.name if isinstance(value, Drafting) else "",
)
def test_every_token_has_its_writer(llm: LLM, drafting: Drafting, writers: set[str]) -> None:
    deltas: list[TokenDelta] = []
    result = llm.run(
        [PROMPT], SamplingParams(max_tokens=60, ignore_eos=True), drafting=drafting, on_delta=deltas.append
    )
    (output,) = result.outputs
    assert len(output.sources) == 60 and set(output.sources) <= writers
    assert writers - set(output.sources) <= ({"draft", "lookup"} if drafting.is_adaptive else set())
    assert not drafting.is_speculative or set(output.sources) > {"target"}, "a text that repeats itself is drafted"
    assert output.sources == [source for delta in deltas for source in delta.sources]
    assert sum(output.by_draft) == 60 - output.sources.count("target") == sum(delta.num_accepted for delta in deltas)
    assert llm.models.tokenizer is not None
    pieces = pieces_of(output, llm.models.tokenizer)
    assert "".join(piece.text for piece in pieces) == output.text
    assert [piece.source for piece in pieces] == output.sources, "each token of this text is one piece"


@pytest.mark.parametrize(
    ("decode", "kept", "source"),
    [
        (Decode(0, Chain(2), Proposal((5, 6)), cut=CUT), [5, 6, 1], "lookup"),
        (Decode(0, Chain(2), Proposal((5, 6)), cut=CUT), [5, 1], "lookup"),
        (Decode(0, Chain(2), Proposal((5, 6)), cut=CUT), [5, 7, 1], "draft"),
        (Decode(0, Chain(3), Proposal((5, 6)), cut=CUT), [5, 6, 7, 1], "draft"),
        (Decode(0, NoDraft(), Proposal((5, 6), (-1, -1))), [6, 1], "lookup"),
        (Decode(0, Chain(2), cut=CUT), [5, 1], "draft"),
        (Decode(0, Chain(2)), [5, 1], "draft"),
    ],
)
def test_of_a_chain_and_a_copy_in_one_tree_the_copy_wrote_what_it_has(
    decode: Decode, kept: list[int], source: str
) -> None:
    assert drafter_of(decode, Decoded(3, kept, 4, 4)) == source
