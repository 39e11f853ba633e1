"""What a lookup costs the host per step and sequence, and what it drafts: three texts, no model.

A text of the bundled target's tokens is written step by step as verification would write it: the proposer sees prompt
and output, drafts, and the step commits what it drafted rightly and one token more. So the time of a step covers the
tokens that it indexes and the draft that it copies. "edited" is the prompt again with every 40th token changed,
"predicted" the same with the prompt as the prediction, "new" is another text. Ends with one JSON line.
"""

from __future__ import annotations

import json
import time

import numpy as np

from aquiline.bench.data.prompts import text_prompts
from aquiline.models.named import BUNDLED_TARGET
from aquiline.spec.lookup import Lookup
from aquiline.spec.match_events import MatchEvents
from aquiline.text.tokenizer import load_tokenizer

NUM_PROMPT = 2000
ROUNDS = 20


def steps(spec: Lookup, prompt: list[int], output: list[int], prediction: list[int], events: MatchEvents) -> np.ndarray:
    """Microseconds, tokens drafted and tokens committed of every step that writes the output, [steps, 3]; the first
    step indexes the prompt."""
    proposer = spec.proposer(prompt, prediction, events)
    tokens, written, found = [*prompt, output[0]], 1, []
    while written < len(output):
        began = time.perf_counter()
        drafted = proposer.propose(tokens, spec.max_draft).tokens
        took_us = (time.perf_counter() - began) * 1e6
        wanted = output[written : written + len(drafted)]
        right = next((i for i, (a, b) in enumerate(zip(drafted, wanted, strict=False)) if a != b), len(wanted))
        tokens += output[written : written + right + 1]
        written += right + 1
        found.append((took_us, len(drafted), right + 1))
    return np.array(found)


def main() -> None:
    """Measure and print."""
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    assert tokenizer is not None
    prompt, new = (found.token_ids for found in text_prompts(NUM_PROMPT, 2, tokenizer))
    edited = [token if i % 40 else new[i] for i, token in enumerate(prompt)]
    texts = {"edited": (edited, []), "predicted": (edited, prompt), "new": (new, [])}
    shown: dict[str, dict[str, float]] = {}
    for name, (output, prediction) in texts.items():
        events, spec = MatchEvents(), Lookup()
        rounds = [steps(spec, prompt, output, prediction, events) for _ in range(ROUNDS)][1:]
        first, later = np.array([r[0, 0] for r in rounds]), np.concatenate([r[1:] for r in rounds])
        full = later[later[:, 1] == spec.max_draft]
        shown[name] = {
            "index_us_per_token": float(np.median(first)) / (len(prompt) + len(prediction)),
            "step_us": float(np.median(later[:, 0])),
            "step_us_p99": float(np.quantile(later[:, 0], 0.99)),
            "full_draft_step_us": float(np.median(full[:, 0])) if len(full) else 0.0,
            "drafted_per_step": float(later[:, 1].mean()),
            "committed_per_step": float(later[:, 2].mean()),
        }
        print(name, {key: round(value, 2) for key, value in shown[name].items()})
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
