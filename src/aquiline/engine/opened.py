"""What settings name, opened: an LLM, the chat template of its target, and by what its results are known."""

from __future__ import annotations

from dataclasses import asdict

from aquiline.backends.choose import path_of
from aquiline.config import EngineConfig, Environment, PairConfig
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading, for_checkpoint
from aquiline.models.draft_config import read_draft_config
from aquiline.models.fingerprint import fingerprint
from aquiline.models.load import resolve
from aquiline.models.named import checkpoints, draft_of
from aquiline.spec.drafting import Drafting
from aquiline.text.chat_template import ChatTemplate


def open_llm(pair: PairConfig, engine: EngineConfig, spec: Drafting | None = None) -> LLM:
    """An LLM of the pair; a draft model that `spec` does not use is not loaded. Raises as LLM does."""
    settings = vars(pair) | ({} if spec is None or spec.needs_draft_model else {"draft": None})
    return LLM(**settings, spec=spec, engine=engine)


def open_template(llm: LLM, options: dict[str, object] | None = None) -> ChatTemplate:
    """The chat template of the target that `llm` runs, given these options. Raises as LLM.chat does."""
    return llm.models.template.with_options(options or {})


def identity(pair: PairConfig, spec: Drafting) -> dict[str, object]:
    """What decides results beside the sampling: checkpoints by their bytes, how they run, how the draft is used.

    Loads nothing, so results that do not belong to it are refused before the weights are read. Raises CheckpointError
    for a checkpoint that cannot be read, ValueError for settings that this machine does not have."""
    named, environment = checkpoints(pair.target, pair.draft), Environment.read()
    target = resolve(named.target)
    dtype = for_checkpoint(Loading(pair.dtype, pair.arithmetic), target, environment).dtype
    path, arithmetic = path_of("cpu", pair.arithmetic, dtype, environment)
    draft: object = None
    if spec.needs_draft_model and named.draft is not None:
        checkpoint = resolve(draft_of(named.draft))
        config = read_draft_config(checkpoint, target, capture=pair.capture, norm_feedback=pair.norm_feedback)
        draft = [fingerprint(checkpoint), asdict(config), asdict(spec)]
    elif spec.is_speculative:
        draft = spec.as_dict()
    return {"target": fingerprint(target), "draft": draft, "dtype": dtype, "arithmetic": arithmetic, "path": path}
