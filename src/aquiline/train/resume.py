"""What a resumed run must share with the run it continues, and what it may change.

With the same settings and data, a resumed run ends with the weights of the unbroken one, to the bit on one kind of CPU.
Every field of TrainConfig stands in exactly one of the groups below.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from aquiline.train.documents import Corpus
from aquiline.train.train_config import TrainConfig

COMPARED = (
    "batch_size", "accumulate", "context", "ttt_steps", "late_share", "loss", "loss_on", "replay", "decay", "optimizer",
    "warmup", "clip", "weight_decay", "seed", "ema", "eval_rows", "eval_tokens", "draft_dtype",
)  # fmt: skip
"""Fields stored as they are."""
DERIVED = (
    "lr", "target", "data", "held_out", "draft_vocab_size", "intermediate_size", "num_heads", "num_kv_heads", "capture",
    "draft_window", "rope_scaling",
)  # fmt: skip
"""Fields for which a derived value is stored: the rate used, digests of weights and data, the draft's shape."""
CHANGEABLE = (
    "data", "held_out", "eval_rows", "eval_tokens", "lr", "batch_size", "accumulate", "context", "ttt_steps",
    "late_share", "loss", "loss_on", "replay", "decay", "warmup", "clip", "seed", "draft_dtype",
)  # fmt: skip
"""Fields that --may-differ can name: weights and optimizer state stay valid under another value."""
JUDGED_BY = ("held_out", "eval_rows", "eval_tokens", "ttt_steps", "draft_dtype")
"""Fields that change how drafts are judged: scores from before and after a change cannot be compared."""
BUDGET = ("steps", "tokens", "minutes", "epochs")
"""A changed budget is announced, not refused: the learning rate follows the new budget from the present step on."""
UNSTORED = {"replay": 1.0, "draft_dtype": "bfloat16"}
"""Fields that older checkpoints lack, with the value that their runs had."""
FREE = (
    "out", "init", "norm_feedback", "resume", "may_differ", "log_every", "eval_every", "features", "keep",
    "save_every_minutes", "parallel", "attention", "log",
)  # fmt: skip
"""Fields that the weights do not depend on, except for rounding: `parallel` and `attention` change orders of sums."""


def corpus_digest(corpus: Corpus) -> str:
    """128 bits of the hash of a corpus: tokens, document boundaries, mask, and rejected tokens if there are any. So a
    corpus without rejected tokens keeps the digest that older checkpoints store."""
    digest = hashlib.sha256()
    for array, kind in ((corpus.tokens, "<i4"), (corpus.starts, "<i8"), (corpus.mask, "?")):
        digest.update(array.astype(kind).tobytes())
    if corpus.rejected.any():
        digest.update(corpus.rejected.tobytes())
    return digest.hexdigest()[:32]


def settings_of(config: TrainConfig, derived: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint stores of a run's settings; `derived` has the keys of DERIVED."""
    assert set(derived) == set(DERIVED), set(derived) ^ set(DERIVED)
    return {name: getattr(config, name) for name in (*COMPARED, *BUDGET)} | dict(derived)


class Changes(NamedTuple):
    """notices: what the user must be told. is_judged_anew: whether the best score so far can no longer be compared."""

    notices: list[str]
    is_judged_anew: bool


def check_settings(stored: Mapping[str, Any], now: Mapping[str, Any], may_differ: tuple[str, ...]) -> Changes:
    """Compare a run's stored settings with those of the command that resumes it.

    Raises ValueError naming every field that differs and is not in `may_differ`."""
    unknown = sorted(set(may_differ) - set(CHANGEABLE))
    if unknown:
        raise ValueError(f"may_differ={','.join(unknown)}: what may differ is {', '.join(CHANGEABLE)}")
    before = UNSTORED | dict(stored)
    differing = [name for name in now if name not in before or before[name] != now[name]]
    told = {name: f"{name}: {before.get(name, 'not known')} before, {now[name]} now" for name in differing}
    refused = [told[name] for name in differing if name not in BUDGET and name not in may_differ]
    if refused:
        raise ValueError(
            f"--resume: the run had other settings ({'; '.join(refused)}); give the same, or start a new run from its "
            "weights with --init, or name what changes on purpose with --may-differ"
        )
    notices = [f"changed: {told[name]}" for name in differing if name not in BUDGET]
    budgets = [told[name] for name in differing if name in BUDGET]
    if budgets:
        notices.append(f"budget changed ({'; '.join(budgets)}): the learning rate follows the new one from here on")
    return Changes(notices, any(name in JUDGED_BY for name in differing))
