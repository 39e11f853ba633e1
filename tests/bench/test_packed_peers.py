"""llamacpp:packed: a GGUF file that a peer and we both run as it is; who takes part, what is checked, what is said."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.bench.test_llama_server import SERVER, needs_server
from tests.bench.test_peers import row
from tests.conftest import needs_native
from tests.gguf_files import chatml, write_gguf_target
from tokenizers import Tokenizer
from typer.testing import CliRunner

from aquiline.bench.data.prompts import read_prompts
from aquiline.bench.peers.comparison import check, plan_of
from aquiline.bench.peers.contest import Contest
from aquiline.bench.peers.contestants import Other, PeerModel
from aquiline.bench.peers.llama_server import LlamaServerPeer
from aquiline.bench.peers.names import PACKED_PEERS, PeerSpec, is_rounded, parse_peer, parse_peers
from aquiline.bench.peers.peer import Peer, PeerOutput, PeerSetup
from aquiline.bench.peers.verdict import CHECK_TOKENS, Checked, Comparison
from aquiline.bench.results.integrity import problems
from aquiline.bench.results.result import Scenario
from aquiline.blocks import is_packed
from aquiline.cli.main import app
from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.models.known_pairs import BUNDLED_DRAFT, BUNDLED_PROMPTS, BUNDLED_TARGET
from aquiline.spec.drafting import NoDraft

needs_llamacpp = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="not installed: llama_cpp")
pytestmark = needs_native

NEW_TOKENS = 32


@pytest.fixture(autouse=True)
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions of a test go with it, and the server is where it was built."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    if SERVER is not None:
        monkeypatch.setenv("AQUILINE_LLAMA_SERVER", str(SERVER))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target in blocks, with a vocabulary that puts a bos before texts."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_TARGET / "tokenizer.json"))
    vocabulary = chatml("smollm", tokenizer, **{"ggml.add_bos_token": True})
    found = tmp_path_factory.mktemp("packed") / "target.gguf"
    write_gguf_target(found, BUNDLED_TARGET, kind=lambda n: "Q8_0" if "embed" in n else "Q4_1", vocabulary=vocabulary)
    return found


def prompts(count: int, length: int = 48) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(BUNDLED_TARGET / "tokenizer.json"))
    texts = [prompt.text for prompt in read_prompts(BUNDLED_PROMPTS)[:count]]
    return [tokenizer.encode(text, add_special_tokens=False).ids[:length] for text in texts]


def llm_of(file: Path, **how: Any) -> LLM:
    return LLM(file, **how, engine=EngineConfig(max_batch=1, prefix_cache=False))


def ours(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.run([prompt], SamplingParams(NEW_TOKENS, ignore_eos=True), drafting=NoDraft()).outputs[0].token_ids


class Mirror:
    """A peer that is our own engine on a checkpoint."""

    def __init__(self, spec: PeerSpec, target: Path, dtype: str) -> None:
        self.spec, self.dtype, self.llm, self.asked = (
            spec,
            str(spec.dtype or "bfloat16"),
            llm_of(target, dtype=dtype),
            0,
        )

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[PeerOutput]:
        self.asked += 1
        run = self.llm.run(prompts, SamplingParams(new_tokens, temperature, ignore_eos=True), drafting=NoDraft())
        return [PeerOutput(new_tokens, o.ttft_ms, o.total_ms, o.token_ids, new_tokens - 1) for o in run.outputs]

    def system(self) -> dict[str, object]:
        return {"threads": self.llm.models.system()["threads"]}

    def close(self) -> None:
        self.llm.close()


def mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer is our own engine: packed ones on the file as it is, others on its values in float32."""

    def opened(self: PeerSpec, place: PeerSetup) -> Peer:
        return Mirror(self, place.target, "packed" if self.dtype == "packed" else "float32")

    monkeypatch.setattr(PeerSpec, "open", opened)


def test_blocks_need_a_file_that_has_them(tmp_path: Path) -> None:
    spec = parse_peer("llamacpp:packed:noflash")
    with pytest.raises(ValueError) as caught:
        spec.open(PeerSetup(BUNDLED_TARGET, None, 1, 64))
    assert str(caught.value) == (
        "peer llamacpp packed noflash: runs a GGUF file as it is, and the target is target; name a .gguf file by "
        "--target, or choose one of int8, int4, bfloat16 and float32, which are converted"
    )
    done = CliRunner().invoke(app, ["compare", "--target", "bundled", "--peer", "llamacpp:packed", "transformers"])
    assert done.exit_code == 2 and "aquiline: peer llamacpp packed: runs a GGUF file as it is" in done.stderr


def test_a_packed_peer_is_checked_on_its_file_apart_from_the_converted_ones() -> None:
    spec = parse_peer("llamacpp:packed:eagle=2")
    assert spec.model == "llamacpp packed" and spec.is_served and spec.is_speculative
    assert spec.plain == PeerSpec("llamacpp", "packed", flags=("noflash",))
    assert {parse_peer(name).dtype for name in PACKED_PEERS} == {"packed"}


def test_storages_by_what_they_keep_of_a_weight() -> None:
    assert [is_packed(w) for w in ("q4_1+q8_0", "q6_k", "q4_k+bfloat16", "int4", "bfloat16", "server")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    assert [is_rounded(w) for w in ("q8_0", "int8", "int4", "float32", "bfloat16", "server")] == [True] * 3 + [
        False
    ] * 3


def test_everybody_is_compared_on_a_file_and_blocks_on_files_alone(file: Path) -> None:
    def named(target: str, draft: str | None, contest: Contest) -> set[PeerSpec]:
        plan = plan_of(contest, PairConfig(target=target, draft=draft))
        assert plan.is_packed == (target != "bundled")
        return {spec for spec in plan.peers if spec.dtype == "packed"}

    alone, together = Contest(num_spec_tokens=(2, 3)), Contest(num_spec_tokens=(2, 3), batch=4)
    assert named("bundled", None, alone) == set()
    assert named(str(file), str(BUNDLED_DRAFT), alone) == set(parse_peers(PACKED_PEERS, (2, 3)))
    assert not {s for s in named(str(file), None, alone) if s.drafter == "eagle"}
    assert named(str(file), str(BUNDLED_DRAFT), together) == {
        parse_peer("llamacpp:packed"), parse_peer("llamacpp:packed:noflash"),
    }  # fmt: skip


def test_the_check_on_blocks_asks_for_the_token_behind_every_beginning_of_our_text(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a near tie costs one token, where the whole text behind it would be lost; another model loses more."""
    place, spec, alone = PeerSetup(file, None, 1, 96), parse_peer("llamacpp:packed"), prompts(3)
    shutil.copytree(BUNDLED_TARGET, tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    for layer in (2, 4, 6):
        weights[f"model.layers.{layer}.mlp.down_proj.weight"] *= -1
    save_file(weights, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    runs = {"same": (file, "packed"), "exact": (BUNDLED_TARGET, "bfloat16"), "other": (tmp_path / "other", "bfloat16")}
    found = {}
    for name, (target, dtype) in runs.items():
        peer = Mirror(spec, target, dtype)
        rooms: list[PeerSetup] = []
        monkeypatch.setattr(PeerSpec, "open", lambda self, place, peer=peer, rooms=rooms: rooms.append(place) or peer)
        found[name] = check(llm_of(file), spec, replace(place, max_context=50, batch=4), alone)
        assert rooms == [replace(place, max_context=48 + CHECK_TOKENS + 1)]
        assert peer.asked == 3 * CHECK_TOKENS
    assert found["same"] == Checked((16, 16, 16), is_packed=True)
    assert not found["exact"].problems, str(found["exact"])
    assert found["other"].problems, str(found["other"])
    assert Checked((16, 11, 16), True).problems == [
        "it computes another model: only 16, 11, 16 of 16 tokens after our text are ours"
    ]


def test_equal_storage_is_compared_with_equal_storage() -> None:
    rows = [
        row("aquiline baseline", 100, weights="q4_1+q8_0"),
        row("aquiline chain-3", 150, weights="q4_1+q8_0", is_speculative=True),
        row("llamacpp packed", 80, weights="q4_1+q8_0"),
        row("llamacpp packed ngram-cache", 120, weights="q4_1+q8_0", is_speculative=True),
        row("openvino", 130), row("llamacpp int8", 90, weights="int8"),
    ]  # fmt: skip
    found = Comparison(rows, [], {"llamacpp packed": Checked((16, 15, 16), True), "openvino": Checked((16,))}, {})
    own, peers = "aquiline chain-3", "the fastest of 2 peer settings, llamacpp packed ngram-cache"
    assert [line.replace(" [75, 1350]", "") for line in found.verdict] == [
        "on q4_1+q8_0 weights, without drafting: aquiline baseline (100 [50, 900] tok/s) is 1.25x [1.25, 1.25] the "
        "fastest of 1 peer settings, llamacpp packed (80 [40, 720] tok/s)",
        f"on q4_1+q8_0 weights, of all: {own} (150 tok/s) is 1.25x [1.25, 1.25] {peers} (120 [60, 1080] tok/s)",
        "of all, whatever the weights: aquiline chain-3 (the fastest of 2 settings, q4_1+q8_0, 150 tok/s) is 1.15x "
        "[1.15, 1.15] the fastest of 4 peer settings, openvino (bfloat16, 130 [65, 1170] tok/s)",
    ]
    data = found.as_dict()
    assert data["agreed_on_packed"] == {"llamacpp packed": (16, 15, 16)}
    assert data["agreed_in_float32"] == {"openvino": (16,)}
    assert len(Comparison(rows[:4], [], {}, {}).verdict) == 2, "nothing else is stored otherwise"


def test_results_say_what_a_file_stores_and_its_bytes(file: Path) -> None:
    spec = parse_peer("llamacpp:packed:noflash")
    peer = Mirror(spec, file, "packed")
    model, own = PeerModel(file, None, ("target", None)), peer.llm.models
    facts = model.facts_of_peer("packed", False)
    assert (facts.dtype, facts.arithmetic) == (own.storage, own.arithmetic) == ("q4_1+q8_0", "int8")
    assert facts.weight_bytes == own.weight_bytes
    other = Other(spec, peer)
    other.runs = [peer.generate([prompt], 8, 0.0) for prompt in prompts(2)]
    scenario = Scenario("peers", "cpu", 48, 1, 8, 0.0, 0, "0" * 64, "test", 1, 2)
    result = other.result(scenario, model)
    assert problems(result) == []
    assert result["model"]["dtype"] == "q4_1+q8_0" and result["model"]["weight_bytes"] == facts.weight_bytes
    assert result["setting"]["name"] == "llamacpp packed noflash" and result["memory"]["kv_bytes_per_token"] == 0


@pytest.mark.rare
def test_a_file_is_compared_as_it_is_and_peers_are_checked_each_on_its_own_weights(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrored(monkeypatch)
    options = ["--target", file, "--draft", BUNDLED_DRAFT, "--num-spec-tokens", 2, "--repeats", 1]
    options += ["--prompt-tokens", 32, "--new-tokens", 12, "--out", tmp_path / "out", "--json"]
    done = CliRunner().invoke(app, ["compare", *map(str, options), "--peer", "llamacpp:packed", "openvino"])
    assert done.exit_code == 0, (done.stderr, done.exception)
    data = json.loads(done.stdout)
    found = {found["label"]: found for found in data["rows"]}
    assert list(found) == ["aquiline baseline", "aquiline chain-2", "aquiline tree", "llamacpp packed", "openvino"]
    assert {label for label, row in found.items() if row["weights"] == "q4_1+q8_0"} == set(found) - {"openvino"}
    assert {row["arithmetic"] for label, row in found.items() if label != "openvino"} == {"int8"}
    assert not any(row["void"] for row in found.values()) and found["llamacpp packed"]["agreed"] == 12
    assert data["agreed_on_packed"] == {"llamacpp packed": [16, 16, 16]}
    assert data["agreed_in_float32"] == {"openvino": [16, 16, 16]}
    assert [line.partition(":")[0] for line in data["verdict"]] == [
        "on q4_1+q8_0 weights, without drafting", "on q4_1+q8_0 weights, of all", "of all, whatever the weights",
    ]  # fmt: skip
    assert len(list((tmp_path / "out").glob("*.json"))) == 5


@needs_llamacpp
@pytest.mark.parametrize("options", ["packed", "packed:noflash"])
def test_llamacpp_runs_the_file_itself(options: str, file: Path) -> None:
    llm, alone = llm_of(file), prompts(4)
    assert llm.encode("import os")[0] == 0 != alone[0][0], "the file wants a bos before texts"
    spec, place = parse_peer(f"llamacpp:{options}"), PeerSetup(file, None, 1, 96)
    assert not check(llm, spec, place, alone[:3]).problems
    peer = spec.open(place)
    texts = [peer.generate([prompt], NEW_TOKENS, 0.0)[0].token_ids for prompt in alone]
    assert texts == [peer.generate([prompt], NEW_TOKENS, 0.0)[0].token_ids for prompt in alone]
    assert sum(text == ours(llm, prompt) for text, prompt in zip(texts, alone, strict=True)) >= 2
    assert len({tuple(peer.generate(alone[:1], 12, 0.8)[0].token_ids) for _ in range(4)}) > 1, "drawn"
    peer.close()
    together = spec.open(replace(place, batch=4))
    found = [output.token_ids for output in together.generate(alone, NEW_TOKENS, 0.0)]
    assert sum(a[:8] == b[:8] for a, b in zip(found, texts, strict=True)) >= 3, "the same ids, batched"
    together.close()


@needs_llamacpp
@needs_server
@pytest.mark.parametrize("options", ["server", "eagle=3", "ngram-simple=3x8", "ngram-map-k=3x8", "ngram-cache"])
def test_the_server_runs_the_file_itself_and_puts_nothing_before_ids(options: str, file: Path) -> None:
    llm, alone = llm_of(file), prompts(4)
    peer = parse_peer(f"llamacpp:packed:{options}").open(PeerSetup(file, BUNDLED_DRAFT, 1, 96))
    assert isinstance(peer, LlamaServerPeer) and peer.dtype == "packed"
    outputs = [peer.generate([prompt], NEW_TOKENS, 0.0)[0] for prompt in alone]
    assert sum(o.token_ids[:8] == ours(llm, p)[:8] for o, p in zip(outputs, alone, strict=True)) >= 3
    assert all(output.num_tokens == NEW_TOKENS for output in outputs)
    if options == "eagle=3":
        assert sum(o.num_tokens - 1 for o in outputs) > 1.5 * sum(o.num_steps for o in outputs), "the draft is ours"
    drawn = {tuple(peer.generate(alone[:1], 12, 0.8)[0].token_ids) for _ in range(4)}
    assert len(drawn) > 1
    answer = peer._request("/completion", {"prompt": "import os", "n_predict": 1})
    assert answer["tokens_evaluated"] == len(llm.encode("import os")), "a text gets the bos that ids do not get"
    peer.close()
