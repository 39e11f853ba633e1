"""What settings name, opened: an LLM, the chat template of its target, and by what its results are known."""

from __future__ import annotations

from dataclasses import asdict

from aquiline.config import EngineConfig, PairConfig
from aquiline.engine.llm import LLM
from aquiline.models.fingerprint import fingerprint
from aquiline.models.load import resolve
from aquiline.models.named import checkpoints, draft_of
from aquiline.spec.drafting import Drafting
from aquiline.text.chat import ChatTemplate


def open_llm(pair: PairConfig, engine: EngineConfig, spec: Drafting | None = None) -> LLM:
    """An LLM of the pair; a draft model that `spec` does not use is not loaded. Raises as LLM does."""
    settings = vars(pair) | ({} if spec is None or spec.needs_draft_model else {"draft": None})
    return LLM(**settings, spec=spec, engine=engine)


def open_template(llm: LLM, options: dict[str, object] | None = None) -> ChatTemplate:
    """The chat template of the target that `llm` runs, given these options. Raises as LLM.chat does."""
    return llm.models.template.with_options(options or {})


def identity(llm: LLM, pair: PairConfig) -> dict[str, object]:
    """What decides results beside the sampling: checkpoints by their bytes, how they run, how the draft is used."""
    models, named = llm.models, checkpoints(pair.target, pair.draft)
    draft: object = None
    if models.draft_config is not None and named.draft is not None:
        checkpoint = fingerprint(resolve(draft_of(named.draft)))
        draft = [checkpoint, asdict(models.draft_config), asdict(llm.spec)]
    elif llm.spec.is_speculative:
        draft = llm.spec.as_dict()
    return {
        "target": fingerprint(resolve(named.target)), "draft": draft,
        "dtype": models.storage, "arithmetic": models.arithmetic, "path": models.pair.name,
    }  # fmt: skip
