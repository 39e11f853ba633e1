"""A server learns as its user sees it: requests come, the trainer's own process makes a generation of them, the server
goes over to it while requests run, and its owner looks, takes it out, goes back and forgets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.serve.serving import Server, running, until
from tests.train.learning import write_pair
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from aquiline.cli.main import app
from aquiline.config import EngineConfig, PairConfig
from aquiline.engine.learning.learn_config import LearnConfig
from aquiline.engine.learning.store import LearningStore
from aquiline.serve.server_config import Limits, ServerConfig
from aquiline.train.learner.lesson import ROUND_TOKENS

pytestmark = pytest.mark.rare  # a server, a trainer and a generation

ENGINE = EngineConfig(max_batch=4, max_context=128, page_size=16, check=True, calibration=False)
CANARIES = [{"prompt": [7 + i, 3, 19 + i], "temperature": 0.8 * i, "seed": 5, "max_tokens": 40} for i in range(2)]
NUM_REQUESTS, NUM_TOKENS = 228, 18
"""With the last request they are as many tokens as a generation needs, and no less will do: so all of them teach."""
PATIENCE = 60_000
"""Looks at whether a generation serves: twenty minutes. The trainer gives way to whatever else a machine does."""


def write_words(pair: PairConfig) -> None:
    """Give the tiny target a tokenizer, a word for each id, and its draft a head of almost nothing: a short run learns
    much."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(48)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(Path(str(pair.target)) / "tokenizer.json"))
    file = Path(str(pair.draft)) / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * 1e-3}, file)


def ask(server: Server) -> list[str]:
    """The canaries' texts. They are not learnt from."""
    return [server.text(**canary, learn=False) for canary in CANARIES]  # type: ignore[arg-type]


def send_traffic(server: Server) -> None:
    """What a generation needs, greedily, since the draft then learns the most."""
    rng = np.random.default_rng(0)
    for prompt in rng.integers(1, 48, (NUM_REQUESTS, 6)).tolist():
        server.complete(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


@contextmanager
def asked_all_the_while(server: Server) -> Iterator[list[list[str]]]:
    """The canaries are asked for again and again up to the end of the block; what they were answered."""
    told, is_over = list[list[str]](), threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            told.append(ask(server))

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield told
    finally:
        is_over.set()
        thread.join()


def learn(*args: object) -> str:
    done = CliRunner().invoke(app, ["learn", *map(str, args)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_server_learns_while_texts_stay(tmp_path: Path) -> None:
    pair, store = write_pair(tmp_path / "pair"), LearningStore(tmp_path / "learnt")
    write_words(pair)
    with running(ServerConfig(), Limits(), ENGINE, pair, LearnConfig(store.folder, 1.0)) as server:
        expected = ask(server)
        with asked_all_the_while(server) as told:
            send_traffic(server)
            until(lambda: server.figure("aquiline:draft_generation") == 1, "no generation serves", PATIENCE)
            num_before = len(told)
            until(lambda: len(told) > num_before + 2, "canaries are not answered")
        assert told == [expected] * len(told)
        health = server.client.get("/health").json()
        assert health["draft_generation"] == 1 and health["tau_after"] > health["tau_before"]

        shown = json.loads(learn(store.folder, "--json"))
        [found] = shown["generations"]
        assert shown["serving"] == 1 and found["accepted"] and found["interval"][0] > 1
        assert found["tokens"] == NUM_REQUESTS * NUM_TOKENS >= ROUND_TOKENS, "of the canaries nothing is learnt"
        learn(store.folder, "--export", tmp_path / "better")
        with asked_all_the_while(server) as told:
            learn(store.folder, "--roll-back")
            until(lambda: server.figure("aquiline:draft_generation") == 0, "the shipped draft does not serve")
        assert told == [expected] * len(told) and ask(server) == expected
        learn(store.folder, "--forget", "everything")
        assert not list(store.served()) and not store.generations()
    with running(ServerConfig(), Limits(), ENGINE, PairConfig(pair.target, str(tmp_path / "better"))) as server:
        assert ask(server) == expected, "what was taken out drafts for the same target"
