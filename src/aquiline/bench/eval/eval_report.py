"""An evaluation as eval.json and eval.md, and the cells of its tables. figures.py computes the figures.

eval.json, schema "aquiline.eval/1":

    schema, date, commit, versions, system
    model            as in benchmark results: target, draft, dtype, arithmetic, weight_bytes, ...
    data             dataset, num_questions, categories {name: questions}, sample_seed (null: the first ones),
                     chat_template, prompts_sha256 (of the token ids of all first turns)
    plan             lengths, temperatures, repeats, batch, seed, ignore_eos, settings {name: Drafting's fields}
    rows             one per temperature, length, question, turn, repeat and setting: these six; question_id,
                     category, num_prompt_tokens, num_tokens, finish_reason, repeated_share; prefill_ms (to the first
                     token, by the wall clock), decode_ms (from there on), total_ms (from arrival to end);
                     num_steps, num_draft_tokens, num_accepted_tokens, num_committed, tokens_cut, num_ge2,
                     accepted_at (steps whose draft at that place was accepted)
    tables           by_length, by_category, overall: per group and setting temperature, length, category (null: all),
                     setting, num_questions, num_texts, num_tokens, seconds_per_text, decode_tokens_per_s, tau,
                     target_calls_per_token, acceptance_rate, per_position, fraction_ge2, repeated_share, speedup and
                     speedup_with_prefill {value, low, high} (null: nothing was timed)
    best             per group of by_length, and overall if there are several: temperature, length, setting, speedup,
                     is_faster (the interval lies above 1)
    teacher_forced   per temperature: length, repeated_share, num_guesses, marginal, conditional, simulated_tau,
                     real_tau by place
    task_accuracy    GSM8K, per temperature and length: num_correct, num_questions, num_cut (answers cut by the length)
    unfit            turns that were not run: question_id, turn, length, temperature, reason
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from aquiline import __version__
from aquiline.bench.data.datasets import SOURCES
from aquiline.bench.eval.answers import TurnRun
from aquiline.bench.eval.figures import Evaluated, Figures, best, suspicion, times, verdict
from aquiline.bench.eval.guesses import TeacherForced
from aquiline.bench.results.result import ModelFacts, commit
from aquiline.bench.tables import NO_FIGURE, Table, cell
from aquiline.engine.llm import LLM
from aquiline.models.known_pairs import PAIRS, checkpoints
from aquiline.writing import write_whole

SCHEMA = "aquiline.eval/1"
LIBRARIES = ("numpy", "tokenizers", "jinja2")
STATED = (
    "temperature", "length", "category", "setting", "num_questions", "num_texts", "num_tokens", "seconds_per_text",
    "decode_tokens_per_s", "repeated_share", "tau", "target_calls_per_token", "acceptance_rate", "per_position",
    "fraction_ge2", "speedup", "speedup_with_prefill",
)  # fmt: skip
"""The figures of a setting in eval.json's tables."""
COUNTED = (
    "num_steps", "num_draft_tokens", "num_accepted_tokens", "num_committed", "tokens_cut", "num_ge2", "accepted_at",
)  # fmt: skip
SHOWN_PLACES = 5
SHOWN_MISSES = 10
"""How many places of a draft the tables show, and how many turns that did not fit the notes name; eval.json has all."""
READING = """\
- All settings wrote the same tokens, checked; times are paired. **speedup**: the baseline's decode time over the
  setting's; **with prefill**: prompt and output. In brackets the 95 % bootstrap interval over questions: too narrow
  for few questions, and it covers neither other machines nor the choice of the best of many settings.
- **tau**: tokens per target call and text, 1.00 without drafts; **accepted**: accepted drafts per drafted token;
  **by position**: share of steps that accept the draft at place 1, 2, ...
- **repeated**: share of 8-grams that stood earlier in the same text; loops flatter every drafter.
"""


@dataclass(frozen=True)
class EvalFacts:
    """The models, questions and system of an evaluation, in names that mean something on other machines: no paths."""

    model: ModelFacts
    dataset: str
    sample_seed: int | None
    has_template: bool
    system: dict[str, object]

    def __str__(self) -> str:
        s = self.system
        target, draft = self.model.target, self.model.draft
        names = f"{target} pair" if target in PAIRS and draft == target else f"{target} with {draft}"
        return (
            f"{names}, {s['cpu']}, {s['threads']} threads, {s['path']} "
            f"({s['isa']}), {s['dtype']} storage, {s['arithmetic']} arithmetic"
        )


def dataset_name(dataset: str | Path) -> str:
    """A data set's name in results: a known name, a hub address, a known pair's own questions, or a file's name without
    its folder."""
    for name, pair in PAIRS.items():
        if dataset == pair.questions:
            return f"{name} prompts"
    text = str(dataset)
    return text if text in SOURCES or text.startswith("hf://") else Path(text).name


def model_facts(llm: LLM, target: str | None, draft: str | None) -> ModelFacts:
    """The facts about a pair of models that results state."""
    name, draft_name = checkpoints(target, draft).names
    models = llm.models
    return ModelFacts(
        target=name, draft=draft_name, dtype=models.storage, arithmetic=models.arithmetic,
        random_weights=False, simulated_tau=None, weight_bytes=models.weight_bytes,
    )  # fmt: skip


def _row(found: Evaluated, run: TurnRun) -> dict[str, object]:
    text, question = run.text, found.questions[run.text.question]
    return {
        "temperature": text.temperature, "length": text.length, "question": text.question, "turn": text.turn,
        "repeat": run.repeat, "setting": run.setting, "question_id": question.id, "category": question.category,
        "num_prompt_tokens": len(text.prompt_ids), "num_tokens": len(text.token_ids),
        "finish_reason": text.finish_reason, "repeated_share": text.repeated_share,
        "prefill_ms": run.prefill_ms, "decode_ms": run.decode_ms, "total_ms": run.total_ms,
    } | {name: getattr(run.counters, name) for name in COUNTED}  # fmt: skip


def _figures(*groups: list[Figures]) -> list[dict[str, object]]:
    stated = [asdict(f) | f.counters.as_dict() for group in groups for f in group]
    return [{name: row[name] for name in STATED} for row in stated]


def _best(group: list[Figures]) -> dict[str, object]:
    winner = best(group)
    return {
        "temperature": group[0].temperature,
        "length": group[0].length,
        "setting": winner and winner.setting,
        "speedup": winner and asdict(winner)["speedup"],
        "is_faster": winner is not None and winner.is_faster,
    }


def cells(f: Figures) -> dict[str, str]:
    """The cells of one setting's line, by column."""
    counters = f.counters
    places = [f"{share:.2f}" for share in counters.per_position]
    more = " ..." if len(places) > SHOWN_PLACES else ""
    drafts = counters.num_draft_tokens > 0
    return {
        "setting": f.setting,
        "s/text": f"{f.seconds_per_text:.2f}",
        "tok/s": f"{f.decode_tokens_per_s:.0f}",
        "speedup [95 %]": times(f.speedup),
        "with prefill": times(f.speedup_with_prefill),
        "tau": f"{counters.tau:.2f}",
        "calls/token": f"{1 / counters.tau:.2f}" if counters.tau else NO_FIGURE,
        "accepted": f"{counters.acceptance_rate:.0%}" if drafts else NO_FIGURE,
        "by position": " ".join(places[:SHOWN_PLACES]) + more if drafts else NO_FIGURE,
        "repeated": f"{f.repeated_share:.0%}",
    }


def title(group: list[Figures]) -> str:
    """The title of a group's table."""
    f = group[0]
    temperature = "" if f.temperature is None else f", temperature {f.temperature:g}"
    length = "all lengths" if f.length is None else f"{f.length} new tokens"
    return f"{f.category + ', ' if f.category else ''}{length}{temperature}, {f.num_questions} questions"


@dataclass(frozen=True)
class EvalReport:
    """An evaluation with its figures, and what it ran on."""

    found: Evaluated
    facts: EvalFacts

    def document(self) -> dict[str, object]:
        """The JSON of an evaluation; the module's docstring is its schema."""
        found, facts = self.found, self.facts
        return {
            "schema": SCHEMA,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "versions": {"aquiline": __version__} | {name: version(name) for name in LIBRARIES},
            "system": facts.system,
            "model": asdict(facts.model),
            "data": {
                "dataset": facts.dataset,
                "num_questions": len(found.questions),
                "categories": Counter(question.category for question in found.questions),
                "sample_seed": facts.sample_seed,
                "chat_template": facts.has_template,
                "prompts_sha256": found.prompts_sha256,
            },
            "plan": found.plan.as_dict(),
            "rows": [_row(found, run) for run in found.runs],
            "tables": {
                "by_length": _figures(*found.by_length),
                "by_category": _figures(*found.by_category),
                "overall": _figures(found.overall),
            },
            "adaptive": found.choices.as_dict(),
            "best": [_best(group) for group in found.groups],
            "teacher_forced": [
                {name: getattr(t, name) for name in ("temperature", "length", "repeated_share")}
                | asdict(t.accuracy)
                | {"real_tau": found.real_tau(t)}
                for t in found.teacher_forced
            ],
            "task_accuracy": found.task_accuracy,
            "unfit": [{"question_id": found.questions[m.question].id} | m.as_dict() for m in found.unfit],
        }  # fmt: skip

    def teacher_table(self, taught: TeacherForced) -> Table:
        """The draft's accuracy along the target's own text, with a column for each place in the chain."""
        a = taught.accuracy
        rows: list[tuple[str, list[float | None], str]] = [
            ("accuracy", a.marginal, "{:.1%}"),
            ("accuracy after right guesses", a.conditional, "{:.1%}"),
            ("simulated tau of a chain this long", a.simulated_tau, "{:.3f}"),
            ("real tau of that chain", self.found.real_tau(taught), "{:.3f}"),
        ]
        title = (
            f"the draft along the target's own text, {taught.length} new tokens, temperature {taught.temperature:g}, "
            f"{taught.repeated_share:.0%} repeated"
        )
        columns = ["place in the chain", *(str(place + 1) for place in range(len(a.marginal)))]
        return Table(columns, [[name, *(cell(value, form) for value in values)] for name, values, form in rows], title)

    def notes(self) -> list[str]:
        """Lines beside the tables: best settings, a draft at chance, task accuracy, turns that did not fit."""
        found = self.found
        lines = [f"{title(group)}: {verdict(group)}" for group in found.groups]
        doubt = suspicion(found)
        lines += [f"warning: {doubt}"] if doubt else []
        lines += [
            "GSM8K accuracy, {length} new tokens, temperature {temperature:g}: {num_correct}/{num_questions} = "
            "{share:.1%} ({num_cut} answers were cut by the length)".format(
                **score, share=score["num_correct"] / score["num_questions"]
            )
            for score in found.task_accuracy
        ]
        if found.unfit:
            lines.append(f"{len(found.unfit)} conversations were cut short or left out, because they do not fit:")
            lines += [
                f"  question {found.questions[m.question].id!r}, turn {m.turn + 1}, {m.length} new tokens, temperature "
                f"{m.temperature:g}: {m.reason}"
                for m in found.unfit[:SHOWN_MISSES]
            ]
            more = len(found.unfit) - SHOWN_MISSES
            lines += [f"  and {more} more"] if more > 0 else []
        return lines

    def markdown(self) -> str:
        """The evaluation as a Markdown page."""
        found, facts = self.found, self.facts
        parts = [f"# {facts.dataset}: {len(found.questions)} questions\n", f"{facts}.\n", READING]
        for group in [*found.groups, *found.by_category]:
            table = Table.of_cells([cells(f) for f in group], title=title(group))
            parts += [table.markdown(), f"Here {verdict(group)}.\n"]
        parts += [self.teacher_table(taught).markdown() for taught in found.teacher_forced]
        lines = (f"- {line}" if line[0] != " " else f"  - {line.strip()}" for line in self.notes())
        return "\n".join([*parts, "### In short\n", *lines]) + "\n"

    def write(self, folder: Path) -> None:
        """Write eval.json and eval.md, each whole or not at all."""
        document = json.dumps(self.document(), indent=1)
        for name, text in (("eval.json", f"{document}\n"), ("eval.md", self.markdown())):
            write_whole(folder / name, text, "What was there before is whole")
