"""Requests whose logits the host edits: their text is the same however it is drafted, and beside whatever else runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
from tests.conftest import needs_native

from aquiline.config import EngineConfig, SamplingParams, Structured
from aquiline.engine.llm import LLM
from aquiline.engine.sequence import Request
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft
from aquiline.spec.lookup import Lookup
from aquiline.types import Float32

pytest.importorskip("xgrammar", reason="not installed: xgrammar")
pytestmark = needs_native

ENGINE = EngineConfig(max_batch=8, max_context=512, page_size=16, calibration=False, check=True)
PROMPT = "def fibonacci(n):\n"
LETTERS = Structured(regex="[a-z ]{20,60}")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("bundled", "bundled", engine=ENGINE) as llm:
        yield llm


def shun(before: Sequence[int], logits: Float32) -> None:
    """Makes the tokens of the last sixteen less likely, each by how often it stands there and how near."""
    for place, token in enumerate(before[-16:]):
        logits[token] -= 0.1 * place


def requests(llm: LLM, temperature: float, drafting: Drafting) -> list[Request]:
    """Free, edited, constrained, and both."""
    found = []
    for number in range(8):
        params = SamplingParams(
            max_tokens=32, temperature=temperature, seed=number, structured=LETTERS if number & 2 else None,
            presence_penalty=0.5 * (number > 3),
        )  # fmt: skip
        request = llm.request(number, PROMPT, params, drafting)
        found.append(dataclasses.replace(request, edit=shun if number & 1 else None))
    return found


def said(llm: LLM, temperature: float, drafting: Drafting) -> list[list[int]]:
    outputs = {output.request_id: output.token_ids for output in llm.outputs(requests(llm, temperature, drafting))}
    return [outputs[number] for number in range(8)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_edited_text_is_the_same_with_every_drafter(llm: LLM, temperature: float) -> None:
    with LLM.from_models(llm.models, dataclasses.replace(ENGINE, max_batch=1), NoDraft()) as alone:
        expected = said(alone, temperature, NoDraft())
    assert all(expected[n] != expected[n + 1] for n in (0, 2, 4, 6) if temperature == 0), "an edit must matter"
    for drafting in (NoDraft(), Chain(4), Dynamic(), Lookup(min_match=1), Adaptive()):
        assert said(llm, temperature, drafting) == expected, drafting


@pytest.mark.parametrize("changed", [{"num_pages": 5}, {"late_reads": True}], ids=str)
def test_preemption_and_late_reads_change_nothing(llm: LLM, changed: dict[str, object]) -> None:
    expected = said(llm, 0.8, NoDraft())
    config = dataclasses.replace(ENGINE, **changed)  # type: ignore[arg-type]
    with LLM.from_models(llm.models, config, Adaptive()) as other:
        assert said(other, 0.8, Dynamic()) == expected
        assert other.engine.scheduler.num_preemptions > 0 or "num_pages" not in changed


def test_so_does_the_torch_path(llm: LLM) -> None:
    with LLM("bundled", "bundled", engine=ENGINE, device="cpu:0") as torch_llm:
        assert torch_llm.models.pair.name == "torch"
        expected = said(torch_llm, 0.8, NoDraft())
        for drafting in (Chain(4), Dynamic()):
            assert said(torch_llm, 0.8, drafting) == expected, drafting
