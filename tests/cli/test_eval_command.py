"""`aquiline eval` as a user types it: its files agree with what it prints, and every mistake is one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.checkpoints import write_draft, write_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from aquiline.cli.main import app
from aquiline.models.known_pairs import BUNDLED_DRAFT, BUNDLED_TARGET
from aquiline.models.load import read_model_config

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["abc", "de"], "reference": ["#### 3"]},
    {"question_id": 2, "category": "math", "turns": ["xyz"], "reference": ["#### 4"]},
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if hint %}{{ hint }}{% endif %}"
LIGHT = """
import sys
try:
    from aquiline.cli.main import app
    app()
finally:
    heavy = {"torch", "transformers", "numpy", "tokenizers"} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair with a tokenizer of letters and a chat template, and a file of questions."""
    root = tmp_path_factory.mktemp("eval")
    write_target(root / "target")
    letters = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(90)}, unk_token="!"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(root / "target")
    (root / "target" / "chat_template.jinja").write_text(TEMPLATE)
    write_draft(root / "draft", read_model_config(root / "target"))
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return root


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, args)])


def on_pair(root: Path, *args: object) -> Result:
    pair = ("--target", root / "target", "--draft", root / "draft", "--dataset", root / "questions.jsonl")
    return run(*pair, "--ignore-eos", *args)


def refused(result: Result) -> str:
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (result.output, result.exception)
    assert result.stderr.startswith("aquiline: ") and result.stderr.count("\n") == 1 and not result.stdout
    return result.stderr


def test_help_waits_for_nothing_heavy_and_has_examples() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, "eval", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "aquiline eval --num-spec-tokens 1 2 3" in done.stdout.replace("\n", " "), (
        done.stderr
    )


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_draft_that_names_wrong_tokens_is_doubted(is_broken: bool, tmp_path: Path) -> None:
    """The bundled draft, and the same with the rows of its head moved by one, which every check of files lets pass."""
    draft = Path(shutil.copytree(BUNDLED_DRAFT, tmp_path / "draft"))
    tensors = load_file(draft / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(int(is_broken), 0)
    save_file(tensors, draft / "model.safetensors")
    pair = ("--target", BUNDLED_TARGET, "--draft", draft, "--count", 2, "--lengths", 24)
    result = run(*pair, "--num-spec-tokens", 2, "--no-teacher-forced")
    assert result.exit_code == 0, result.output
    assert ("warning: the draft is at chance" in result.output) == is_broken


def test_out_of_the_box_on_the_bundled_pair(tmp_path: Path) -> None:
    result = run("--target", "bundled", "--count", 2, "--lengths", 8, 12, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "eval.json").read_text())
    assert data["schema"] == "aquiline.eval/1" and data["model"]["target"] == "bundled"
    assert data["plan"]["settings"] == {
        "baseline": {"drafter": "none"},
        "chain-3": {"drafter": "chain", "num_spec_tokens": 3},
        "tree-2x2x6": {"drafter": "dynamic", "depth": 2, "top_k": 2, "num_nodes": 6},
    }
    assert len(data["rows"]) == 2 * 2 * 3 and len(data["tables"]["by_length"]) == 2 * 3
    page = (tmp_path / "eval.md").read_text()
    for row in data["tables"]["by_length"]:
        line = f"{row['decode_tokens_per_s']:.0f}", f"{row['tau']:.2f}", f"{row['repeated_share']:.0%}"
        for text in (result.stdout, page):
            assert row["setting"] in text and all(cell in text for cell in line)
    for best in data["best"]:
        words = "none is faster" if best["speedup"]["value"] <= 1 else f"best is {best['setting']}"
        assert words in result.stdout and words in page
    assert "█" in result.stdout and "place in the chain" in result.stdout
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(f.name for f in (tmp_path / "answers").iterdir()) == sorted(
        f"{setting}-{length}-t0.jsonl" for setting in data["plan"]["settings"] for length in (8, 12)
    )


def test_chats_search_and_categories_in_json(root: Path, tmp_path: Path) -> None:
    result = on_pair(root, "--num-spec-tokens", 1, 2, 3, "--trees", "1x2x4", "static", "--lengths", 6, "--temperature",
                     0, 0.8, "--repeats", 2, "--json", "--out", tmp_path)  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    data, written = json.loads(result.stdout), json.loads((tmp_path / "eval.json").read_text())
    assert data["rows"] == written["rows"] and data["tables"] == written["tables"]
    assert list(data["plan"]["settings"]) == ["baseline", "chain-1", "chain-2", "chain-3", "tree-1x2x4", "tree-static"]
    assert data["data"]["chat_template"] is True and data["data"]["categories"] == {"writing": 1, "math": 1}
    assert data["data"]["dataset"] == "questions.jsonl" and data["model"]["draft"] == "draft", "names, not paths"
    assert len(data["rows"]) == 6 * 2 * 2 * 3
    prompts = {(row["question_id"], row["turn"]): row["num_prompt_tokens"] for row in data["rows"]}
    assert prompts[1, 0] == len("<user>abc") and prompts[2, 0] == len("<user>xyz")
    assert prompts[1, 1] > len("<user>abc<assistant><user>de"), "the answer is in it"
    assert {row["category"] for row in data["tables"]["by_category"]} == {"writing", "math"}
    assert len(data["tables"]["by_category"]) == 2 * 2 * 6 and len(data["task_accuracy"]) == 2
    assert len(data["best"]) == 3, "per temperature and length, and overall"


def test_template_options_reach_the_template(root: Path) -> None:
    plain = on_pair(root, "--lengths", 4, "--json", "--no-teacher-forced")
    hinted = on_pair(root, "--lengths", 4, "--json", "--no-teacher-forced", "--template-options", '{"hint": "hi"}')
    first, second = (json.loads(r.stdout)["rows"][0]["num_prompt_tokens"] for r in (plain, hinted))
    assert second == first + 2 and json.loads(plain.stdout)["teacher_forced"] == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--dataset", "no_such_set"], "dataset='no_such_set': is no file here, one of mt_bench"),
        (["--dataset", "hf://datasets/owner"], "dataset='hf://datasets/owner'"),
        (["--count", 9], "count=9"),
        (["--count", 0], "count=0"),
        (["--sample-seed", 1], "sample_seed=1: samples --count questions"),
        (["--lengths", 1], "lengths=1"),
        (["--lengths", 5000], "lengths=[5000]: no question fits; prompt of"),
        (["--lengths", 20, 20], "lengths=[20, 20]"),
        (["--max-context", 5000], "max_context=5000"),
        (["--temperature", -1], "temperature=-1.0"),
        (["--repeats", 0], "repeats=0"),
        (["--num-spec-tokens", 17], "num_spec_tokens=17"),
        (["--trees", "2x2"], "trees='2x2'"),
        (["--target", "somewhere"], "target='somewhere', draft=None: name the draft too"),
        (["--template-options", "{"], "template_options='{': not JSON"),
        (["--template-options", "[1]"], "template_options='[1]': must be a JSON object"),
        (["--template-options", '{"a": 1}'], "does not exist, so it cannot be given a; drop"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(options: list[object], named: str) -> None:
    assert named in refused(run("--target", "bundled", *options))


def test_a_conversation_that_does_not_fit_is_named(root: Path) -> None:
    result = on_pair(root, "--lengths", 12, "--max-context", 40)
    assert result.exit_code == 0, result.output
    assert "question 1, turn 2, 12 new tokens, temperature 0: prompt of" in result.stdout


def test_without_matplotlib_the_rest_is_written(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    result = on_pair(root, "--lengths", 4, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "eval.png was not written: plot: needs matplotlib; pip install 'aquiline[train]'" in result.stderr
    assert {f.name for f in tmp_path.iterdir()} == {"eval.json", "eval.md", "answers"}
