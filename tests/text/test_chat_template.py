"""Chat prompts: text and token ids equal those of transformers, one BOS, and templates that cannot work are refused."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.text.families import HARMONY, LLAMA31, MARKED, QWEN3, QWEN25, SMOLLM2, SPECIAL, byte_tokenizer
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from aquiline.errors import CheckpointError
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.text.chat_template import ChatTemplate, conversation

BOS = "<|endoftext|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and refuse %}{{ raise_exception('no system') }}"
    "{% endif %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if hint %}{{ hint }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The bundled pair's: byte-level, puts id 0 before every text, has no template."""
    return Tokenizer.from_file(str(BUNDLED_TARGET / "tokenizer.json"))


def save(directory: Path, tokenizer: Tokenizer, template: Any = TEMPLATE, in_config: bool = False) -> Path:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS).save_pretrained(directory)
    if in_config:
        config = directory / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    else:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.parametrize("in_config", [False, True])
def test_ids_are_those_of_transformers_and_hold_one_bos(tokenizer: Tokenizer, tmp_path: Path, in_config: bool) -> None:
    template = ChatTemplate.load(save(tmp_path, tokenizer, in_config=in_config), tokenizer)
    assert template.has_template
    messages = conversation(["  Hé, who?\n", "And now?"], ["def f():\n    pass"], "Be brief.")
    reference = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    for until in (2, 4):
        ids = template.encode(messages[:until])
        expected = reference.apply_chat_template(messages[:until], add_generation_prompt=True, return_dict=False)
        assert ids == expected and ids.count(tokenizer.token_to_id(BOS)) == 1 == ids.index(ids[1])
    assert template.render(messages).endswith("<user>And now?\n<assistant>")
    assert template.render(messages, add_generation_prompt=False).endswith("<user>And now?\n")


@pytest.mark.parametrize("source", [SMOLLM2, QWEN25, QWEN3, LLAMA31, MARKED, HARMONY])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False, "date_string": "1 May 2026"}], ids=["", "options"])
def test_texts_of_every_family_are_those_of_transformers(source: str, options: dict[str, object]) -> None:
    ours = byte_tokenizer()
    template = ChatTemplate(source, SPECIAL, ours, options)
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours, **SPECIAL)
    messages = conversation(["Hi <b>\n", "X"], ["<think>\nwhy\n</think>\n\nSo."], "  Be brief.")
    for until in range(1, len(messages) + 1):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                messages[:until], chat_template=source, add_generation_prompt=prompt, tokenize=False, **options
            )
            assert template.render(messages[:until], prompt) == expected


def test_the_functions_and_tags_templates_rely_on() -> None:
    source = """\
    {%- for n in [1, 2, 3, 4] %}
        {%- if n == 2 %}{% continue %}{% endif %}
        {%- if n == 4 %}{% break %}{% endif %}
        {{- n }}
    {%- endfor %}
    {% if true %}
    kept
    {% endif %}
{{ {'a': '<é>', 'b': none} | tojson }}
{{ [1] | tojson(indent=1) }}
{{ strftime_now('%Y') }} {{ tools is none }} {{ documents is none }} {{ messages[0].extra is defined }}"""
    text = ChatTemplate(source, {}, None).render([{"role": "user", "content": "Hi", "extra": None}])
    assert text == f'13    kept\n{{"a": "<é>", "b": null}}\n[\n 1\n]\n{datetime.now().year} True True False'


def test_what_a_generation_block_sets_stays_inside_as_in_transformers() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **SPECIAL)
    expected = theirs.apply_chat_template(conversation(["Hi"]), chat_template=source, tokenize=False)
    assert ChatTemplate(source, {}, None).render(conversation(["Hi"])) == expected == "21"


@pytest.mark.parametrize(
    "attack",
    ["''.__class__.__mro__", "messages.append(1)", "messages[0].update(role='x')", "cycler.__init__.__globals__"],
)
def test_a_template_is_caged(attack: str) -> None:
    template = ChatTemplate("{{ " + attack + " }}", {}, None, name="a cage")
    with pytest.raises(ValueError, match=r"a cage refused messages of user: .*unsafe"):
        template.render([{"role": "user", "content": "Hi"}])


def test_the_second_prompt_continues_the_first(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = ChatTemplate.load(save(tmp_path, tokenizer), tokenizer)
    first = template.render(conversation(["Hi"]))
    assert template.render(conversation(["Hi", "Bye"], ["Hello"])) == first + "Hello\n<user>Bye\n<assistant>"


def test_without_a_template_messages_are_plain_text(tokenizer: Tokenizer) -> None:
    template = ChatTemplate.load(BUNDLED_TARGET, tokenizer)
    assert not template.has_template
    assert template.encode(conversation(["def f(x):\n"])) == tokenizer.encode("def f(x):\n").ids
    messages = conversation(["One", "Two"], ["1"], "Sys")
    assert template.render(messages) == "Sys\n\nOne\n\n1\n\nTwo"
    assert template.encode(messages).count(tokenizer.token_to_id(BOS)) == 1


def test_options_reach_the_template_and_need_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = ChatTemplate.load(save(tmp_path, tokenizer), tokenizer).with_options({"hint": "<think>"})
    assert template.render(conversation(["Hi"])).endswith("<assistant><think>")
    with pytest.raises(ValueError, match="does not exist, so it cannot be given hint; drop them"):
        ChatTemplate.load(BUNDLED_TARGET, tokenizer).with_options({"hint": "<think>"})


def test_what_the_template_refuses_is_one_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = ChatTemplate.load(save(tmp_path, tokenizer), tokenizer).with_options({"refuse": True})
    assert template.encode(conversation(["Hi"]))
    with pytest.raises(ValueError, match="refused messages of system, user: no system"):
        template.encode(conversation(["Hi"], system="Be brief."))


def test_a_conversation_has_one_answer_fewer_than_turns() -> None:
    for turns, answers in ((["a"], ["b"]), (["a", "b"], []), ([], [])):
        with pytest.raises(ValueError, match="answers: "):
            conversation(turns, answers)
    assert [m["content"] for m in conversation(["a"], ["b"], "s", complete=True)] == ["s", "a", "b"]
    with pytest.raises(ValueError, match="answers: 0 given; 1 turns take 1"):
        conversation(["a"], complete=True)


def test_checkpoints_that_cannot_render_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"

    def refused(text: str) -> str:
        config.write_text(text)
        with pytest.raises(CheckpointError) as error:
            ChatTemplate.load(tmp_path, tokenizer)
        return str(error.value)

    assert "is not Jinja" in refused(json.dumps({"chat_template": "{% if %}"}))
    assert "not valid JSON" in refused("{broken")
    assert "must be a text" in refused('{"chat_template": 5}')
    assert "name and template" in refused('{"chat_template": ["{{ bos_token }}"]}')
    assert "tool_use, none named default" in refused('{"chat_template": [{"name": "tool_use", "template": "x"}]}')
    config.unlink()
    (tmp_path / "chat_template.jinja").write_text("hello")
    template = ChatTemplate.load(tmp_path, None)
    assert template.render(conversation(["Hi"])) == "hello"
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        template.encode(conversation(["Hi"]))


def test_the_template_named_default_and_the_file_before_the_field(tokenizer: Tokenizer, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes {{ bos_token }}"}]
    save(tmp_path, tokenizer, named, in_config=True)
    assert ChatTemplate.load(tmp_path, tokenizer).render(conversation(["Hi"])) == f"yes {BOS}"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path, tokenizer).render(conversation(["Hi"])) == "file"


def test_special_tokens_may_be_objects_and_stand_in_the_map(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<old>", "eos_token": {"content": "</s>"}}')
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({
            "bos_token": {"content": "<s>", "special": True}, "pad_token": None, "add_bos_token": True,
            "extra_special_tokens": {"mark": "<m>"}, "chat_template": "{{ bos_token }}{{ eos_token }}{{ mark }}",
        })
    )  # fmt: skip
    assert ChatTemplate.load(tmp_path, None).render([]) == "<s></s><m>"


def test_special_tokens_in_a_template_are_single_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A template's markers are tokens of their own, and the post-processor adds nothing around them."""
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens(["<user>", "<assistant>"])
    own.post_processor = processors.TemplateProcessing(single=f"{BOS} $A {BOS}", special_tokens=[(BOS, 0)])
    ids = ChatTemplate.load(save(tmp_path, own), own).encode(conversation(["Hi"]))
    assert ids[:2] == [0, own.token_to_id("<user>")] and ids[-1] == own.token_to_id("<assistant>") and 0 not in ids[1:]
