"""llamacpp:eagle: heads as GGUF files, a server found, missing and dying, and a real one on the bundled pair."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import edit_json, write_draft, write_target

from aquiline.backends.torch.decoder import load_target
from aquiline.backends.torch.eagle import load_draft
from aquiline.bench.data.prompts import read_prompts
from aquiline.bench.peers import llama_server
from aquiline.bench.peers.contestants import Other, PeerModel
from aquiline.bench.peers.llama_server import BINARY, LlamaServerPeer, find_server, server_folder
from aquiline.bench.peers.names import parse_peer
from aquiline.bench.peers.peer import PeerSetup, conversion
from aquiline.bench.results.integrity import problems
from aquiline.bench.results.result import Scenario
from aquiline.config import ConvertConfig, EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.models.conversion import convert
from aquiline.models.known_pairs import BUNDLED_DRAFT, BUNDLED_PROMPTS, BUNDLED_TARGET
from aquiline.models.load import read_model_config
from aquiline.spec.drafting import Chain, NoDraft

PROMPT = [5, 9, 33, 7, 12, 80, 80, 41, 3, 99, 14, 150]
WIDTHS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
LABEL = "llamacpp eagle"


def _server() -> Path | None:
    try:
        return find_server(LABEL)
    except ValueError:
        return None


SERVER = _server()  # before any test hides it
needs_server = pytest.mark.skipif(SERVER is None, reason="no llama-server: python benchmarks/llama_server.py")


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server anywhere, and conversions that go with the test."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("AQUILINE_LLAMA_SERVER", raising=False)


def program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def pair(directory: Path, family: str = "llama", **draft: Any) -> PeerSetup:
    """A random target and a draft of it."""
    write_target(directory / "target", family, **WIDTHS)
    config = read_model_config(directory / "target")
    write_draft(directory / "draft", config, **({"hidden_size": 64} | draft))
    return PeerSetup(directory / "target", directory / "draft", 1, 64)


def test_a_missing_server_is_named_with_what_builds_it() -> None:
    with pytest.raises(ValueError) as caught:
        find_server(LABEL)
    said = str(caught.value)
    assert said.startswith("peer llamacpp eagle: ") and "there is no llama-server on the PATH" in said
    assert "python benchmarks/llama_server.py" in said and str(server_folder()) in said
    assert (Path(__file__).parents[2] / "benchmarks" / "llama_server.py").exists()


def test_a_server_is_found_where_it_is_named_then_on_the_path_then_where_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = program(server_folder() / BINARY, "exit 0")
    assert find_server(LABEL) == built
    on_path = program(tmp_path / "bin" / BINARY, "exit 0")
    assert find_server(LABEL) == on_path
    named = program(tmp_path / "named", "exit 0")
    monkeypatch.setenv("AQUILINE_LLAMA_SERVER", str(named))
    assert find_server(LABEL) == named
    named.chmod(0o644)
    with pytest.raises(ValueError, match=r"AQUILINE_LLAMA_SERVER='.*named': is no program; leave it out or build"):
        find_server(LABEL)


def test_a_server_without_a_draft_is_refused_before_it_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="llamacpp eagle: drafts with an EAGLE-3 head and none is given; pass --draft"):
        parse_peer("llamacpp:eagle").open(PeerSetup(tmp_path, None, 1, 64))


def test_a_server_that_dies_says_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = pair(tmp_path)
    words = "for line in 1 2 3 4 5; do echo line $line; done; echo 'no such option' >&2; exit 3"
    monkeypatch.setenv("AQUILINE_LLAMA_SERVER", str(program(tmp_path / "bad", words)))
    ended = r"the server ended before it was ready; it ended with 3: line 3 \| line 4 \| line 5 \| no such option$"
    with pytest.raises(ValueError, match=ended):
        LlamaServerPeer(parse_peer("llamacpp:eagle"), place, "float32")
    (tmp_path / "bad").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(ValueError, match=r"llamacpp eagle: .*bad does not start \(.*\); build one by python bench"):
        LlamaServerPeer(parse_peer("llamacpp:eagle"), place, "float32")


def written(place: PeerSetup, stored: str = "float32") -> dict[str, Any]:
    """A draft's file as the gguf package reads it: fields and tensors by name."""
    from gguf import GGUFReader

    assert place.draft is not None
    reader = GGUFReader(conversion("gguf_file", "tests").draft_file(place.target, place.draft, stored))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields | {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}


def straight(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads whose halves were interleaved, in a checkpoint's order."""
    parts = rows.view(heads, -1, 2, rows.shape[1])
    return torch.cat((parts[:, :, 0], parts[:, :, 1]), 1).reshape(rows.shape)


def test_every_weight_of_a_head_is_in_its_file(tmp_path: Path) -> None:
    place = pair(tmp_path, target_hidden_size=64, norm_before_fc=True, norm_before_residual=True)
    assert place.draft is not None
    head = load_draft(place.draft, load_target(place.target, dtype="float32"), dtype="float32")
    found = written(place)
    assert found["general.architecture"] == "eagle3" and found["eagle3.target_hidden_size"] == 64
    assert found["eagle3.norm_before_fc"] is True and found["eagle3.norm_before_residual"] is True
    assert head.config.capture == (1, 3, 4) and found["eagle3.target_layers"] == [2, 4, 5], "what enters a layer"
    assert found["eagle3.attention.head_count_kv"] == 2 and found["eagle3.rope.freq_base"] == 500000.0
    assert found["d2t"].equal(torch.arange(80) + head.d2t), "ids, not offsets"
    assert found["tokenizer.ggml.tokens"] == [f"{token:x}" for token in range(160)]
    q, k, v = torch.split(head.layer.qkv, head.layer.split)
    gate, up = torch.chunk(head.layer.gate_up, 2)
    assert head.input_norm is not None
    expected = {
        "fc.weight": head.fc, "enc.output_norm.weight": head.input_norm, "blk.0.attn_norm_2.weight": head.hidden_norm,
        "blk.0.attn_norm.weight": head.layer.input_norm, "blk.0.ffn_norm.weight": head.layer.post_norm,
        "output_norm.weight": head.norm, "output.weight": head.head, "blk.0.attn_v.weight": v,
        "blk.0.attn_output.weight": head.layer.o, "blk.0.ffn_gate.weight": gate, "blk.0.ffn_up.weight": up,
        "blk.0.ffn_down.weight": head.layer.down,
    }  # fmt: skip
    assert {name for name, value in found.items() if isinstance(value, torch.Tensor)} == {
        *expected, "blk.0.attn_q.weight", "blk.0.attn_k.weight", "d2t",
    }  # fmt: skip
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name
    for name, tensor, heads in (("q", q, 4), ("k", k, 2)):
        rows = found[f"blk.0.attn_{name}.weight"]
        assert rows.shape == (heads * 16, 128) and not rows.equal(tensor)
        assert straight(rows, heads).equal(tensor), name


def test_a_head_brings_its_own_embedding_and_rotation_only_where_they_differ(tmp_path: Path) -> None:
    rotation = {"rope_type": "linear", "factor": 4.0}
    own = written(pair(tmp_path / "own", ship_embed=True, rope_scaling=rotation))
    assert own["token_embd.weight"].shape == (160, 64)
    assert own["rope_freqs.weight"].tolist() == pytest.approx([4.0] * 8)
    shared = written(pair(tmp_path / "shared"))
    assert not {"token_embd.weight", "rope_freqs.weight", "enc.output_norm.weight"} & shared.keys()


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ({"fc_norm": True}, "draft: fc_norm=true: llama.cpp has no field that says it"),
        (
            {"sliding_window": 16, "producer": "aquiline"},
            "draft: sliding_window=16: llama.cpp has no field that says it",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, "draft: reads what leaves the target's last layer"),
    ],
)
def test_heads_that_llamacpp_does_not_know_are_refused(draft: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        written(pair(tmp_path, **draft))


def test_a_target_whose_layers_llamacpp_does_not_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target: of the qwen2 family; llama\.cpp drafts with EAGLE-3 for llama"):
        written(pair(tmp_path, "qwen2"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUILINE_LLAMA_SERVER", str(SERVER))


def edited(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """The bundled draft with other fields and tensors, and without its window, which llama.cpp's heads do not have."""
    shutil.copytree(BUNDLED_DRAFT, directory)
    edit_json(directory / "config.json", lambda fields: fields.update({"sliding_window": None} | config))
    save_file(load_file(BUNDLED_DRAFT / "model.safetensors") | tensors, directory / "model.safetensors")
    return directory


def steps(draft: Path) -> tuple[list[int], list[int]]:
    """Ours and the server's for the same text, which both write."""
    llm = LLM(BUNDLED_TARGET, draft, engine=EngineConfig(max_batch=1, prefix_cache=False))
    prompts = [llm.encode(read_prompts(BUNDLED_PROMPTS)[i].text) for i in (2, 4, 5, 7)]
    peer = LlamaServerPeer(
        parse_peer("llamacpp:eagle=3"), PeerSetup(BUNDLED_TARGET, draft, 1, max(map(len, prompts)) + 65), "float32"
    )
    ours, theirs = [], []
    for prompt in prompts:
        run = llm.run([prompt], SamplingParams(max_tokens=64, ignore_eos=True), drafting=Chain(3))
        (output,) = peer.generate([prompt], 64, 0.0)
        assert output.token_ids == run.outputs[0].token_ids
        assert peer.system()["drafting_reported"] == "draft-eagle3"
        assert output.num_tokens == 64 and 0 < output.first_ms < output.last_ms
        assert 2 * output.num_steps < output.num_draft_tokens <= 3 * output.num_steps
        ours.append(run.summary.num_decode_steps)
        theirs.append(output.num_steps)
    assert peer.system()["threads"] == 1 and peer.system()["kv_precision"] == "f32"
    peer.close()
    assert peer.process.returncode is not None, "it runs on"
    return ours, theirs


def apart(some: list[int], others: list[int]) -> int:
    return sum(abs(a - b) for a, b in zip(some, others, strict=True))


@needs_server
@pytest.mark.usefixtures("server")
def test_the_server_drafts_with_our_head_as_well_as_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are a measure of the whole head: of its norms, its rotation, its vocabulary and the layers it reads. The
    file of `aquiline convert` gives the same steps."""
    draft = edited(tmp_path / "draft", {}, {})
    ours, theirs = steps(draft)
    assert sum(ours) < 120 and apart(ours, theirs) <= 2, (ours, theirs)
    file = tmp_path / "draft.gguf"
    convert(draft, file, ConvertConfig("gguf"), BUNDLED_TARGET)
    monkeypatch.setattr(conversion("gguf_file", "tests"), "draft_file", lambda target, draft, dtype: file)
    assert steps(draft)[1] == theirs


@needs_server
@pytest.mark.usefixtures("server")
def test_what_only_other_heads_have_changes_their_steps_there_as_here(tmp_path: Path) -> None:
    """The bundled head never learnt to run like this, so it drafts other tokens, which tells a faithful file."""
    generator = torch.Generator().manual_seed(0)
    embed = load_target(BUNDLED_TARGET).embed.detach()
    noise = torch.randn(embed.shape, generator=generator) * embed.float().std()
    scales = torch.rand(3 * 384, generator=generator) + 0.5
    plain, _ = steps(edited(tmp_path / "plain", {}, {}))
    for name, draft in {
        "rotation": edited(tmp_path / "a", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, {}),
        "embedding": edited(tmp_path / "b", {}, {"embed_tokens.weight": (embed + 0.5 * noise).bfloat16()}),
        "residual": edited(tmp_path / "c", {"norm_before_residual": True}, {}),
        "input norm": edited(tmp_path / "d", {"norm_before_fc": True}, {"input_norm.weight": scales.bfloat16()}),
    }.items():
        ours, theirs = steps(draft)
        assert apart(ours, plain) > 4 and sum(ours) < 4 * 63, (name, ours, plain)
        assert apart(ours, theirs) <= 2, (name, ours, theirs)


@needs_server
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_every_family_drafts_and_writes_our_tokens(family: str, tmp_path: Path) -> None:
    place = pair(tmp_path, family, hidden_size=96, ship_embed=True, target_hidden_size=64)
    llm = LLM(place.target, dtype="float32", engine=EngineConfig(max_batch=1, prefix_cache=False))
    run = llm.run([PROMPT], SamplingParams(max_tokens=24, ignore_eos=True), drafting=NoDraft())
    peer = LlamaServerPeer(parse_peer("llamacpp:eagle=2"), place, "float32")
    (output,) = peer.generate([PROMPT], 24, 0.0)
    assert output.token_ids == run.outputs[0].token_ids and output.num_draft_tokens > 24
    peer.close()


@needs_server
@pytest.mark.usefixtures("server")
def test_its_result_holds_up_and_claims_no_memory_of_this_process(tmp_path: Path) -> None:
    place = pair(tmp_path)
    spec = parse_peer("llamacpp:f32:eagle")
    peer = LlamaServerPeer(spec, place, "float32")
    other = Other(spec, peer)
    other.runs = [peer.generate([PROMPT], 16, 0.0) for _ in range(2)]
    scenario = Scenario("peers", "cpu", len(PROMPT), 1, 16, 0.0, 0, "0" * 64, "test", 1, 2)
    result = other.result(scenario, PeerModel(place.target, place.draft, ("tiny", "head"), is_random=True))
    assert problems(result) == []
    assert result["setting"] == {"name": "llamacpp f32 eagle", "drafter": "other", "num_spec_tokens": 3}
    assert result["model"]["draft"] == "head" and result["memory"]["peak_bytes"] == 0
    assert result["eagle_speculation"]["num_steps"] == sum(run[0].num_steps for run in other.runs)
    process = peer.process
    del peer
    assert process.returncode is not None, "a peer that nobody holds runs on"


NGRAMS = {
    "server": ("none", False), "noflash:server": ("none", False), "ngram-simple=3x8": ("ngram-simple", True),
    "ngram-map-k=3x8": ("ngram-map-k", True), "ngram-map-k4v=3x8": ("ngram-map-k4v", True),
    "ngram-mod=3x8": ("ngram-mod", True), "ngram-cache": ("ngram-cache", True),
    "int8:ngram-simple": ("ngram-simple", True),
}  # fmt: skip


@needs_server
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("options", NGRAMS)
def test_the_servers_own_lookups_write_the_same_text_and_it_says_which_ran(options: str) -> None:
    reported, drafts = NGRAMS[options]
    llm = LLM(BUNDLED_TARGET, engine=EngineConfig(max_batch=1, prefix_cache=False))
    prompt = llm.encode(read_prompts(BUNDLED_PROMPTS)[0].text)[:64]
    run = llm.run([prompt], SamplingParams(max_tokens=48, ignore_eos=True), drafting=NoDraft())
    spec = parse_peer(f"llamacpp:{options}")
    peer = LlamaServerPeer(spec, PeerSetup(BUNDLED_TARGET, None, 1, 128), spec.dtype or "float32")
    (output,) = peer.generate([prompt], 48, 0.0)
    system = peer.system()
    peer.close()
    assert output.token_ids == run.outputs[0].token_ids or spec.dtype == "int8"
    assert system["drafting_reported"] == reported and system["flash_attention"] == ("noflash" not in options)
    assert (output.num_steps < 47) == (drafts and "=3x8" in options), "longer matches are rarer than this text is long"


@needs_server
@pytest.mark.usefixtures("server")
def test_a_server_that_drafts_otherwise_than_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = PeerSetup(BUNDLED_TARGET, None, 1, 64)
    monkeypatch.setattr(llama_server, "drafting", lambda *_: [])
    asked = LlamaServerPeer(parse_peer("llamacpp:ngram-cache"), place, "float32")
    asked.expected = "ngram-cache"
    with pytest.raises(ValueError, match="the server says that 'none' drafts; 'ngram-cache' was asked for"):
        asked.generate([PROMPT], 4, 0.0)
    asked.drafting = ["--spec-type", "ngram-cache"]
    with pytest.raises(ValueError, match="says speculative=False of its slot; 'ngram-cache' was asked for"):
        asked._check_speculative()
    asked.close()


def test_several_prompts_are_not_for_the_server() -> None:
    for options in ("server", "eagle", "ngram-cache"):
        with pytest.raises(ValueError, match="runs one prompt at a time here; 4 given"):
            parse_peer(f"llamacpp:{options}").open(PeerSetup(BUNDLED_TARGET, BUNDLED_DRAFT, 1, 64, batch=4))


@needs_server
@pytest.mark.usefixtures("server")
def test_the_server_keeps_nothing_draws_and_says_what_is_wrong(tmp_path: Path) -> None:
    place = pair(tmp_path)
    peer = LlamaServerPeer(parse_peer("llamacpp:eagle=2:noflash"), place, "float32")
    first, second = (peer.generate([PROMPT], 24, 0.0)[0] for _ in range(2))
    assert first.token_ids == second.token_ids and first.num_tokens == 24
    assert first.num_steps == second.num_steps, "what one call drafted with, the next found"
    drawn = {tuple(peer.generate([PROMPT], 12, 2.0)[0].token_ids) for _ in range(3)}
    assert len(drawn) == 3
    with pytest.raises(ValueError, match=r"the server answered 400: .*exceed"):
        peer.generate([PROMPT * 60], 4, 0.0)
    peer.process.kill()
    time.sleep(0.1)
    with pytest.raises(ValueError, match=r"the server broke off its answer .*; it ended with -9: "):
        peer.generate([PROMPT], 4, 0.0)
    peer.close()
