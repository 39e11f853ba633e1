"""`generate --chat` and `chat` with a target that answers in the Harmony format: what is printed, and what is apart."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.conftest import needs_native
from tests.harmony import ANSWER, harmony_tokenizer
from typer.testing import CliRunner, Result

from aquiline.cli.main import app
from aquiline.cli.show import conversation
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.chat_session import AttributedText, ChatSession
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import Chain

pytestmark = needs_native
TOKENIZER = harmony_tokenizer()
SAMPLING = SamplingParams(max_tokens=64, presence_penalty=2, seed=1)


@pytest.fixture(scope="module")
def llm(harmony_pair: Path) -> Iterator[LLM]:
    engine = EngineConfig(max_batch=1, max_context=1024, calibration=False)
    with LLM(harmony_pair / "target", harmony_pair / "draft", drafting=Chain(3), engine=engine) as llm:
        yield llm


def session(llm: LLM, sampling: SamplingParams = SAMPLING) -> ChatSession:
    return ChatSession(llm, llm.template(), sampling)


def generate(pair: Path, *args: object, max_tokens: int = 64) -> Result:
    options = (
        "--target",
        pair / "target",
        "--chat",
        "--presence-penalty",
        2,
        "--max-tokens",
        max_tokens,
        *args,
    )
    return CliRunner().invoke(app, ["generate", *map(str, options)])


def test_generate_prints_the_final_channel(harmony_pair: Path) -> None:
    for more in ((), ("--draft", harmony_pair / "draft", "--drafter", "chain"), ("--drafter", "lookup")):
        done = generate(harmony_pair, "--prompt", "Hi", *more)
        assert done.exit_code == 0 and done.stdout == "Yesé\n", done.stderr
        assert "not understood" not in done.stderr
    (output,) = json.loads(generate(harmony_pair, "--prompt", "Hi", "--json").stdout)["outputs"]
    assert (output["text"], output["reasoning"], output["finish_reason"]) == ("Yesé", "Hm🦅", "stop")
    assert output["token_ids"] == TOKENIZER.encode(ANSWER, add_special_tokens=False).ids
    cut = generate(harmony_pair, "--prompt", "Hi", "--stop", "é")
    assert cut.stdout == "Yes\n"


def test_generate_says_once_what_it_cannot_read(harmony_pair: Path) -> None:
    done = generate(harmony_pair, "--prompt", "Hi", max_tokens=2)
    assert done.stdout == "analysis\n"
    assert done.stderr.count("part of the answer was not understood and is shown as text: a header has no message") == 1


def test_a_file_of_prompts_has_reasoning_apart(harmony_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Hi", "max_tokens": 2}\n{"prompt": 5}\n')
    done = generate(harmony_pair, "--prompts-file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl")
    first, second, third = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (first["text"], first["reasoning"]) == ("Yesé", "Hm🦅") and "error" in third
    assert (second["text"], second["reasoning"]) == ("analysis", "")
    assert done.stderr.count("line 2: a header has no message") == 1 == done.stderr.count("not understood")


def test_a_session_keeps_reasoning_out_of_the_answer(llm: LLM) -> None:
    chat, pieces = session(llm), list[AttributedText]()
    answer = chat.ask("Hi", pieces.append)
    assert (answer.text, answer.reasoning, answer.problem) == ("Yesé", "Hm🦅", None)
    assert "".join(piece.text for piece in pieces if piece.channel == "reasoning") == "Hm🦅"
    assert "".join(piece.text for piece in pieces if piece.channel == "content") == "Yesé"
    assert chat.messages[-1] == {"role": "assistant", "content": "Yesé", "thinking": "Hm🦅"}
    again = chat.ask("More")
    asked = TOKENIZER.decode(again.output.prompt_ids, skip_special_tokens=False)
    assert asked.endswith(
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yesé<|end|>"
        "<|start|>user<|message|>More<|end|><|start|>assistant"
    ), "the template drops the reasoning of earlier turns"
    assert again.text == "Yesé"


def test_a_conversation_in_a_pipe(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    conversation.converse(session(llm), True, as_json=False)
    assert capsys.readouterr().out == "Yesé\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    conversation.converse(session(llm), True, as_json=True)
    row = json.loads(capsys.readouterr().out)
    assert (row["text"], row["reasoning"]) == ("Yesé", "Hm🦅")


def test_reasoning_is_dimmed_in_a_terminal(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False)
    chat = session(llm)
    conversation._show(chat, "Hi", console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    before, _, after = shown.partition("\n\n")
    assert "\x1b[2mHm\x1b[0m" in before and "🦅" in before and "Yes" in after and "\x1b[2mYes" not in after
    conversation._show(session(llm, SamplingParams(max_tokens=1, seed=1)), "Hi", console)
    assert capsys.readouterr().err.count("a header has no message") == 1
