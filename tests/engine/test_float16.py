"""float16 storage: speculation changes no token, no instruction set a bit; keys and values are bfloat16 beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import write_draft, write_target
from tests.conftest import engine_config, needs_native, tiny_llm
from tests.engine import storage
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, check_accounting, prompts, tokens
from tests.engine.test_golden import observe, restored_isa
from tests.engine.test_quantised import pair_llm

from aquiline.backends.cpu import native
from aquiline.backends.cpu.native_pair import resolve_arithmetic
from aquiline.backends.torch.decoder import load_target
from aquiline.engine.llm import LLM
from aquiline.errors import CheckpointError
from aquiline.models.load import read_model_config

__all__ = ["restored_isa"]


@needs_native
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_every_drafter_gives_the_baseline(sampling: str) -> None:
    llm = tiny_llm("float16", max_batch=3)
    expected = llm.run(prompts(8), SAMPLINGS[sampling], drafting=BASELINE)
    for name, drafting in SPECS.items():
        result = llm.run(prompts(8), SAMPLINGS[sampling], drafting=drafting)
        assert tokens(result) == tokens(expected), f"{name} differs from the baseline in float16"
        check_accounting(result)
    assert llm.models.system()["dtype"] == "float16" and storage.native(llm.engine).kv.k.dtype.name == "bfloat16"


@needs_native
def test_every_instruction_set_gives_the_same_bits(restored_isa: None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.load()
    assert library is not None
    found = []
    for isa in library.available_isas():
        monkeypatch.setenv("AQUILINE_ISA", isa)
        found.append(observe("float16"))
    assert all(one == found[0] for one in found)


@needs_native
def test_a_checkpoint_in_float16_keeps_its_values(tmp_path: Path) -> None:
    """float16 to float16 is exact, so float32 storage of the same file differs by what is rounded of keys alone."""
    write_target(tmp_path / "target", dtype=torch.float16)
    write_draft(tmp_path / "draft", read_model_config(tmp_path / "target"), dtype=torch.float16)
    exact, stored = (load_target(tmp_path / "target", dtype=dtype) for dtype in ("float32", "float16"))
    for ours, theirs in zip(stored.parameters(), exact.parameters(), strict=True):
        assert ours.dtype == torch.float16 and torch.equal(ours.float(), theirs)
    llm = LLM(tmp_path / "target", tmp_path / "draft", dtype="float16", engine=engine_config(2))
    assert tokens(llm.run(prompts(4), SAMPLINGS["sampled"], drafting=SPECS["chain4"])) == tokens(
        llm.run(prompts(4), SAMPLINGS["sampled"], drafting=BASELINE)
    )


@needs_native
def test_the_torch_path_writes_the_same_text() -> None:
    texts = [tokens(pair_llm("float16", isa).run(prompts(5), SAMPLINGS["sampled"])) for isa in (None, "off")]
    assert texts[0] == texts[1], "no near tie in this fixture"


def test_what_float16_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    write_target(tmp_path, dtype=torch.bfloat16)
    load_target(tmp_path, dtype="float16")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][3] = 70000.0
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds 70144, .* 65504: use dtype='bfloat16'"):
        load_target(tmp_path, dtype="float16")
    with pytest.raises(ValueError, match="needs dtype='bfloat16', and dtype is 'float16'"):
        resolve_arithmetic("bfloat16", "float16")
