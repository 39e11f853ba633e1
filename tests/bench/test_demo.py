"""The demo's own logic on the bundled pair: identical outputs, figures that can be recomputed, the JSON as promised."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import needs_native

from aquiline.bench.data.prompts import PROMPT_TOKENS, excerpts, read_prompts
from aquiline.bench.suite.demo_run import NAMES, TEMPERATURES, Demo, DemoPrompt, _fastest_chain, demo_of, run_demo
from aquiline.bench.theory.bounds import expectation
from aquiline.config import EngineConfig
from aquiline.engine.llm import LLM
from aquiline.metrics import repeated_share
from aquiline.models.known_pairs import BUNDLED_PROMPTS, BUNDLED_TARGET
from aquiline.spec.drafting import Chain, Drafting
from aquiline.text.chat_template import ChatTemplate

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", engine=EngineConfig(max_batch=1))


def test_bundled_prompts_are_eight_of_about_300_tokens(llm: LLM) -> None:
    prompts = read_prompts(BUNDLED_PROMPTS)
    assert len(prompts) >= 8 and len({p.source for p in prompts}) == len(prompts)
    assert all(PROMPT_TOKENS * 0.8 <= len(llm.encode(p.text)) <= PROMPT_TOKENS + 8 for p in prompts)


@needs_native
def test_speculation_changes_nothing_and_pays_in_calls(llm: LLM) -> None:
    ticks = itertools.count()
    whole = demo_of("bundled", ChatTemplate.load(BUNDLED_TARGET, llm.models.tokenizer))
    assert [prompt.token_ids for prompt in whole.prompts] == [llm.encode(p.text) for p in read_prompts(BUNDLED_PROMPTS)]
    demo = dataclasses.replace(whole, prompts=whole.prompts[:3], new_tokens=NEW_TOKENS)
    result = run_demo(llm, demo, lambda: next(ticks))
    assert result.identical
    assert next(ticks) == demo.num_runs == 3 * len(NAMES) * len(TEMPERATURES)
    data = json.loads(json.dumps(result.as_dict()))
    costs = result.costs
    assert costs.weight_bytes < llm.models.weight_bytes and costs.chain is not None and 0 < costs.rows < costs.chain
    assert data["expectation"] == expectation(costs)
    wanted = (
        "name drafter temperature repeated_share tokens_per_s tau acceptance_rate per_position speedup "
        "target_calls_per_token"
    )
    for row, run in zip(data["runs"], result.runs, strict=True):
        assert set(wanted.split()) <= set(row)
        made = sum(len(o.token_ids) for o in run.outputs)
        assert made == 3 * NEW_TOKENS == len(run.outputs) + row["num_committed"]
        assert row["tau"] == pytest.approx((made - len(run.outputs)) / row["num_steps"])
        # a trained draft: well above nothing, on every setting that drafts; adaptive drafting may not where it is slow
        least = 1.0 if run.drafting.is_adaptive else 1.5
        assert row["tau"] == 1.0 if row["drafter"] == "none" else row["tau"] > least
    for run in (r for r in result.runs if r.drafting.is_speculative):
        for output in run.outputs:
            output.token_ids[-1] ^= 1
            assert not run.is_identical and not result.identical, "one changed token of any prompt must show"
            output.token_ids[-1] ^= 1
        assert run.is_identical


@dataclass
class Timed:
    """An LLM whose chains take so many milliseconds a text, by their length; it keeps what it was asked."""

    ms: dict[int, float]
    asked: list[tuple[list[int], int, float]] = dataclasses.field(default_factory=list)

    def run(self, prompts: list[list[int]], sampling: Any, drafting: Drafting) -> Any:
        assert isinstance(drafting, Chain)
        self.asked.append((prompts[0], drafting.num_spec_tokens, sampling.temperature))
        output = SimpleNamespace(token_ids=[0] * 9, ttft_ms=5.0, total_ms=5.0 + self.ms[drafting.num_spec_tokens])
        return SimpleNamespace(outputs=[output])


def test_the_fixed_chain_is_the_fastest_on_other_prompts() -> None:
    ticks = itertools.count()
    others = [DemoPrompt("other", [7]), DemoPrompt("another", [8])]
    demo = Demo("some pair", [DemoPrompt("own", [1])], others, end_ids=(2,))
    for best in (1, 3, 4):
        llm = Timed({k: 10.0 - (k == best) for k in (1, 2, 3, 4)})
        found = _fastest_chain(llm, demo, 0.8, lambda: next(ticks))  # type: ignore[arg-type]
        assert found == Chain(best)
        assert sorted(llm.asked) == [(prompt.token_ids, k, 0.8) for prompt in others for k in (1, 2, 3, 4)]
        assert [k for _, k, _ in llm.asked[:4]] != [k for _, k, _ in llm.asked[4:]], "another chain begins each round"
    assert next(ticks) == 3 * 2 * 4


@pytest.mark.rare
@needs_native
def test_the_command_prints_json_and_exits_with_0() -> None:
    command = [sys.executable, "-c", "from aquiline.cli.main import app; app()", "demo", "--bundled", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["identical"] is True and len(data["prompts"]) >= 8 and len(data["runs"]) == 8
    assert data["pair"] == "bundled" and data["chain_chosen_on"] == []


def test_prompts_of_an_unknown_package_are_refused(llm: LLM) -> None:
    assert llm.models.tokenizer is not None
    with pytest.raises(ValueError, match="no_such_package"):
        excerpts(llm.models.tokenizer, "no_such_package")


def test_repeated_share_counts_8_grams_seen_before() -> None:
    assert repeated_share(list(range(20))) == 0.0
    assert repeated_share([1] * 17) == pytest.approx(9 / 10)
    assert repeated_share([1, 2]) == 0.0
