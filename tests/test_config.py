"""Settings refuse what cannot work, naming field, value and fix, before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from aquiline.config import MAX_DEPTH, EngineConfig, Environment, SamplingParams
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static
from aquiline.spec.lookup import Lookup
from aquiline.spec.registry import drafting_named

PAGE = Path(__file__).resolve().parents[1] / "docs" / "drafting.md"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1e-40}, "temperature=1e-40"),  # logits over it are infinite: the first token would always win
        ({"temperature": 1e39}, "temperature=1e+39"),  # infinite in float32
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2**31}, f"top_k={2**31}"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty=1e-40"),
        ({"presence_penalty": float("inf")}, "presence_penalty=inf"),
        ({"frequency_penalty": 1e39}, "frequency_penalty=1e+39"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias={-1: 0.0}"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias={3: nan}"),
        ({"logit_bias": {3: 1e300}}, "logit_bias={3: 1e+300}"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias={3: inf}"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, f"seed={2**64}"),
        ({"stop": "text"}, "stop='text'"),
        ({"stop_token_ids": 5}, "stop_token_ids=5"),
        ({"stop": ("a", "")}, "stop=('a', '')"),
        ({"stop": ["\ud800"]}, r"stop=('\ud800',)"),
        ({"stop": [5]}, "stop=(5,)"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids=('a',)"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids=(1.5,)"),
        ({"stop_token_ids": [True]}, "stop_token_ids=(True,)"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=(-1,)"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"max_tokens": None}, "max_tokens=None"),
        ({"max_tokens": 5.0}, "max_tokens=5.0"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"temperature": True}, "temperature=True"),
        ({"ignore_eos": "no"}, "ignore_eos='no'"),
        ({"ignore_eos": 0}, "ignore_eos=0"),
        ({"seed": True}, "seed=True"),
        ({"logprobs": True}, "logprobs=True"),
        ({"top_k": 2.0}, "top_k=2.0"),
        ({"logit_bias": [1]}, "logit_bias=[1]"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias={'3': 1.0}"),
        ({"logit_bias": {3: "1"}}, "logit_bias={3: '1'}"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9: must be in [0, max_tokens=8]"),
        ({"min_tokens": 1.0}, "min_tokens=1.0"),
        ({"bad_words": "word"}, "bad_words='word'"),
        ({"bad_words": ["a", ""]}, "bad_words=('a', '')"),
        ({"bad_words": [3]}, "bad_words=(3,)"),
    ],
)
def test_sampling_params_name_what_is_wrong(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_the_ends_of_every_range_are_accepted() -> None:
    forbidden = {7: float("-inf")}  # -inf forbids a token
    SamplingParams(max_tokens=1, top_k=2**31 - 1, top_p=1.0, min_p=1.0, seed=2**64 - 1, logit_bias=forbidden)
    SamplingParams(temperature=1e-5)
    Dynamic(depth=MAX_DEPTH - 1, top_k=2, num_nodes=8)
    Static(tuple((0,) * d for d in range(1, MAX_DEPTH + 1)))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Chain, "num_spec_tokens", 2.5),
        (Chain, "num_spec_tokens", True),
        (Chain, "num_spec_tokens", None),
        (Dynamic, "depth", 2.0),
        (Dynamic, "top_k", "2"),
        (Dynamic, "num_nodes", 6.0),
        (Lookup, "min_match", 1.5),
        (Lookup, "min_confidence", "0.5"),
        (Static, "static_paths", ((0,), (0, 0.5))),
        (Static, "static_paths", ((0,), [0, 0])),
    ],
)
def test_ways_to_draft_name_what_is_of_another_kind(kind: type[Drafting], name: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: must be ")):
        kind(**{name: value})
    if value is None:  # an option that was not given
        assert drafting_named(kind.name, **{name: None}) == kind()
    else:
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: must be ")):
            drafting_named(kind.name, **{name: value})


def test_ways_to_draft_by_name() -> None:
    """Fields of other ways are left aside; what no way has is a mistake."""
    assert drafting_named("chain", num_spec_tokens=5, depth=4, static_paths=((0,),)) == Chain(5)
    assert drafting_named("none", num_spec_tokens=5) == NoDraft() and drafting_named("static") == Static()
    for value in (Chain(2), Dynamic(1, 2, 4), Static(((0,), (1,))), NoDraft(), Lookup(1, 2, 0.3, 1000)):
        fields_ = value.as_dict()
        assert drafting_named(fields_.pop("drafter"), **fields_) == value
    for name in ("tree", ["chain"], None):
        with pytest.raises(
            ValueError,
            match=re.escape(f"drafter={name!r}: must be one of none, adaptive, chain, static, dynamic, lookup"),
        ):
            drafting_named(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_tokens=5: no way to draft has this; there are depth, lookup, "):
        drafting_named("chain", num_tokens=5)


def test_lists_and_whole_numbers_stand_for_tuples_and_floats() -> None:
    sampling = SamplingParams(stop=["a"], stop_token_ids=[3], temperature=1, logit_bias={3: 2})  # type: ignore[arg-type]
    assert sampling == SamplingParams(stop=("a",), stop_token_ids=(3,), temperature=1.0, logit_bias={3: 2.0})


def test_trees_deeper_than_the_static_buffers_are_refused() -> None:
    with pytest.raises(ValueError, match=f"depth={MAX_DEPTH}: "):
        Dynamic(depth=MAX_DEPTH, top_k=2, num_nodes=8)  # few nodes, yet as many passes
    with pytest.raises(ValueError, match="static_paths="):
        Static(tuple((0,) * d for d in range(1, MAX_DEPTH + 2)))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch": 0},
        {"page_size": 8},
        {"page_size": 24},
        {"num_pages": 0},
        {"cache_fraction": 0.0},
        {"cache_fraction": 1.0},
        {"max_context": 1},
        {"row_budget": 0},
        {"max_batch": 2.5},
        {"page_size": 16.0},
        {"num_pages": True},
        {"cache_fraction": "0.5"},
        {"cache_fraction": True},
        {"max_context": float("inf")},
        {"max_context": 100.5},
        {"row_budget": "256"},
        {"prefix_cache": 1},
        {"late_reads": "no"},
        {"check": None},
    ],
)
def test_engine_config_names_what_is_wrong(settings: dict[str, object]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        EngineConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("AQUILINE_ISA", "sse"), ("AQUILINE_THREADS", "0"), ("AQUILINE_THREADS", "x"), ("AQUILINE_THREADS", "²")],
)
def test_environment_names_what_is_wrong(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        Environment.read()


@pytest.mark.parametrize(
    ("drafting", "nodes", "depth", "rows"),
    [
        (NoDraft(), 1, 0, 0),
        (Chain(4), 5, 4, 3),
        (Dynamic(depth=5, top_k=10, num_nodes=60), 60, 6, 50),
        (Dynamic(depth=5, top_k=2, num_nodes=3), 3, 2, 10),
        (Static(((0,), (1,), (0, 0), (0, 0, 0))), 5, 3, 2),
        (Lookup(max_draft=5), 6, 5, 0),
    ],
)
def test_sizes_that_buffers_are_made_for(drafting: Drafting, nodes: int, depth: int, rows: int) -> None:
    assert (drafting.max_nodes, drafting.max_depth, drafting.draft_rows) == (nodes, depth, rows)


def test_the_pages_table_says_what_ways_to_draft_have() -> None:
    rows = re.findall(r"^\|([^|]*)\| `(\w+)` \|([^|]*)\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    table = {name: (flag.strip(" `"), default.strip()) for flag, name, default in rows}
    own = [f for kind in (Adaptive, Chain, Dynamic, Static, Lookup) for f in fields(kind)]
    assert list(table) == ["drafter", *(f.name for f in own)] and table["drafter"][0] == "--drafter"
    flags = {"lookup": "--use-lookup", "top_k": "--draft-top-k", "static_paths": "", "window": "--max-lookup"}
    for f in own:
        flag, default = table[f.name]
        assert flag == flags.get(f.name, f"--{f.name.replace('_', '-')}")
        if isinstance(f.default, int | float):
            assert default == str(f.default), f"{PAGE.name} says {f.name} is {default}, spec/drafting.py {f.default}"
        elif f.default is None:
            assert not any(map(str.isdigit, default)), f"{PAGE.name} says {f.name} is {default}; it has no fixed value"
