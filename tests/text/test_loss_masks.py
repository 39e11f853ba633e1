"""Loss masks of chats: for every family, exactly the tokens the model itself would have written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.families import HARMONY, LLAMA31, MARKED, QWEN3, QWEN25, SMOLLM2, SPECIAL, byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from aquiline.text.chat_template import ChatTemplate, MaskedTokens, Message, conversation

TOKENIZER = byte_tokenizer()
TWO = conversation(["Hi", "And é?"], ["Hello.", "Fine,\n\n  thanks "], complete=True)
THOUGHT = conversation(["Hi", "X"], ["<think>\nwhy\n</think>\n\nSo.", "<think>\nhm\n</think>\n\nYes."], complete=True)


def template(source: str, **options: object) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL, TOKENIZER, options, name="the template")


def written(masked: MaskedTokens) -> list[str]:
    """The runs of tokens that count, as text."""
    assert masked.ids.dtype == np.int32 and masked.mask.dtype == np.bool_ and masked.ids.shape == masked.mask.shape
    edges = np.flatnonzero(np.diff(np.concatenate(([False], masked.mask, [False])).astype(int)))
    runs = edges.reshape(-1, 2).tolist()
    return [TOKENIZER.decode(masked.ids[a:b].tolist(), skip_special_tokens=False) for a, b in runs]


@pytest.mark.parametrize(
    ("source", "options", "messages", "expected"),
    [
        (SMOLLM2, {}, TWO, ["Hello.<|im_end|>", "Fine,\n\n  thanks <|im_end|>"]),
        (QWEN25, {}, TWO, ["Hello.<|im_end|>", "Fine,\n\n  thanks <|im_end|>"]),
        (LLAMA31, {}, TWO, ["Hello.<|eot_id|>", "Fine,\n\n  thanks<|eot_id|>"]),  # its template trims
        (MARKED, {}, TWO, ["Hello.<|eot_id|>", "Fine,\n\n  thanks <|eot_id|>"]),
        (QWEN3, {"enable_thinking": False}, TWO[:2], ["Hello.<|im_end|>"]),  # its prompt closes the reasoning
        (QWEN3, {}, TWO[:2], ["<think>\n\n</think>\n\nHello.<|im_end|>"]),  # the model opens and closes it
        (QWEN3, {}, THOUGHT[:2], ["<think>\nwhy\n</think>\n\nSo.<|im_end|>"]),
        (HARMONY, {}, TWO[:2], ["<|channel|>final<|message|>Hello.<|return|>"]),
        (
            HARMONY, {}, [TWO[0], {"role": "assistant", "content": "Hello.", "thinking": "Greet."}],
            [
                "<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant<|channel|>final<|message|>Hello."
                "<|return|>"
            ],
        ),
    ],
)  # fmt: skip
def test_what_counts_is_what_the_model_writes(
    source: str, options: dict[str, object], messages: list[Message], expected: list[str]
) -> None:
    chat = template(source, **options)
    masked = chat.encode_with_mask(messages)
    assert masked.ids.tolist() == chat.encode(messages, add_generation_prompt=False)
    assert written(masked) == expected
    (same,) = chat.encode_answers(messages)
    assert same.ids.tolist() == masked.ids.tolist() and same.mask.tolist() == masked.mask.tolist()


@pytest.mark.parametrize("source", [SMOLLM2, QWEN25, QWEN3, LLAMA31, MARKED, HARMONY])
def test_an_answer_begins_where_its_prompt_as_served_ends(source: str) -> None:
    chat = template(source)
    masked, prompt = chat.encode_answers(TWO)[0], chat.encode(TWO[:3])
    assert masked.ids[: len(prompt)].tolist() == prompt
    assert masked.mask[len(prompt)] and not masked.mask[len(prompt) - 1]
    behind = TOKENIZER.decode(masked.ids[len(prompt) :].tolist(), skip_special_tokens=False)
    assert behind.startswith(written(masked)[-1])


@pytest.mark.parametrize(
    ("source", "options", "messages", "expected"),
    [
        (
            QWEN3, {}, THOUGHT,
            [["<think>\nhm\n</think>\n\nYes.<|im_end|>"], ["<think>\nwhy\n</think>\n\nSo.<|im_end|>"]],
        ),
        (QWEN3, {"enable_thinking": False}, TWO, [["Fine,\n\n  thanks <|im_end|>"], ["Hello.<|im_end|>"]]),
        (
            HARMONY, {}, TWO,
            [
                ["<|channel|>final<|message|>Fine,\n\n  thanks <|return|>"],
                ["<|channel|>final<|message|>Hello.<|return|>"],
            ],
        ),
    ],
)  # fmt: skip
def test_an_answer_that_is_rewritten_later_is_found_in_a_text_of_its_own(
    source: str, options: dict[str, object], messages: list[Message], expected: list[list[str]]
) -> None:
    chat = template(source, **options)
    parts = chat.encode_answers(messages)
    assert [written(part) for part in parts] == expected
    for part, until in zip(parts, (4, 2), strict=True):
        assert part.ids.tolist() == chat.encode(messages[:until], add_generation_prompt=False)
    with pytest.raises(ValueError, match="the template: message 2, an answer: is written otherwise"):
        chat.encode_with_mask(messages)


def test_generation_blocks_count_as_in_transformers() -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, **SPECIAL).apply_chat_template(
        TWO, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = template(MARKED).encode_with_mask(TWO)
    assert ours.ids.tolist() == theirs["input_ids"] and ours.mask.astype(int).tolist() == theirs["assistant_masks"]


def test_a_block_that_marks_header_and_line_break_is_cut_to_the_answer() -> None:
    wide = SMOLLM2.replace("<|im_start|>{{ message.role }}", "{% generation %}<|im_start|>{{ message.role }}")
    wide = wide.replace("<|im_end|>\n{% endfor", "<|im_end|>\n{% endgeneration %}\n{% endfor")
    both = (
        "{% if message.role == 'assistant' %}" + wide.split("{% for message in messages %}\n")[1].split("{% endfor")[0]
    )
    plain = SMOLLM2.split("{% for message in messages %}\n")[1].split("{% endfor")[0]
    source = SMOLLM2.replace(plain, f"{both}{{% else %}}\n{plain}{{% endif %}}\n")
    chat = template(source)
    assert source.count("{% generation %}") == 1 and chat.render(TWO, False) == template(SMOLLM2).render(TWO, False)
    assert written(chat.encode_with_mask(TWO)) == ["Hello.<|im_end|>", "Fine,\n\n  thanks <|im_end|>"]


def test_blocks_that_cannot_be_followed_are_refused() -> None:
    trimmed = "{% set x %}{% generation %} {{ messages[1].content }} {% endgeneration %}{% endset %}{{ x | trim }}"
    with pytest.raises(ValueError, match="the template: changes what stands in its generation blocks"):
        template(trimmed).encode_with_mask(TWO)
    never = "{% if false %}{% generation %}x{% endgeneration %}{% endif %}hello"
    with pytest.raises(ValueError, match="writes none of these messages in one"):
        template(never).encode_with_mask(TWO)


def test_templates_that_hide_the_answer_are_refused_by_turn() -> None:
    other_header = SMOLLM2.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>bot\n{% endif %}")
    with pytest.raises(ValueError, match=r"the template: message 4, an answer: does not continue .*bot\\n'"):
        template(other_header).encode_with_mask(TWO)
    shouting = SMOLLM2.replace("message.content }}", "message.content | upper }}")
    with pytest.raises(ValueError, match="message 4, an answer: the template does not write it as it was given"):
        template(shouting).encode_with_mask(TWO)


def test_messages_without_an_answer_or_text_are_refused() -> None:
    with pytest.raises(ValueError, match="the 1 messages hold no answer"):
        template(SMOLLM2).encode_with_mask(TWO[:1])
    with pytest.raises(ValueError, match="message 2: its content is no text"):
        template(SMOLLM2).encode_answers([TWO[0], {"role": "assistant", "content": [{"type": "text"}]}])


def test_an_open_question_at_the_end_is_no_answer() -> None:
    chat = template(SMOLLM2)
    masked = chat.encode_with_mask(TWO[:3])
    assert written(masked) == ["Hello.<|im_end|>"]
    assert masked.ids.tolist() == chat.encode(TWO[:3], add_generation_prompt=False)
    assert [written(part) for part in template(QWEN3).encode_answers(THOUGHT[:3])] == [
        ["<think>\nwhy\n</think>\n\nSo.<|im_end|>"]
    ]


def test_a_token_over_the_border_is_not_counted() -> None:
    """The header ends in a line break and the answer begins with one: the tokenizer makes one token of both."""
    messages = conversation(["Hi"], ["\nHello."], complete=True)
    masked = template(SMOLLM2).encode_with_mask(messages)
    assert TOKENIZER.token_to_id("ĊĊ") in masked.ids[~masked.mask]
    assert written(masked) == ["Hello.<|im_end|>"]


def test_offsets_that_a_post_processor_trims_make_no_difference() -> None:
    trimming = byte_tokenizer()
    trimming.post_processor = processors.ByteLevel(trim_offsets=True)
    source = SMOLLM2.replace("{{ message.role }}\n", "{{ message.role }}: ").replace("assistant\n", "assistant: ")
    messages = conversation(["Hi"], ["a b a"], complete=True)
    chat = ChatTemplate(source, SPECIAL, trimming)
    assert chat.encode(messages, False) == template(source).encode(messages, False)
    masked = chat.encode_with_mask(messages)
    assert TOKENIZER.token_to_id("Ġa") in masked.ids[~masked.mask]  # ": a" holds it, over the border
    assert written(masked) == [" b a<|im_end|>"]


def test_of_several_special_tokens_at_the_end_the_model_writes_the_first() -> None:
    chat = template(SMOLLM2.replace("<|im_end|>\n{% endfor", "<|im_end|> <|endoftext|>\n{% endfor"))
    assert written(chat.encode_with_mask(TWO)) == ["Hello.<|im_end|>", "Fine,\n\n  thanks <|im_end|>"]
    assert chat.end_ids == (TOKENIZER.token_to_id("<|im_end|>"),)


def test_without_a_special_token_the_answer_ends_with_its_text() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    source += "{% if add_generation_prompt %}assistant: {% endif %}"
    chat = template(source)
    assert written(chat.encode_with_mask(TWO)) == ["Hello.", "Fine,\n\n  thanks"]
    assert chat.end_ids == ()


def test_without_a_template_the_contents_count() -> None:
    tokenizer = byte_tokenizer()
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    chat = ChatTemplate(None, SPECIAL, tokenizer)
    masked = chat.encode_with_mask(TWO)
    assert masked.ids.tolist() == chat.encode(TWO) and masked.ids[0] == bos
    assert written(masked) == ["Hello.", "Fine,\n\n  thanks"]
    assert chat.end_ids == ()


def test_the_token_that_ends_an_answer() -> None:
    ends = {
        SMOLLM2: "<|im_end|>",
        QWEN3: "<|im_end|>",
        LLAMA31: "<|eot_id|>",
        MARKED: "<|eot_id|>",
        HARMONY: "<|return|>",
    }
    for source, end in ends.items():
        assert template(source).end_ids == (TOKENIZER.token_to_id(end),)


def test_words_keep_their_masks_with_other_tokenizers() -> None:
    """White space belongs to no token here; nothing may hang on it."""
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["?", "Hello", ".", "Hi", "user", "assistant"])}, "?")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    masked = ChatTemplate(SMOLLM2, {}, words).encode_with_mask(TWO[:2])
    assert words.decode(masked.ids[masked.mask].tolist(), skip_special_tokens=False) == "Hello . <|im_end|>"


PIECES = st.sampled_from([*"ab \n.é😀", "<|im_end|>", "<think>"])
ANSWERS = st.lists(PIECES, min_size=1, max_size=12).map("".join).filter(lambda a: not a.rstrip().endswith("<|im_end|>"))


@given(st.lists(ANSWERS, min_size=1, max_size=3), st.sampled_from([SMOLLM2, MARKED]))
def test_masks_hold_every_answer_and_nothing_else(answers: list[str], source: str) -> None:
    messages = conversation(["a\n"] * len(answers), answers, complete=True)
    end = "<|im_end|>" if source == SMOLLM2 else "<|eot_id|>"
    if source == SMOLLM2:  # its header ends in one line break, which makes one token with a line break behind it
        answers = [answer.removeprefix("\n") for answer in answers]
    assert written(template(source).encode_with_mask(messages)) == [answer + end for answer in answers]
