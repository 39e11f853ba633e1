"""A server whose draft learns: what it stores of whom, and which draft it says it serves with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.serving import KEY, PAIR, PROMPT, Server, running, until

from aquiline.engine.learning.learn_config import LearnConfig
from aquiline.engine.learning.store import Generation, LearningStore, write_learning
from aquiline.engine.model import ResolvedPair
from aquiline.models.formats import save_draft
from aquiline.serve.server_config import ServerConfig

pytestmark = pytest.mark.rare  # each needs an engine process of its own

GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, LearningStore]]:
    folder = tmp_path_factory.mktemp("learnt")
    with running(ServerConfig(api_key=(KEY,)), learning=LearnConfig(folder, 0.0)) as server:
        yield server, LearningStore(folder)


def test_a_request_is_stored_unless_it_refuses_or_has_a_salt(learner: tuple[Server, LearningStore]) -> None:
    server, store = learner
    before = len(list(store.served()))
    text = server.text(PROMPT, **GREEDY)
    server.text(PROMPT, **GREEDY, learn=False)
    server.text(PROMPT, **GREEDY, cache_salt="a tenant")
    server.chat(PROMPT, **GREEDY, learn=False)
    server.post("/v1/responses", input=PROMPT, max_output_tokens=8, learn=False)
    server.text("last", **GREEDY, learn=True)
    server.settle()
    first, last = list(store.served())[before:]
    tokenizer = server.service.prompts.tokenizer
    assert tokenizer.decode(first.tokens[: first.num_prompt]) == PROMPT and first.rejected
    assert tokenizer.decode(first.tokens[first.num_prompt :]) == text
    assert tokenizer.decode(last.tokens).startswith("last")


def test_learn_is_true_or_false(learner: tuple[Server, LearningStore]) -> None:
    assert "learn" in learner[0].error("/v1/completions", prompt=PROMPT, learn="maybe")["message"]


def test_a_new_generation_serves_and_is_told_of_and_texts_stay(learner: tuple[Server, LearningStore]) -> None:
    server, store = learner
    assert server.client.get("/health").json() == {"draft_generation": 0}
    expected = server.text(PROMPT, **GREEDY)
    resolved = ResolvedPair.of(PAIR)
    assert resolved.draft is not None
    draft = resolved.draft_weights(resolved.draft)
    model = dataclasses.replace(draft.model, final_norm=-draft.model.final_norm)
    part = Path(store.folder, "part")
    save_draft(dataclasses.replace(draft, model=model), part)
    write_learning(part, Generation(1, 0, 5000, 1.5, 1.625, (1.02, 1.1), 2.0, 2.0, True))
    part.rename(store.checkpoint(1))
    until(lambda: store.state().serving == 1, "the generation does not serve")
    assert server.text(PROMPT, **GREEDY) == expected
    assert server.client.get("/health").json() == {"draft_generation": 1, "tau_before": 1.5, "tau_after": 1.625}
    assert [server.figure(f"aquiline:draft_{name}") for name in ("generation", "tau_before", "tau_after")] == [
        1, 1.5, 1.625,
    ]  # fmt: skip


def test_a_folder_that_another_server_has_is_refused(learner: tuple[Server, LearningStore]) -> None:
    with (
        pytest.raises(AssertionError, match="another process serves with it; name another folder"),
        running(ServerConfig(), learning=LearnConfig(learner[1].folder)),
    ):
        pass
