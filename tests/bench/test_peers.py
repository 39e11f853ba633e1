"""Peers: how they are named, what is missing, transformers for real, results that hold up, and the verdict."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import write_target
from transformers import AutoModelForCausalLM

from aquiline.bench.peers import peer as peer_module
from aquiline.bench.peers.comparison import check, plan_of
from aquiline.bench.peers.contest import Contest
from aquiline.bench.peers.contestants import Other, PeerModel
from aquiline.bench.peers.llama_server import target_file
from aquiline.bench.peers.names import ALL_PEERS, KINDS, PACKED_PEERS, PeerKind, PeerSpec, parse_peer, parse_peers
from aquiline.bench.peers.peer import PeerOutput, PeerSetup
from aquiline.bench.peers.verdict import Checked, Comparison, Standing, num_agreed
from aquiline.bench.results.integrity import differences, problems
from aquiline.bench.results.intervals import decode_tokens_per_s
from aquiline.bench.results.result import Scenario
from aquiline.config import EngineConfig, PairConfig
from aquiline.engine.llm import LLM

PROMPTS = [[5, 9, 33, 7, 12, 80, 80, 41], [11, 3, 150, 6, 77, 20, 9, 2]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target whose greedy text meets its end token early."""
    directory = tmp_path_factory.mktemp("target")
    model = write_target(directory)
    made = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    end = int(made[0, -5])
    for file in ("config.json", "generation_config.json"):
        data = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps(data | {"eos_token_id": end, "do_sample": True, "top_k": 3}))
    return directory


def greedy(target: Path, prompt: list[int], count: int) -> list[int]:
    """The argmax continuation, one whole forward per token."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, trust_remote_code=False)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("transformers", PeerSpec("transformers")),
        ("transformers:bf16:lookup", PeerSpec("transformers", "bfloat16", "lookup", 4)),
        ("openvino:sdpa:samekv", PeerSpec("openvino", flags=("sdpa", "samekv"))),
        (
            "llamacpp:ngram-simple=3x8:noflash",
            PeerSpec("llamacpp", None, "ngram-simple", 8, match=3, flags=("noflash",)),
        ),
        ("llamacpp:ngram-cache", PeerSpec("llamacpp", drafter="ngram-cache")),
        ("llamacpp:server", PeerSpec("llamacpp", flags=("server",))),
        ("transformers:eager:f32", PeerSpec("transformers", "float32", flags=("eager",))),
        ("openvino:int8", PeerSpec("openvino", "int8")),
        ("openvino:eagle=5:bfloat16", PeerSpec("openvino", "bfloat16", "eagle", 5)),
        ("openvino:/some/DIR:sdpa", PeerSpec("openvino", flags=("sdpa",), where="/some/DIR")),
        ("llamacpp:eagle=2:noflash", PeerSpec("llamacpp", None, "eagle", 2, flags=("noflash",))),
        ("llamacpp:q8_0:noflash", PeerSpec("llamacpp", "int8", flags=("noflash",))),
        ("llamacpp:packed:eagle=2:noflash", PeerSpec("llamacpp", "packed", "eagle", 2, flags=("noflash",))),
        ("openai:http://h:8000/v1#a/b", PeerSpec("openai", where="http://h:8000/v1#a/b")),
        ("openai:eagle=3:http://h:8000/v1#a", PeerSpec("openai", None, "eagle", 3, where="http://h:8000/v1#a")),
    ],
)
def test_peers_are_named_by_kind_and_options(text: str, expected: PeerSpec) -> None:
    assert parse_peer(text) == expected
    drafts = any(option in text for option in ("lookup", "eagle", "ngram"))
    assert parse_peer(text).is_speculative == drafts
    assert set(parse_peer(text).plain.flags) <= {"samekv", "noflash"}
    exact = "packed" if expected.dtype == "packed" else "float32"
    assert not parse_peer(text).plain.is_speculative and parse_peer(text).plain.dtype == exact
    assert parse_peer(text).is_served == (expected.kind == "openai" or "server" in text or ("llama" in text and drafts))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("vllm", "must begin with one of transformers, openvino, llamacpp, openai"),
        ("transformers:int8", "transformers runs no int8 weights"),
        ("openvino:q4_0", "openvino runs no int4 weights"),
        ("openvino:packed", "openvino runs no packed weights here; choose float32 or bfloat16"),
        ("transformers:eagle", "unknown option 'eagle'; transformers has float32"),
        ("llamacpp:sdpa", "unknown option 'sdpa'"),
        ("openvino:f32:bf16", "says dtype twice"),
        ("openvino:sdpa:sdpa", "says sdpa twice"),
        ("llamacpp:lookup", "unknown option 'lookup'; llamacpp has"),
        ("llamacpp:flash", "unknown option 'flash'"),
        ("llamacpp:ngram-cache=3x8", "ngram-cache takes no sizes"),
        ("llamacpp:ngram-mod=3", "ngram-mod takes NxK, of 1 to 64 each"),
        ("llamacpp:ngram-simple=3x65", "ngram-simple takes NxK"),
        ("llamacpp:ngram-simple:eagle", "says drafter twice; choose one"),
        ("openvino:lookup:eagle", "choose one"),
        ("openvino:lookup=0", "lookup takes K, of 1 to 16"),
        ("openvino:lookup=x", "lookup takes K, of 1 to 16"),
        ("openai:localhost:8000#m", "must be openai:[eagle=K:]http://HOST:PORT/v1#MODEL, K from 1 to 16"),
        ("openai:http://h/v1", "must be openai:"),
        ("openai:eagle=17:http://h/v1#m", "must be openai:"),
        ("openai:eagle=0:http://h/v1#m", "must be openai:"),
        ("openai:eagle:http://h/v1#m", "must be openai:"),
    ],
)
def test_a_peer_that_cannot_be_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_peer(text)
    assert str(caught.value).startswith(f"peer={text!r}: ") and named in str(caught.value)


def test_peers_with_the_draft_may_choose_from_the_same_chains() -> None:
    """Our best of three lengths beside their one would say little."""
    found = parse_peers(
        ["openvino:eagle:samekv", "llamacpp:eagle=4", "openai:http://h/v1#eagle", "llamacpp"], (3, 4, 5)
    )
    assert [spec.num_spec_tokens for spec in found] == [3, 4, 5, 4, None, None]
    assert [spec.label for spec in found][:2] == ["openvino eagle=3 samekv", "openvino eagle=4 samekv"]
    assert parse_peers(["llamacpp:eagle", "llamacpp:eagle=3"], (3,)) == (parse_peer("llamacpp:eagle=3"),)
    with pytest.raises(ValueError, match="must begin with one of"):
        parse_peers(["vllm:eagle"], (3,))


def test_every_prompt_must_be_ours() -> None:
    assert Checked((16, 8, 11)).problems == []
    assert Checked((16, 16, 7)).problems == [
        "it computes another model: only 16, 16, 7 of 16 first tokens in float32 are ours"
    ]


def test_a_model_that_is_ours_on_some_prompts_alone_is_another(target: Path, tmp_path: Path) -> None:
    """One embedding of another model: a prompt without that token cannot tell."""
    llm = LLM(target, dtype="float32", engine=EngineConfig(max_batch=1, prefix_cache=False))
    assert check(llm, PeerSpec("transformers"), PeerSetup(target, None, 1, 64), PROMPTS).counts == (16, 16)
    shutil.copytree(target, tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    tensors["model.embed_tokens.weight"][PROMPTS[1][0]] += 3
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    found = check(llm, PeerSpec("transformers"), PeerSetup(tmp_path / "other", None, 1, 64), PROMPTS)
    assert found.counts[0] >= 8 > found.counts[1] and found.problems


def test_a_label_shows_options_but_no_paths() -> None:
    assert parse_peer("openai:eagle=2:http://h:1/v1#m").label == "openai eagle=2 http://h:1/v1#m"
    assert not parse_peer("openai:eagle=2:http://h/v1#m").obstacle(has_draft=False, batch=8), "the server has its own"
    assert parse_peer("openvino:/home/me/exported:bf16").label == "openvino exported bf16"
    assert "/home" not in parse_peer("openvino:/home/me/exported").model
    assert len({parse_peer(name).label for name in (*ALL_PEERS, *PACKED_PEERS)}) == len(ALL_PEERS) + len(PACKED_PEERS)


def test_a_missing_package_is_named_with_the_extra(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, has in KINDS.items():
        for package in has.packages:
            try:
                version(package)
            except PackageNotFoundError:
                with pytest.raises(ValueError, match=rf"peer='{kind}'.*pip install .*aquiline\[peers\]"):
                    PeerSpec(kind).open(PeerSetup(target, None, 1, 64))
                break
    monkeypatch.setitem(KINDS, "openvino", PeerKind(("no-such-thing",)))
    with pytest.raises(
        ValueError, match=r"peer='openvino': needs the package no-such-thing.*pip install no-such-thing"
    ):
        PeerSpec("openvino").open(PeerSetup(target, None, 1, 64))


def test_an_installed_wheel_says_where_the_conversions_are(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no `benchmarks`; a GGUF file that runs as it is needs none."""
    monkeypatch.setattr(peer_module, "BENCHMARKS", tmp_path)
    setup = PeerSetup(tmp_path / "target.gguf", None, 1, 64)
    assert target_file(parse_peer("llamacpp:packed"), setup, "packed") == setup.target
    with pytest.raises(ValueError, match=r"^peer='llamacpp int8': needs benchmarks/.*gguf_file\.py, which only a"):
        target_file(parse_peer("llamacpp:int8"), setup, "int8")
    with pytest.raises(ValueError, match=r"^random_weights='llama-32m': needs benchmarks/.*pip install -e"):
        plan_of(Contest(random_weights="llama-32m"), PairConfig())


def test_every_package_of_a_peer_is_in_the_extra() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (line,) = [line for line in pyproject.splitlines() if line.startswith("peers = ")]
    assert all(f'"{p}>=' in line for kind in KINDS.values() for p in kind.packages)


@pytest.mark.parametrize("options", ["f32", "f32:eager", "f32:lookup=3"])
def test_transformers_runs_past_the_end_token_and_its_checkpoints_own_defaults(options: str, target: Path) -> None:
    peer = parse_peer(f"transformers:{options}").open(PeerSetup(target, None, 1, 64))
    for prompt in PROMPTS:
        (output,) = peer.generate([prompt], 24, 0.0)
        assert output.token_ids == greedy(target, prompt, 24) and output.num_tokens == 24
        assert 0 < output.first_ms < output.last_ms
        assert output.num_steps == 23 if "lookup" not in options else output.num_steps <= 23
    assert peer.system()["threads"] == 1 and peer.system()["transformers"] == version("transformers")
    peer.close()


def test_transformers_runs_a_batch_at_once_and_draws(target: Path) -> None:
    peer = parse_peer("transformers:f32").open(PeerSetup(target, None, 1, 64))
    run = peer.generate(PROMPTS, 12, 0.0)
    assert [o.token_ids for o in run] == [greedy(target, prompt, 12) for prompt in PROMPTS]
    seconds = (max(o.last_ms for o in run) - min(o.first_ms for o in run)) / 1e3
    assert decode_tokens_per_s(run) == pytest.approx(22 / seconds)
    torch.manual_seed(0)
    drawn = {tuple(peer.generate(PROMPTS[:1], 12, 1.5)[0].token_ids) for _ in range(4)}
    assert len(drawn) == 4, "the checkpoint's top_k=3 or greedy decoding was used"
    with pytest.raises(ValueError, match="transformers f32 lookup: runs one prompt at a time here; 2 given"):
        parse_peer("transformers:f32:lookup").open(PeerSetup(target, None, 1, 64, batch=2))


def measured(target: Path, *options: str) -> tuple[list[dict[str, object]], list[list[list[PeerOutput]]]]:
    """Results of transformers settings on the same prompts."""
    scenario = Scenario("peers", "cpu", 8, 1, 16, 0.0, 0, "0" * 64, "test", 1, 2)
    results, all_runs = [], []
    for option in options:
        spec = parse_peer(f"transformers:{option}")
        peer = spec.open(PeerSetup(target, None, 1, 64))
        other = Other(spec, peer)
        other.runs = [peer.generate([prompt], 16, 0.0) for prompt in PROMPTS]
        results.append(other.result(scenario, PeerModel(target, None, ("tiny", None), is_random=True)))
        all_runs.append(other.runs)
    return results, all_runs


def test_results_hold_up_and_compare(target: Path) -> None:
    (plain, lookup), (runs, drafted) = measured(target, "f32", "f32:lookup")
    for result in (plain, lookup):
        assert problems(result) == []
        json.dumps(result)
    assert differences(lookup, plain) == []
    assert plain["setting"] == {"name": "transformers f32", "drafter": "none", "num_spec_tokens": None}
    assert lookup["setting"] == {"name": "transformers f32 lookup", "drafter": "other", "num_spec_tokens": 4}
    assert plain["engine"] == "transformers" and plain["output"]["num_tokens"] == [16, 16]
    assert plain["throughput_tokens_per_sec"]["values"] == [decode_tokens_per_s(run) for run in runs]
    assert plain["eagle_speculation"]["mean_acceptance_length"] == 1.0
    steps = sum(run[0].num_steps for run in drafted)
    assert lookup["eagle_speculation"]["mean_acceptance_length"] == pytest.approx(30 / steps)
    sizes = [p.numel() for p in AutoModelForCausalLM.from_pretrained(target, trust_remote_code=False).parameters()]
    assert plain["model"]["weight_bytes"] == 4 * sum(sizes)


def test_a_result_of_another_length_or_scenario_is_no_match(target: Path) -> None:
    (plain,), _ = measured(target, "f32")
    other = json.loads(json.dumps(plain))
    other["output"]["num_tokens"][0] -= 1
    assert any("num_tokens" in reason for reason in differences(other, plain))
    other = json.loads(json.dumps(plain))
    other["system"]["threads"] = 7
    assert any("threads" in reason for reason in differences(other, plain))


def test_agreement_counts_leading_tokens_or_their_text() -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(i) for i in ids)

    expected = [ord(c) for c in "banana"]
    assert num_agreed(PeerOutput(6, 1.0, 1.0, expected), expected, None) == 6
    assert num_agreed(PeerOutput(6, 1.0, 1.0, [*expected[:3], 1, 2, 3]), expected, None) == 3
    said = PeerOutput(6, 1.0, 1.0, [], text="banjo!")
    assert num_agreed(said, expected, Letters()) == 3  # type: ignore[arg-type]
    assert num_agreed(said, expected, None) is None


def row(label: str, rate: float, **fields: object) -> Standing:
    defaults = {"engine": label.split()[0], "weights": "bfloat16", "arithmetic": "bfloat16", "is_speculative": False,
                "ttft_ms": 1.0, "tau": 1.0, "agreed": 1.0, "void": ""}  # fmt: skip
    rates = [rate / 2, rate, rate, rate, rate * 1.1, rate * 9]
    return Standing(label=label, tokens_per_s=rates, **(defaults | fields))  # type: ignore[arg-type]


def test_the_verdict_takes_medians_of_settings_that_count() -> None:
    rows = [
        row("aquiline baseline", 100), row("aquiline chain-3", 210, is_speculative=True),
        row("llamacpp", 80), row("openvino", 900, void="another model"),
        row("openvino lookup", 140, is_speculative=True), row("llamacpp int8", 300, weights="int8"),
        row("aquiline baseline in int8", 330, weights="int8"), row("llamacpp int4", 500, weights="int4"),
    ]  # fmt: skip
    assert Comparison(rows, [], {}, {}).verdict == [
        "without drafting: aquiline baseline (100 [50, 900] tok/s) is 1.25x [1.25, 1.25] the fastest of 1 peer "
        "settings, llamacpp (80 [40, 720] tok/s)",
        "of all: aquiline chain-3 (210 [105, 1890] tok/s) is 1.50x [1.50, 1.50] the fastest of 2 peer settings, "
        "openvino lookup (140 [70, 1260] tok/s)",
        "on int8 weights: aquiline baseline in int8 (330 [165, 2970] tok/s) is 1.10x [1.10, 1.10] the fastest of 1 "
        "peer settings, llamacpp int8 (300 [150, 2700] tok/s)",
    ]
    both = [*rows, row("aquiline tree", 190, is_speculative=True)]
    assert "aquiline chain-3 (the fastest of 2 settings, 210" in Comparison(both, [], {}, {}).verdict[1]
    assert Comparison(rows[:1] + rows[3:4], [], {}, {}).verdict == ["no peer to compare with"]
    data = Comparison(rows, [], {"llamacpp": Checked((16, 16, 9))}, {"openai x": "no server"}).as_dict()
    assert [r["over_baseline"]["value"] for r in data["rows"]] == pytest.approx([1, 2.1, 0.8, 9, 1.4, 3, 3.3, 5])  # type: ignore[attr-defined]
    json.dumps(data)
