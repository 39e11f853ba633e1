from __future__ import annotations

import numpy as np
from tests.conftest import engine_config, needs_native, tiny_models
from tests.engine.storage import native

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.score import Scorer
from aquiline.spec.drafting import NoDraft


@needs_native
def test_a_document_scores_the_same_alone_and_among_others() -> None:
    models = tiny_models()
    scorer = Scorer(models, 200)
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 96, n).astype(np.int32) for n in (1, 70, 17, 64)]
    together = scorer(documents)
    hidden, features = together.hidden.copy(), together.features.copy()
    start = 0
    for tokens in documents:
        alone = scorer([tokens])
        stop = start + len(tokens)
        assert (alone.hidden == hidden[start:stop]).all() and (alone.features == features[start:stop]).all()
        start = stop


@needs_native
def test_scores_are_what_decoding_computed() -> None:
    """The features that training sees of a text are, to the bit, those that wrote it."""
    models = tiny_models()
    llm = LLM.from_models(models, engine_config())
    seen: list[np.ndarray] = []

    def read(delta: object) -> None:
        seen.append(native(llm.engine)._features[0].copy())

    output = llm.run([[5, 6, 7]], SamplingParams(max_tokens=20), spec=NoDraft(), on_delta=read).outputs[0]
    scored = Scorer(models, 64)([np.array(output.prompt_ids + output.token_ids, np.int32)])
    decoded = np.stack(seen[1:])  # the first delta comes with the prompt's chunk
    assert (scored.features[3 : 3 + len(decoded)] == decoded).all()
