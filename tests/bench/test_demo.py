"""The demo's own logic on the bundled pair: identical outputs, figures that can be recomputed, the JSON as promised."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
from tests.conftest import needs_native

from aquiline.bench.data.prompts import PROMPT_TOKENS, package_prompts, read_prompts
from aquiline.bench.suite.demo import SETTINGS, TEMPERATURES, run_demo
from aquiline.config import EngineConfig
from aquiline.engine.llm import LLM
from aquiline.metrics import repeated_share
from aquiline.models.named import BUNDLED_PROMPTS

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(engine=EngineConfig(max_batch=1))


def test_bundled_prompts_are_eight_of_about_300_tokens(llm: LLM) -> None:
    prompts = read_prompts(BUNDLED_PROMPTS)
    assert len(prompts) >= 8 and len({p.source for p in prompts}) == len(prompts)
    assert all(PROMPT_TOKENS * 0.8 <= len(llm.encode(p.text)) <= PROMPT_TOKENS + 8 for p in prompts)


@needs_native
def test_speculation_changes_nothing_and_pays_in_calls(llm: LLM) -> None:
    ticks = itertools.count()
    result = run_demo(llm, read_prompts(BUNDLED_PROMPTS)[:3], lambda: next(ticks), NEW_TOKENS)
    assert result.identical
    assert next(ticks) == 3 * len(SETTINGS) * len(TEMPERATURES)
    data = json.loads(json.dumps(result.as_dict()))
    wanted = (
        "name drafter temperature repeated_share tokens_per_s tau acceptance_rate per_position speedup "
        "target_calls_per_token"
    )
    for row, run in zip(data["runs"], result.runs, strict=True):
        assert set(wanted.split()) <= set(row)
        made = sum(len(o.token_ids) for o in run.outputs)
        assert made == 3 * NEW_TOKENS == len(run.outputs) + row["num_committed"]
        assert row["tau"] == pytest.approx((made - len(run.outputs)) / row["num_steps"])
        # a trained draft: well above nothing, on every setting that drafts
        assert row["tau"] == 1.0 if row["drafter"] == "none" else row["tau"] > 1.5
    for run in (r for r in result.runs if r.spec.is_speculative):
        for output in run.outputs:
            output.token_ids[-1] ^= 1
            assert not result.is_identical(run) and not result.identical, "one changed token of any prompt must show"
            output.token_ids[-1] ^= 1
        assert result.is_identical(run)


@needs_native
def test_the_command_prints_json_and_exits_with_0() -> None:
    command = [sys.executable, "-c", "from aquiline.cli.main import app; app()", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["identical"] is True and len(data["prompts"]) >= 8 and len(data["runs"]) == 6


def test_prompts_of_an_unknown_package_are_refused(llm: LLM) -> None:
    assert llm.models.tokenizer is not None
    with pytest.raises(ValueError, match="no_such_package"):
        package_prompts("no_such_package", llm.models.tokenizer)


def test_repeated_share_counts_8_grams_seen_before() -> None:
    assert repeated_share(list(range(20))) == 0.0
    assert repeated_share([1] * 17) == pytest.approx(9 / 10)
    assert repeated_share([1, 2]) == 0.0
