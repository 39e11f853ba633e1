from __future__ import annotations

import numpy as np
from tests.conftest import engine_config, needs_native, tiny_models
from tests.engine.logits import fused_of
from tests.engine.storage import draft_stored

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.score import Scorer
from aquiline.spec.drafting import Chain


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
    """The features that training sees of a text are, to the bit, those that its drafts read while it was written."""
    models = tiny_models()
    llm = LLM.from_models(models, engine_config())
    sequence = llm.engine.add(llm.request(0, [5, 6, 7], SamplingParams(max_tokens=20), Chain(3)))
    while len(sequence.output_ids) < 12:
        llm.engine.step()
    end = sequence.num_cached  # features of the tokens before the root are kept
    _, _, fused = draft_stored(llm.engine, llm.engine.pool.owned[sequence.slot], 1, end + 1)
    scored = Scorer(models, 64)([np.array(sequence.tokens, np.int32)])
    assert end > 12 and np.array_equal(fused, fused_of(models.pair, scored.features[:end]))
