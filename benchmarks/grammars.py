"""Structured output: what a step with grammars costs, and how fast JSON of 20 schemas comes.

Part 1: 1, 8 and 32 sequences that decode plainly: free, with and without repeated steps, and constrained; of the
constrained ones the time of masks apart. Part 2: a workload of 20 schemas, plain and with each way to draft, with and
without forced text, beside the same prompts without a schema, and beside llama.cpp (`pip install xllamacpp`) on the
same file, whose requests carry the schema as its --json-schema does. Part 3 (--answers N): N answers at temperature 1;
every one must follow its schema, or be cut by max_tokens within it. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jsonschema

from aquiline.bench.results.intervals import estimate, paired, rotated
from aquiline.config import EngineConfig, SamplingParams, Structured
from aquiline.engine import pipeline, sequence
from aquiline.engine.constraint import MAX_FORCED
from aquiline.engine.encode import encode_chats, ending_with
from aquiline.engine.llm import LLM, Output
from aquiline.ops.threads import usable_cores
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft
from aquiline.spec.lookup import Lookup

STRING, NUMBER, WHOLE, TRUTH = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))


def record(**properties: Any) -> dict[str, Any]:
    """An object that needs all of its properties."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def several(items: dict[str, Any], most: int = 4) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


SCHEMAS: dict[str, dict[str, Any]] = {
    "a person": record(first_name=STRING, last_name=STRING, age=WHOLE, email=STRING),
    "a postal address": record(street=STRING, house_number=WHOLE, city=STRING, postal_code=STRING, country=STRING),
    "a book": record(title=STRING, author=STRING, year=WHOLE, genres=several(STRING), isbn=STRING),
    "a recipe": record(name=STRING, servings=WHOLE, ingredients=several(record(item=STRING, amount=STRING))),
    "a weather report": record(city=STRING, temperature_celsius=NUMBER, humidity_percent=WHOLE, is_raining=TRUTH),
    "a flight": record(flight_number=STRING, origin=STRING, destination=STRING, departure_time=STRING, seats=WHOLE),
    "a film": record(title=STRING, director=STRING, release_year=WHOLE, rating=NUMBER, cast=several(STRING)),
    "an order": record(
        order_id=WHOLE, customer=STRING, items=several(record(product=STRING, quantity=WHOLE)), paid=TRUTH
    ),
    "an event": record(title=STRING, location=STRING, start_date=STRING, end_date=STRING, attendees=several(STRING)),
    "a city": record(
        name=STRING, country=STRING, population=WHOLE, coordinates=record(latitude=NUMBER, longitude=NUMBER)
    ),
    "a product": record(product_name=STRING, price=NUMBER, currency={"enum": ["USD", "EUR", "GBP"]}, in_stock=TRUTH),
    "a review": record(reviewer=STRING, stars={"enum": [1, 2, 3, 4, 5]}, summary=STRING, would_recommend=TRUTH),
    "a job": record(job_title=STRING, company=STRING, salary=WHOLE, remote=TRUTH, required_skills=several(STRING)),
    "a song": record(song_title=STRING, artist=STRING, album=STRING, duration_seconds=WHOLE),
    "a country": record(country_name=STRING, capital=STRING, languages=several(STRING), area_km2=NUMBER),
    "a football match": record(home_team=STRING, away_team=STRING, home_goals=WHOLE, away_goals=WHOLE, stadium=STRING),
    "an animal": record(
        species=STRING, habitat=STRING, diet={"enum": ["herbivore", "carnivore", "omnivore"]}, legs=WHOLE
    ),
    "a bug report": record(
        summary=STRING, severity={"enum": ["low", "medium", "high"]}, steps_to_reproduce=several(STRING)
    ),
    "a lesson": record(
        subject=STRING, teacher=STRING, room_number=WHOLE, students=several(record(name=STRING, grade=STRING))
    ),
    "a planet": record(planet_name=STRING, diameter_km=WHOLE, number_of_moons=WHOLE, has_rings=TRUTH),
}
FORCED_ALONE = Lookup(min_match=32)
"""A lookup that copies nothing, so that forced text is all that it drafts."""


@contextmanager
def timed_masks() -> Iterator[list[float]]:
    """The seconds of each call that cuts trees and makes masks."""
    spent: list[float] = []

    def constrain(*given: Any) -> Any:
        began = time.perf_counter()
        found = inner(*given)
        spent.append(time.perf_counter() - began)
        return found

    inner = pipeline.constrain
    with mock.patch.object(pipeline, "constrain", constrain):
        yield spent


def asked(
    llm: LLM, temperature: float, max_tokens: int, is_constrained: bool, count: int = 20
) -> tuple[list[Any], list[Any]]:
    """Prompts of a chat and their sampling."""
    template, names = llm.template(), [*SCHEMAS]
    wanted = [names[number % len(names)] for number in range(count)]
    chats = [[{"role": "user", "content": f"Describe {name} as JSON."}] for name in wanted]
    params = [
        SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed,
            structured=Structured(json=SCHEMAS[name]) if is_constrained else None,
        )
        for seed, name in enumerate(wanted)
    ]  # fmt: skip
    return encode_chats(template, chats), [ending_with(template, own) for own in params]


def step_costs(llm: LLM, num: int, repeats: int) -> dict[str, float]:
    """Microseconds of a step of `num` sequences that decode plainly, and of their masks."""
    found: dict[str, float] = {}
    for name, is_constrained, steps in (("free, repeated", False, 8), ("free", False, 1), ("constrained", True, 1)):
        config = EngineConfig(max_batch=num, max_context=512, num_continuous_decode_steps=steps)
        with LLM.from_models(llm.models, config, NoDraft()) as own, timed_masks() as spent:
            prompts, params = asked(own, 1.0, 48, is_constrained, num)
            own.run(prompts, params)
            best = float("inf")
            for _ in range(repeats):
                spent.clear()
                summary = own.run(prompts, params).summary
                best = min(best, summary.decode_ms / summary.num_decode_steps)
            found[name] = best * 1e3
            if is_constrained:
                found["masks"] = sum(spent) / len(spent) * 1e6
    return found


WAYS: dict[str, tuple[bool, Drafting, int]] = {
    "free": (False, NoDraft(), 0), "free, adaptive": (False, Adaptive(), 0), "plain": (True, NoDraft(), 0),
    "forced text": (True, FORCED_ALONE, MAX_FORCED), "chain": (True, Chain(3), 0),
    "chain and forced text": (True, Chain(3), MAX_FORCED), "dynamic and forced text": (True, Dynamic(), MAX_FORCED),
    "adaptive": (True, Adaptive(), 0), "adaptive and forced text": (True, Adaptive(), MAX_FORCED),
}  # fmt: skip
"""Whether there is a grammar, how to draft, and how many forced tokens a step may draft."""


LLAMA = {"llama.cpp, free": False, "llama.cpp --json-schema": True}
"""The rows of llama.cpp, and whether there is a grammar."""


def llama_turn(file: str, threads: int) -> Callable[[list[int], SamplingParams], dict[str, float]]:
    """llama.cpp's server in this process; what it returns continues a prompt, one at a time."""
    llama = importlib.import_module("xllamacpp")
    given = llama.CommonParams()
    given.model.path, given.n_ctx, given.n_parallel, given.verbosity = file, 512, 1, 1
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = threads
    server = llama.Server(given)

    def turn(prompt: list[int], params: SamplingParams) -> dict[str, float]:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": params.max_tokens, "cache_prompt": False,
                                "samplers": ["top_k"], "top_k": 1, "temperature": 0.0}  # fmt: skip
        if params.structured is not None:
            body["json_schema"] = json.loads(str(params.structured.json))
        answer = server.handle_completions(body)
        assert answer["usage"]["prompt_tokens"] == len(prompt), answer
        (choice,), timings = answer["choices"], answer["timings"]  # of the tokens after the first
        if choice["finish_reason"] == "stop" and params.structured is not None:
            jsonschema.Draft202012Validator(body["json_schema"]).validate(json.loads(choice["text"]))
        return {"tokens": timings["predicted_n"] - 1, "ms": timings["predicted_ms"]}

    return turn


def our_turn(llm: LLM, name: str, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[Any, list[Output]]:
    """What one of WAYS makes of some prompts."""
    with mock.patch.object(sequence, "MAX_FORCED", WAYS[name][2]):
        result = llm.run(prompts, params, drafting=WAYS[name][1])
    counters, outputs = result.summary.counters, result.outputs
    return {
        "tokens": counters.num_committed, "ms": result.summary.decode_ms, "steps": counters.num_steps,
        "by the host": sum(output.sources.count("lookup") for output in outputs),
    }, outputs  # fmt: skip


def workload(llm: LLM, max_batch: int, ways: list[str], schemas: range) -> dict[str, list[dict[str, float]]]:
    """What each way decoded in each turn: tokens, milliseconds, steps, and the tokens that the host drafted: forced
    text and copies. The ways take turns with every `max_batch` prompts, so that a machine whose speed changes treats
    them alike."""
    done: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    config = EngineConfig(max_batch=max_batch, max_context=512)
    llama = llama_turn(str(llm.models.checkpoint), usable_cores()) if LLAMA.keys() & done else None
    with LLM.from_models(llm.models, config, Adaptive()) as own:
        batches = {is_constrained: asked(own, 0.0, 160, is_constrained) for is_constrained in (False, True)}
        for turn, first in enumerate(range(schemas.start - max_batch, schemas.stop, max_batch)):  # the first warms up
            texts = set()
            place = max(schemas.start, first)
            for name in rotated(ways, turn):
                is_constrained = LLAMA[name] if name in LLAMA else WAYS[name][0]
                prompts, params = (
                    each[place : min(place + max_batch, schemas.stop)] for each in batches[is_constrained]
                )
                if name in LLAMA:
                    assert llama is not None and max_batch == 1, "llama.cpp runs one at a time here"
                    row = llama(prompts[0], params[0])
                else:
                    row, outputs = our_turn(own, name, prompts, params)
                    if is_constrained:
                        texts.add(tuple(output.text for output in outputs))
                if first >= schemas.start:
                    done[name].append(row)
            assert len(texts) < 2, "drafts changed a text"
    return done


def summed(turns: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Of each way tokens a second, tau and the host's share over all turns, and the median of the turns' speeds beside
    those of the first way."""
    told: dict[str, dict[str, Any]] = {}
    speeds = {name: [row["tokens"] / row["ms"] * 1e3 for row in rows] for name, rows in turns.items()}
    base = next(iter(speeds.values()))
    for name, rows in turns.items():
        total = {key: sum(row[key] for row in rows) for key in rows[0]}
        told[name] = {"tok/s": total["tokens"] / total["ms"] * 1e3, "tokens": total["tokens"]}
        told[name] |= {"median": estimate(speeds[name]).whole(), "beside": paired(speeds[name], base).times()}
        if "steps" in total:
            told[name] |= {
                "tau": total["tokens"] / total["steps"],
                "by the host": total["by the host"] / total["tokens"],
            }
    return told


def answers(llm: LLM, count: int, max_tokens: int) -> dict[str, int]:
    """How many answers at temperature 1 follow their schemas, and how many were cut by max_tokens."""
    prompts, params = asked(llm, 1.0, max_tokens, True, count)
    outputs = llm.run(prompts, params).outputs
    ended = [(o, p) for o, p in zip(outputs, params, strict=True) if o.finish_reason == "stop"]
    for output, own in ended:
        jsonschema.Draft202012Validator(json.loads(own.structured.json)).validate(json.loads(output.text))
    cut = [output for output in outputs if output.finish_reason == "length"]
    assert len(ended) + len(cut) == count, {output.finish_reason for output in outputs}
    for output, own in zip(outputs, params, strict=True):
        if output.finish_reason == "length":
            grammars, ends = llm.models.grammars, llm.models.end_ids(own)
            constraint = grammars.constraint(grammars.compile(own.structured, ends), ends)
            constraint.accept(output.token_ids)
            assert constraint.failure is None, output.text
    return {"valid": len(ended), "cut, and valid so far": len(cut)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--steps", type=int, nargs="*", default=[1, 8, 32], help="Sequences of part 1.")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8], help="Requests at once of part 2.")
    parser.add_argument("--ways", nargs="*", default=[*WAYS], help=f"Rows of part 2; also {', '.join(LLAMA)}.")
    parser.add_argument("--schemas", type=int, nargs=2, default=[0, len(SCHEMAS)], help="First and end of part 2.")
    parser.add_argument("--answers", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=400)
    given = parser.parse_args()
    llm = LLM(given.target, given.target, engine=EngineConfig(max_batch=16, max_context=1024))
    told: dict[str, Any] = {"system": llm.models.system()}
    for num in given.steps:
        told[f"step of {num}"] = step_costs(llm, num, given.repeats)
        print(f"{num} sequences, us a step:", {name: round(us) for name, us in told[f"step of {num}"].items()})
    for num in given.batch:
        told[f"workload, {num} at once"] = turns = workload(llm, num, given.ways, range(*given.schemas))
        for name, row in summed(turns).items():
            shown = {key: value if isinstance(value, str) else round(value, 2) for key, value in row.items()}
            print(f"{num} at once, {name:26s}", shown)
    if given.answers:
        told["answers"] = answers(llm, given.answers, given.max_tokens)
        print(told["answers"])
    print(json.dumps(told))


if __name__ == "__main__":
    main()
