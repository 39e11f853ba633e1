"""What copying drafts give where a text repeats its context, and what they cost where it does not.

Prompts are made here, before anything is measured: files of the standard library to be written again with a line more
("edit"), JSON to be written with another indentation ("json"), documents to be quoted ("quote"), and tasks with nothing
to copy ("prose"). SmolLM2 gets each as the second of a conversation whose first was answered rightly, since so small a
model does not do as it is told otherwise; the bundled pair, which only continues source, gets the file twice and the
beginning of a third time under a heading that says so, and for prose the file alone, at temperature 0.8. The copied
share of an output is the share of its tokens that lie in a run of eight tokens that stands in the prompt as well.

Every setting writes every prompt in every round, in an order that rotates; ratios are paired. Peers, with --peer, take
part in the same rounds, each against our plain decoding; their copied shares tell whether their texts repeat as much as
ours, since other arithmetic and other noise write other texts.

    python benchmarks/copying.py --target smollm2 --peer llamacpp:packed:ngram-simple openvino:lookup

Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics

from turns import DOCUMENTS, chat

from aquiline.bench.data.prompts import text_prompts
from aquiline.bench.peers.names import parse_peer
from aquiline.bench.peers.peer import Peer, PeerSetup
from aquiline.bench.results.intervals import decode_tokens_per_s, paired, rotated, spans_of
from aquiline.bench.results.result import commit
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.models.known_pairs import BUNDLED_TARGET, checkpoints, draft_of
from aquiline.models.load import resolve
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Drafting, NoDraft
from aquiline.spec.lookup import Lookup

SETTINGS: dict[str, Drafting] = {"plain": NoDraft(), "lookup": Lookup(), "adaptive": Adaptive()}
MAX_CONTEXT = 2048
RUN = 8
"""Tokens of a run that counts as copied."""
TASKS = ("edit", "json", "quote", "prose")
SOURCE_TOKENS = 256
"""Tokens of the text that a task is about."""
QUESTIONS = (
    "Write a short story about a lighthouse keeper.", "Explain how bread is made.", "Why do leaves change colour?",
    "Give advice to somebody who moves to another city.", "Describe the taste of an orange to a robot.",
    "What did people eat in ancient Rome?",
)  # fmt: skip


def sources(llm: LLM, task: str, count: int) -> list[str]:
    """The texts that tasks are about."""
    tokenizer = llm.models.tokenizer
    assert tokenizer is not None
    if task == "json":
        rows = [{"id": 17 * i + j, "name": f"item {j}", "size": [i, j, i + j], "ok": j % 2 == 0}
                for i in range(1, count + 1) for j in range(8)]  # fmt: skip
        return [json.dumps(rows[8 * i : 8 * i + 8]) for i in range(count)]
    windows = text_prompts(SOURCE_TOKENS, count, tokenizer, DOCUMENTS / "ARCHITECTURE.md" if task == "quote" else None)
    return [tokenizer.decode(window.token_ids).partition("\n")[2] for window in windows]


def asked(task: str, text: str) -> tuple[str, str]:
    """What is asked of a text, and the right answer."""
    if task == "json":
        return f"{text}\nWrite the same JSON with an indentation of two spaces.", json.dumps(json.loads(text), indent=2)
    if task == "quote":
        return f"{text}\n\nQuote this text word for word.", text
    code = f"```python\n{text}\n```"
    return f"{code}\nWrite this code again under a first line that says # edited", code.replace("\n", "\n# edited\n", 1)


def chats(task: str, texts: list[str], number: int) -> str:
    """A task for SmolLM2: the second of a conversation, behind one like it that was answered rightly."""
    if task == "prose":
        return chat(QUESTIONS[number % len(QUESTIONS)])
    (first, answer), (second, _) = asked(task, texts[number - 1]), asked(task, texts[number])
    return chat(f"{first}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>user\n{second}")


def continued(task: str, texts: list[str], number: int) -> str:
    """A task for the bundled pair: a text that was written again once is begun a third time."""
    text = texts[number]
    if task == "prose":
        return text
    again = "\n\n# The same text as above, written once more:\n\n"
    return f"{text}{again}{text}{again}{text.lstrip()[:40]}"


def copied_share(prompt: list[int], output: list[int]) -> float:
    """Share of the output's tokens that lie in runs that stand in the prompt."""
    runs = {tuple(prompt[i : i + RUN]) for i in range(len(prompt) - RUN + 1)}
    copied = [False] * len(output)
    for i in range(len(output) - RUN + 1):
        if tuple(output[i : i + RUN]) in runs:
            copied[i : i + RUN] = [True] * RUN
    return sum(copied) / len(output)


def place_of(target: str | None, draft: str | None, threads: int) -> PeerSetup:
    """What peers run on: the same checkpoints as ours."""
    named = checkpoints(target, draft)
    drafts = None if named.draft is None else resolve(draft_of(named.draft))
    return PeerSetup(resolve(named.target), drafts, threads, MAX_CONTEXT)


def shown(name: str, values: list[float], plain: list[float], shares: dict[str, list[float]]) -> str:
    """A setting's part of a line."""
    copied = f", copied {statistics.median(shares[name]):.0%}" if name in shares and name != "plain" else ""
    return f"{name} {statistics.median(values):.0f} tok/s, {paired(values, plain).times()}{copied}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled", help="bundled, smollm2, or another SmolLM2-135M-Instruct")
    parser.add_argument("--draft", help="its draft, where --target is no name")
    parser.add_argument("--peer", nargs="*", default=[], help="as `aquiline compare` names them")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--count", type=int, default=4, help="prompts of each task")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=160)
    args = parser.parse_args()
    config = EngineConfig(max_batch=1, max_context=MAX_CONTEXT, prefix_cache=False)
    llm = LLM(args.target, args.draft, drafting=Adaptive(), engine=config)
    place = place_of(args.target, args.draft, int(str(llm.models.system()["threads"])))
    peers: dict[str, Peer] = {name: parse_peer(name).open(place) for name in args.peer}
    table = []
    for task in args.tasks:
        rates: dict[str, list[float]] = {name: [] for name in (*SETTINGS, *peers)}
        temperature = 0.8 if task == "prose" else 0.0
        shares: dict[str, list[float]] = {name: [] for name in ("plain", *peers)}
        write = continued if place.target == BUNDLED_TARGET else chats
        texts = sources(llm, task, args.count)
        prompts = [llm.encode(write(task, texts, i)) for i in range(args.count)]
        for round_ in range(args.rounds + 1):
            for number, prompt in enumerate(prompts):
                expected: list[int] | None = None
                for name in rotated(list(rates), round_ + number):
                    sampling = SamplingParams(
                        max_tokens=args.new_tokens, temperature=temperature, seed=number, ignore_eos=True
                    )
                    if name in peers:
                        found = peers[name].generate([prompt], args.new_tokens, temperature)
                        rate, token_ids = decode_tokens_per_s(found), found[0].token_ids
                    else:
                        outputs = llm.run([prompt], sampling, drafting=SETTINGS[name]).outputs
                        rate, token_ids = decode_tokens_per_s(spans_of(outputs)), outputs[0].token_ids
                        expected = expected or token_ids
                        assert token_ids == expected, f"{name} changed the text"
                    if round_:
                        rates[name].append(rate)
                    elif name in shares:
                        shares[name].append(copied_share(prompt, token_ids))
        row = {"task": task, "copied": statistics.median(shares["plain"]), "least_copied": min(shares["plain"])}
        for name, values in rates.items():
            over = paired(values, rates["plain"])
            row[name] = {"tokens_per_s": statistics.median(values), "over_plain": [over.value, over.low, over.high]}
            if name in peers:
                row[name]["copied"] = statistics.median(shares[name])
        table.append(row)
        print(
            f"{task}: copied {row['copied']:.0%} (least {row['least_copied']:.0%}); "
            + "; ".join(shown(name, values, rates["plain"], shares) for name, values in rates.items()),
            flush=True,
        )
    print(json.dumps({"benchmark": "copying", "table": table, "system": llm.models.system(), "commit": commit()}))


if __name__ == "__main__":
    main()
