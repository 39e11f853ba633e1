"""The demos that there are: what a known pair is asked. Chat models answer questions; others continue held-out text."""

from __future__ import annotations

from pathlib import Path

from aquiline.bench.data.datasets import load_questions
from aquiline.bench.data.prompts import package_prompts, read_prompts
from aquiline.bench.suite.demo_run import NUM_OTHERS, Demo, DemoPrompt
from aquiline.models.known_pairs import PAIRS
from aquiline.text.chat_template import ChatTemplate, conversation


def demo_of(name: str, template: ChatTemplate) -> Demo:
    """The demo of a known pair, through its target's chat template. Of a chat model, prompts that the chain is chosen
    on are spread evenly over the pair's other questions."""
    pair = PAIRS[name]
    if not template.has_template:
        return Demo(name, [_continued(template, prompt.source, prompt.text) for prompt in read_prompts(pair.demo)])
    asked, others = _asked(template, pair.demo), _asked(template, pair.questions)
    return Demo(name, asked, others[:: len(others) // NUM_OTHERS][:NUM_OTHERS], template.end_ids)


def package_demo(name: str, package: str, template: ChatTemplate) -> Demo:
    """The demo of a pair that continues files of an installed package. Raises ValueError if it is not installed or too
    small."""
    assert template.tokenizer is not None, "known pairs have tokenizers"
    found = package_prompts(package, template.tokenizer)
    return Demo(name, [_continued(template, prompt.source, prompt.text) for prompt in found])


def _continued(template: ChatTemplate, source: str, text: str) -> DemoPrompt:
    return DemoPrompt(source, template.encode(conversation([text])))


def _asked(template: ChatTemplate, file: Path) -> list[DemoPrompt]:
    """The first turns of the questions in a file."""
    return [
        DemoPrompt(str(question.id), template.encode(conversation(question.turns[:1])), question.turns[0])
        for question in load_questions(file)
    ]
