"""Chat prompts: token ids equal those of transformers, one BOS, the model's answers between the turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from aquiline.engine.bundled import BUNDLED_TARGET
from aquiline.errors import CheckpointError
from aquiline.text.chat import ChatPrompter

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


def save(directory: Path, tokenizer: Tokenizer, template: str = TEMPLATE, in_config: bool = False) -> Path:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS).save_pretrained(directory)
    if in_config:
        config = directory / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    else:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.parametrize("in_config", [False, True])
def test_ids_are_those_of_transformers_and_hold_one_bos(tokenizer: Tokenizer, tmp_path: Path, in_config: bool) -> None:
    prompter = ChatPrompter(save(tmp_path, tokenizer, in_config=in_config), tokenizer)
    assert prompter.has_template
    turns, answers = ["  Hé, who?\n", "And now?"], ["def f():\n    pass"]
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": turns[0]},
        {"role": "assistant", "content": answers[0]}, {"role": "user", "content": turns[1]},
    ]  # fmt: skip
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for until, last in ((2, 1), (4, 2)):
        ids = prompter.encode(turns[:last], answers[: last - 1], "Be brief.")
        expected = reference.apply_chat_template(messages[:until], add_generation_prompt=True, return_dict=False)
        assert ids == expected and ids.count(tokenizer.token_to_id(BOS)) == 1 == ids.index(ids[1])
    assert prompter.render(turns, answers).endswith("<user>And now?\n<assistant>")


def test_the_second_prompt_continues_the_first(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompter = ChatPrompter(save(tmp_path, tokenizer), tokenizer)
    first, second = prompter.render(["Hi"]), prompter.render(["Hi", "Bye"], ["Hello"])
    assert second == first + "Hello\n<user>Bye\n<assistant>"


def test_without_a_template_turns_are_plain_text(tokenizer: Tokenizer) -> None:
    prompter = ChatPrompter(BUNDLED_TARGET, tokenizer)
    assert not prompter.has_template
    assert prompter.encode(["def f(x):\n"]) == tokenizer.encode("def f(x):\n").ids
    assert prompter.render(["One", "Two"], ["1"], "Sys") == "Sys\n\nOne\n\n1\n\nTwo"
    assert prompter.encode(["One", "Two"], ["1"]).count(tokenizer.token_to_id(BOS)) == 1


def test_options_reach_the_template_and_need_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompter = ChatPrompter(save(tmp_path, tokenizer), tokenizer, {"hint": "<think>"})
    assert prompter.render(["Hi"]).endswith("<assistant><think>")
    with pytest.raises(ValueError, match=r"options=.*no chat template"):
        ChatPrompter(BUNDLED_TARGET, tokenizer, {"hint": "<think>"})


def test_what_the_template_refuses_is_one_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompter = ChatPrompter(save(tmp_path, tokenizer), tokenizer, {"refuse": True})
    assert prompter.encode(["Hi"])
    with pytest.raises(ValueError, match="refused messages of system, user: no system"):
        prompter.encode(["Hi"], system="Be brief.")
    broken = ChatPrompter(save(tmp_path / "broken", tokenizer, "{% if %}"), tokenizer)
    with pytest.raises(ValueError, match=r"the chat template of .*broken refused"):
        broken.encode(["Hi"])


def test_a_conversation_has_one_answer_fewer_than_turns(tokenizer: Tokenizer) -> None:
    prompter = ChatPrompter(BUNDLED_TARGET, tokenizer)
    for turns, answers in ((["a"], ["b"]), (["a", "b"], []), ([], [])):
        with pytest.raises(ValueError, match="one fewer"):
            prompter.encode(turns, answers)


def test_checkpoints_that_cannot_render_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        ChatPrompter(tmp_path, None)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(CheckpointError, match="needs a tokenizer that transformers can load"):
        ChatPrompter(tmp_path, tokenizer)
    (tmp_path / "tokenizer_config.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        ChatPrompter(tmp_path, tokenizer)


def test_special_tokens_in_a_template_are_single_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A template's markers are tokens of their own, and the post-processor adds nothing around them."""
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens(["<user>", "<assistant>"])
    own.post_processor = processors.TemplateProcessing(single=f"{BOS} $A {BOS}", special_tokens=[(BOS, 0)])
    prompter = ChatPrompter(save(tmp_path, own), own)
    ids = prompter.encode(["Hi"])
    assert ids[:2] == [0, own.token_to_id("<user>")] and ids[-1] == own.token_to_id("<assistant>") and 0 not in ids[1:]
