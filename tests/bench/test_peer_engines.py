"""OpenVINO GenAI and llama.cpp on converted checkpoints of every family: their greedy tokens in float32 are ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import write_draft, write_target

from aquiline.backends.torch.decoder import load_target
from aquiline.bench.data.prompts import read_prompts
from aquiline.bench.peers.names import parse_peer
from aquiline.bench.peers.peer import Peer, PeerSetup, conversion, stored_dtype
from aquiline.bench.results.intervals import decode_tokens_per_s
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.models.known_pairs import BUNDLED_DRAFT, BUNDLED_PROMPTS, BUNDLED_TARGET
from aquiline.models.load import read_model_config
from aquiline.spec.drafting import Chain, NoDraft

converted, cached = (getattr(conversion("converted", "tests"), name) for name in ("converted", "cached"))
random_target = conversion("random_target", "tests").random_target

NEW_TOKENS = 24
PROMPT = [5, 9, 33, 7, 12, 80, 80, 41, 3, 99, 14, 150]
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 500000.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
# 32 divides every width: GGUF's int8 blocks are that long.
WIDTHS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, llama3 rotation": {"rope_parameters": LLAMA3},
    "llama, linear rotation": {"rope_parameters": LINEAR, "seed": 4},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, as many key heads": {"num_key_value_heads": 4},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
}


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


needs_openvino, needs_llamacpp = needs("openvino", "openvino_genai"), needs("llama_cpp")
ENGINES = [pytest.param("openvino", marks=needs_openvino), pytest.param("llamacpp", marks=needs_llamacpp)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Conversions of a test go with it."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets" / "aquiline" / "peers" / "converted"


def tokens(peer: Peer, prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
    """A peer's greedy text, twice, since nothing may be kept between calls."""
    first, second = (peer.generate([prompt], count, 0.0)[0] for _ in range(2))
    assert first.token_ids == second.token_ids and first.num_tokens == count
    assert 0 < first.first_ms < first.last_ms
    return first.token_ids


def ours(target: Path, prompt: list[int], count: int = NEW_TOKENS, dtype: str = "float32") -> list[int]:
    """The baseline's greedy text."""
    llm = LLM(target, dtype=dtype, engine=EngineConfig(max_batch=1, prefix_cache=False))
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    return llm.run([prompt], sampling, drafting=NoDraft()).outputs[0].token_ids


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TARGETS)
def test_every_family_writes_our_tokens(name: str, engine: str, tmp_path: Path, cache: Path) -> None:
    write_target(tmp_path / "target", **(WIDTHS | TARGETS[name]))
    place = PeerSetup(tmp_path / "target", None, 1, 64)
    expected = ours(place.target, PROMPT)
    assert len(set(expected)) > 4, "a text that loops at once shows nothing"
    for options in {"openvino": ("f32:samekv", "f32:samekv:lookup"), "llamacpp": ("f32", "f32:noflash")}[engine]:
        peer = parse_peer(f"{engine}:{options}").open(place)
        assert tokens(peer, PROMPT) == expected, options
        assert peer.dtype == "float32"
        assert peer.system()["threads"] == 1
        peer.close()
    (made,) = cache.iterdir()
    stamp = made.stat().st_mtime_ns
    parse_peer(f"{engine}:f32").open(place).close()
    assert [(file, file.stat().st_mtime_ns) for file in cache.iterdir()] == [(made, stamp)], "converted twice"


@needs_openvino
@pytest.mark.parametrize(("options", "how"), [("sdpa", "one call"), ("samekv", "continuous"), ("lookup", "continuous")])
def test_openvino_runs_a_batch_in_one_call_or_continuously(options: str, how: str, tmp_path: Path) -> None:
    write_target(tmp_path / "target", **WIDTHS)
    place = PeerSetup(tmp_path / "target", None, 1, 64, batch=2)
    peer = parse_peer(f"openvino:f32:{options}" + ("" if "samekv" in options else ":samekv")).open(place)
    assert peer.system()["batching"] == how
    for _ in range(2):
        run = peer.generate([PROMPT, PROMPT[::-1]], 12, 0.0)
        assert [o.token_ids for o in run] == [ours(place.target, p, 12) for p in (PROMPT, PROMPT[::-1])]
        assert decode_tokens_per_s(run) > 0 and all(o.first_ms < o.last_ms for o in run)
        assert all(o.num_steps == 11 or "lookup" in options for o in run)


@needs_openvino
def test_openvino_stores_keys_and_values_as_it_likes_unless_told(tmp_path: Path) -> None:
    write_target(tmp_path / "target", **WIDTHS)
    place = PeerSetup(tmp_path / "target", None, 1, 64)
    stored = {o: parse_peer(f"openvino:{o}").open(place).system()["kv_precision"] for o in ("f32", "f32:samekv")}
    assert stored == {"f32": "u8", "f32:samekv": "f32"}


@pytest.mark.parametrize("engine", ENGINES)
def test_rounded_weights_still_write_the_bundled_targets_text(engine: str) -> None:
    llm = LLM(BUNDLED_TARGET, engine=EngineConfig(max_batch=1))
    prompt = llm.encode(read_prompts(BUNDLED_PROMPTS)[2].text)
    place = PeerSetup(BUNDLED_TARGET, None, 1, len(prompt) + NEW_TOKENS + 1)
    precise = ":samekv" if engine == "openvino" else ""
    expected = ours(BUNDLED_TARGET, prompt, dtype="bfloat16")
    for dtype in ("float32", "int8"):
        peer = parse_peer(f"{engine}:{dtype}{precise}").open(place)
        found = tokens(peer, prompt)
        assert peer.dtype == dtype
        assert found == expected if dtype == "float32" else found[:4] == expected[:4]
        peer.close()


@needs_openvino
def test_openvino_drafts_with_our_head_as_well_as_we_do() -> None:
    """Steps are a measure of the whole head: with two norms mixed up, one in ten of these is another."""
    llm = LLM("bundled", engine=EngineConfig(max_batch=1, prefix_cache=False))
    prompts = [llm.encode(read_prompts(BUNDLED_PROMPTS)[i].text) for i in (2, 4, 5, 7)]
    place = PeerSetup(BUNDLED_TARGET, BUNDLED_DRAFT, 1, max(map(len, prompts)) + 65)
    peer = parse_peer("openvino:f32:eagle=3:samekv").open(place)
    steps = [0, 0]
    for prompt in prompts:
        run = llm.run([prompt], SamplingParams(max_tokens=64, ignore_eos=True), drafting=Chain(3))
        (output,) = peer.generate([prompt], 64, 0.0)
        assert output.token_ids == run.outputs[0].token_ids
        assert 2 * output.num_steps < output.num_draft_tokens <= 3 * output.num_steps
        steps[0] += run.summary.num_decode_steps
        steps[1] += output.num_steps
    assert steps[0] < 120 and abs(steps[1] - steps[0]) <= 2, steps


@needs_openvino
def test_a_head_that_openvino_does_not_know_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path / "target", **WIDTHS)
    config = read_model_config(tmp_path / "target")
    write_draft(tmp_path / "draft", config, hidden_size=64, fc_norm=True)
    with pytest.raises(ValueError, match="draft: fc_norm=true; OpenVINO GenAI runs EAGLE-3 heads without it"):
        parse_peer("openvino:f32:eagle").open(PeerSetup(tmp_path / "target", tmp_path / "draft", 1, 64))
    write_draft(tmp_path / "own", config, hidden_size=64, ship_embed=True)
    with pytest.raises(ValueError, match=r"draft: has an embedding of its own; .* puts the target's in its place"):
        parse_peer("openvino:f32:eagle").open(PeerSetup(tmp_path / "target", tmp_path / "own", 1, 64))


@needs_openvino
def test_what_openvino_cannot_do_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    place = PeerSetup(tmp_path, None, 1, 64)
    for name, why in (
        ("eagle", "none is given; pass --draft"),
        ("lookup:sdpa", "paged caches only; leave sdpa out"),
        (f"{tmp_path}/nothing", "holds no openvino_model.xml"),
    ):
        with pytest.raises(ValueError, match=why):
            parse_peer(f"openvino:{name}").open(place)


@needs_openvino
def test_a_directory_that_is_converted_already_is_taken(tmp_path: Path, cache: Path) -> None:
    write_target(tmp_path / "target", **WIDTHS)
    place = PeerSetup(tmp_path / "target", None, 1, 64)
    parse_peer("openvino:f32").open(place).close()
    (made,) = cache.iterdir()
    elsewhere = made.rename(tmp_path / "exported")
    peer = parse_peer(f"openvino:f32:samekv:{elsewhere}").open(place)
    assert tokens(peer, PROMPT) == ours(place.target, PROMPT) and not list(cache.iterdir())


@needs_llamacpp
def test_llamacpp_refuses_what_its_files_cannot_say(tmp_path: Path) -> None:
    write_target(tmp_path / "windowed", family="mistral", sliding_window=16, **WIDTHS)
    with pytest.raises(ValueError, match="target: a sliding window"):
        parse_peer("llamacpp:f32").open(PeerSetup(tmp_path / "windowed", None, 1, 64))


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "half").write_text("")
        raise ValueError("no space")

    with pytest.raises(ValueError, match="no space"):
        cached("form", write)
    assert not list(cache.iterdir())


def test_a_conversion_that_another_process_finished_first_is_taken(cache: Path) -> None:
    def write(directory: Path) -> None:
        (cache / "form").mkdir()
        (cache / "form" / "theirs").write_text("")
        (directory / "ours").write_text("")

    assert [file.name for file in cached("form", write).iterdir()] == ["theirs"]
    assert [file.name for file in cache.iterdir()] == ["form"], "our half is left"


def test_other_weights_are_another_conversion(tmp_path: Path) -> None:
    places = []
    for seed in (0, 1, 0):
        write_target(tmp_path / "target", seed=seed)
        places.append(converted([tmp_path / "target"], "form", lambda d: None))
    assert places[0] == places[2] != places[1]
    assert converted([tmp_path / "target"], "other", lambda d: None) != places[0]


def test_weights_are_neither_rounded_nor_widened(tmp_path: Path) -> None:
    write_target(tmp_path / "wide")
    write_target(tmp_path / "narrow", dtype=torch.bfloat16)
    assert (stored_dtype(tmp_path / "wide"), stored_dtype(tmp_path / "narrow")) == ("float32", "bfloat16")
    assert stored_dtype(BUNDLED_TARGET) == stored_dtype(BUNDLED_DRAFT) == "bfloat16"


def test_a_random_target_is_written_once_and_loads_strictly(tmp_path: Path, cache: Path) -> None:
    write_target(tmp_path / "target", family="qwen2")
    file = tmp_path / "target" / "config.json"
    place = random_target(str(file))
    stamp = (place / "model.safetensors").stat().st_mtime_ns
    assert random_target(str(file.parent)) == place and (place / "model.safetensors").stat().st_mtime_ns == stamp
    decoder = load_target(place)
    assert decoder.config == read_model_config(tmp_path / "target")
    assert 0.019 < float(decoder.layers[0].down.float().std()) < 0.021  # type: ignore[union-attr]
    first = decoder.embed.clone()
    (place / "model.safetensors").unlink()
    place.rename(tmp_path / "gone")
    assert load_target(random_target(str(file))).embed.equal(first), "other weights from the same config"
    told = r"random_weights='llama-1b': must be llama-230m, llama-494m, llama-32m or a config\.json"
    with pytest.raises(ValueError, match=told):
        random_target("llama-1b")


@needs_llamacpp
def test_llamacpp_continues_several_prompts_together(tmp_path: Path) -> None:
    """More rows than one forward takes, each sequence's text what it is alone. Flash attention rounds more, and in this
    text two tokens lie 0.005 apart."""
    write_target(tmp_path / "target", **WIDTHS)
    prompts = [[(7 * i + 3 * j) % 150 + 1 for j in range(200)] for i in range(4)]
    peer = parse_peer("llamacpp:f32:noflash").open(PeerSetup(tmp_path / "target", None, 1, 256, batch=4))
    expected = [ours(tmp_path / "target", prompt)[:8] for prompt in prompts]
    for _ in range(2):
        run = peer.generate(prompts, 8, 0.0)
        assert [output.token_ids for output in run] == expected
    assert len({tuple(o.token_ids) for o in peer.generate(prompts[:1] * 4, 8, 1.5)}) == 4, "drawn apart"
    peer.close()
