"""Arguments, processors, parts and families that the engine cannot obey are refused by name, before packing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.conftest import needs_native
from torch import nn
from transformers import (
    DynamicCache,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import aquiline.transformers.speculation as speculation
from aquiline.errors import CheckpointError
from custom_generate.models import batch, draft_of, model_of, new_model, speculating

pytestmark = needs_native

SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}


@pytest.fixture
def nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(*given: object) -> None:
        raise AssertionError("packed before it was refused")

    monkeypatch.setattr(speculation, "from_weights", packed)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 3}, "num_beams=3: is another way to generate"),
    ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, "num_beams=4"),
    ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha=0\.6"),
    ({"dola_layers": "low"}, "dola_layers='low'"),
    ({"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens=4"),
    ({"prompt_lookup_num_tokens": 1}, "generation mode 'assisted_generation'"),
    ({"assistant_early_exit": 4}, "assistant_early_exit=4"),
    ({"use_mtp": True}, "generation mode|use_mtp"),
    ({"force_words_ids": [[5]], "num_beams": 2}, "num_beams=2|force_words_ids"),
    ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True: the engine does not keep them"),
    ({"output_logits": True, "return_dict_in_generate": True}, "output_logits=True"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    ({"output_hidden_states": True}, "output_hidden_states: is an argument of the model's forward"),
    ({"labels": torch.zeros(1)}, "labels: is an argument of the model's forward"),
    ({"inputs_embeds": torch.zeros(2, 12, 48), "input_ids": None}, "inputs_embeds: is an argument"),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor: is a logits processor that does not run here"),
    ({"sequence_bias": [[[5], 1.5]]}, "SequenceBiasLogitsProcessor"),
    ({"encoder_repetition_penalty": 1.5}, "EncoderRepetitionPenaltyLogitsProcessor"),
    ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGramLogitsProcessor"),
    ({"prefix_allowed_tokens_fn": lambda row, ids: [5]}, "PrefixConstrainedLogitsProcessor"),
    ({"forced_bos_token_id": 5}, "ForcedBOSTokenLogitsProcessor"),
    ({"forced_eos_token_id": 5}, "ForcedEOSTokenLogitsProcessor"),
    ({"remove_invalid_values": True}, "InfNanRemoveLogitsProcessor"),
    ({"exponential_decay_length_penalty": (3, 1.1)}, "ExponentialDecayLengthPenalty"),
    ({"begin_suppress_tokens": [5]}, "SuppressTokensAtBeginLogitsProcessor"),
    ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    ({**SAMPLED, "typical_p": 0.5}, "TypicalLogitsWarper"),
    ({**SAMPLED, "epsilon_cutoff": 0.1}, "EpsilonLogitsWarper"),
    ({**SAMPLED, "eta_cutoff": 0.1}, "EtaLogitsWarper"),
    ({**SAMPLED, "top_h": 0.5}, "TopHLogitsWarper"),
    ({**SAMPLED, "watermarking_config": {"bias": 2.0}}, "WatermarkLogitsProcessor"),
    ({**SAMPLED, "temperature": 1e9}, "temperature=1000000000.0: must be 0"),
    (
        {**SAMPLED, "temperature": 0.5, "logits_processor": [TopPLogitsWarper(0.5)]},
        "TemperatureLogitsWarper: stands after TopPLogitsWarper: the order here is",
    ),
    ({**SAMPLED, "logits_processor": [TopKLogitsWarper(5), TopKLogitsWarper(5)]}, "TopKLogitsWarper: stands after"),
    ({**SAMPLED, "logits_processor": [TopPLogitsWarper(0.5, filter_value=-9.0)]}, r"filter_value=-9\.0"),
    ({**SAMPLED, "logits_processor": [TopPLogitsWarper(0.5, min_tokens_to_keep=2)]}, "min_tokens_to_keep=2"),
    (
        {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=7)]},
        "RepetitionPenaltyLogitsProcessor: prompt_ignore_length=7",
    ),
    (
        {"logits_processor": [MinNewTokensLengthLogitsProcessor(12, 3, eos_token_id=9)]},
        r"MinNewTokensLengthLogitsProcessor: forbids \[9\], and rows end at \[2\]",
    ),
    ({"attention_mask": torch.tensor([[1] * 11 + [0]] * 2)}, "attention_mask: row 0 has zeros after its first one"),
    ({"attention_mask": torch.tensor([[1] * 12, [0] * 12])}, "attention_mask: row 1 has zeros"),
    ({"attention_mask": torch.ones(2, 13).long()}, "position_ids: differ|attention_mask: is"),  # ones may be dropped
    ({"attention_mask": torch.tensor([[0] + [1] * 12] * 2)}, r"attention_mask: is \[2, 13\] beside"),
    ({"position_ids": torch.arange(1, 13)[None]}, "position_ids: differ"),
    (
        {"eos_token_id": None, "pad_token_id": None, "stopping_criteria": [transformers.MaxTimeCriteria(1.0)]},
        "pad_token_id=None: rows that MaxTimeCriteria may end early need one",
    ),
]  # fmt: skip


@pytest.mark.usefixtures("nothing_is_packed")
@pytest.mark.parametrize(("arguments", "told"), REFUSED, ids=[told[:50] for _, told in REFUSED])
def test_an_argument_that_cannot_be_obeyed_is_refused_before_packing(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        model_of().generate(**batch(2) | {"max_new_tokens": 3} | arguments, custom_generate=speculating())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"bad_words_ids": [[5, 160]]}, "bad_word_ids: token id 160: must be in"),
        ({"max_new_tokens": 600}, r"prompt of 12 tokens \+ max_tokens=600 exceeds the 512 positions"),
        ({"eos_token_id": 160}, "stop_token_ids: token id 160"),
    ],
)
def test_what_the_model_is_too_small_for_is_refused_before_the_first_token(
    arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        model_of().generate(**batch(2) | {"max_new_tokens": 3} | arguments, custom_generate=speculating())


def test_what_transformers_does_not_hand_on_is_refused_too() -> None:
    """An assistant is in no argument of the callable; a cache that the caller made is filled by nobody."""
    model, inputs = model_of(), batch(2) | {"max_new_tokens": 3}
    with pytest.raises(ValueError, match="assistant_model: is another way to draft"):
        model.generate(**inputs, assistant_model=model, custom_generate=speculating())
    with pytest.raises(ValueError, match=r"(cache|past_key_values): the engine has its own cache"):
        model.generate(**inputs, past_key_values=DynamicCache(config=model.config), custom_generate=speculating())
    heard = type("Heard", (), {"put": lambda self, value: None, "end": lambda self: None})()
    with pytest.raises(ValueError, match="streamer: takes one row, and there are 2"):
        model.generate(**inputs, custom_generate=speculating(streamer=heard))


def test_transformers_itself_refuses_stop_strings() -> None:
    """It hands no tokenizer to a callable; StopStringCriteria carries its own."""
    with pytest.raises(ValueError, match="stop strings"):
        model_of().generate(**batch(1), stop_strings=["a"], custom_generate=speculating())


def test_settings_are_refused_when_they_are_given() -> None:
    with pytest.raises(ValueError, match="drafter='eagle': must be one of none, adaptive"):
        speculating(drafter="eagle")
    with pytest.raises(CheckpointError, match="is neither a directory nor"):
        speculating(draft="no draft")
    with pytest.raises(ValueError, match="drafter='chain': no draft model is loaded"):
        model_of().generate(**batch(1), max_new_tokens=3, custom_generate=speculating(drafter="chain"))
    with pytest.raises(CheckpointError, match="vocab_size=160, the target has 96"):
        model = new_model(vocab_size=96)
        model.generate(**batch(1), max_new_tokens=3, custom_generate=speculating(draft_of(), "chain"))
    with pytest.raises(CheckpointError, match="LlamaForCausalLM: dtype='packed' is for"):
        model_of().generate(**batch(1), max_new_tokens=3, custom_generate=speculating(dtype="packed"))


@pytest.mark.usefixtures("nothing_is_packed")
def test_other_families_are_refused_before_packing() -> None:
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=160, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(CheckpointError, match=r"model_type='gpt2', architectures=.*supported are LlamaForCausalLM"):
        gpt2.generate(**batch(1), max_new_tokens=3, custom_generate=speculating())
    model = new_model()
    model.config.hidden_act = "gelu"
    with pytest.raises(CheckpointError, match="LlamaForCausalLM/config: hidden_act='gelu'; supported is 'silu'"):
        model.generate(**batch(1), max_new_tokens=3, custom_generate=speculating())


class LowRank(nn.Linear):
    """A linear with an adapter, as peft puts them in."""

    active_adapters = ("french",)


def with_adapter(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = LowRank(48, 80, bias=False)


def with_hook(model: Any) -> None:
    model.model.layers[2].register_forward_hook(lambda module, given, output: output)


def with_own_forward(model: Any) -> None:
    model.lm_head.forward = lambda rows: rows


def with_offloaded(model: Any) -> None:
    model.model.norm.to("meta")


def with_dropout(model: Any) -> None:
    model.config.attention_dropout = 0.1
    model.train()


def with_parametrisation(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", nn.Identity())


@pytest.mark.usefixtures("nothing_is_packed")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (with_adapter, r"layers\.1\.mlp\.up_proj: is a .*LowRank with adapters \('french',\).*merge_and_unload"),
        (with_hook, r"model\.layers\.2: has a forward hook"),
        (with_own_forward, "lm_head: has a forward hook or a forward of its own"),
        (with_offloaded, r"model\.norm\.weight: is on the meta device"),
        (with_dropout, r"attention_dropout=0\.1 in training mode"),
        (with_parametrisation, r"lm_head: is a .*ParametrizedLinear"),
    ],
)
def test_a_part_that_computes_something_else_is_refused_before_packing(
    change: Callable[[Any], None], told: str
) -> None:
    model = new_model()
    change(model)
    with pytest.raises(ValueError, match=told):
        model.generate(**batch(1), max_new_tokens=3, custom_generate=speculating())


def test_hooks_of_transformers_itself_are_no_reason() -> None:
    """Asking for hidden states once leaves hooks on every layer."""
    model = new_model()
    model.generate(**batch(1), max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    assert any(part._forward_hooks for part in model.modules())
    assert model.generate(**batch(1), max_new_tokens=3, custom_generate=speculating()).shape[1] == 15
