"""`aquiline limits --ranks`: what is counted is what ranks send each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from tests.backends.linked import on_ranks
from tests.bench.published import GPT_OSS_120B, LLAMA_8B, write_config
from tests.checkpoints import write_target
from typer.testing import CliRunner

from aquiline.backends.base import Admit, Chunk, Decode, Pages, Sizes, StepInput
from aquiline.backends.torch.ranks import LinkedRanks
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.bench.theory.links import LINKS, meeting
from aquiline.cli.main import app
from aquiline.config import ParallelMode, SamplingParams
from aquiline.models.counting import read_shape
from aquiline.models.load import read_target
from aquiline.models.shape import MoE
from aquiline.models.shares import Share
from aquiline.spec.drafting import NoDraft

GIVEN = ("--bandwidth", "3000", "--flops", "800", "--context", "512")


@pytest.mark.parametrize("mode", get_args(ParallelMode))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_counted_is_what_a_step_sends(tmp_path: Path, num_ranks: int, mode: ParallelMode) -> None:
    """One row, then a prompt of eleven of which one draws."""
    write_target(tmp_path, num_attention_heads=6, num_key_value_heads=6, intermediate_size=112, hidden_size=72)
    weights = read_target(tmp_path, dtype="float32")

    def work(ranks: LinkedRanks) -> list[tuple[int, float]]:
        backend = TorchPair(weights, None, "float32", ranks=ranks).open(Sizes(1, 4, 16, 4, 16))
        admit = Admit(0, list(range(3, 15)), 12, SamplingParams(max_tokens=9, temperature=0.7, seed=1))
        first = StepInput(chunks=(Chunk(0, 0, 11, True, False),), admits=(admit,), pages=(Pages(0, 0, (0, 1, 2, 3)),))
        found = []
        for step in (first, StepInput((Decode(0, NoDraft()),))):
            before = ranks.num_collectives, ranks.num_bytes
            backend.step(step).read()
            found.append((ranks.num_collectives - before[0], ranks.num_bytes - before[1]))
        return found

    body = read_shape(tmp_path).body
    one, eleven = (meeting(body, Share(0, num_ranks, mode), rows) for rows in (1, 11))
    for prompt, row in on_ranks(num_ranks, work, mode=mode):
        assert row == (one.collectives, one.num_bytes)
        assert prompt == (eleven.collectives - 1, eleven.num_bytes - 11 * 32), "no row of this prompt draws"


def test_experts_are_gathered_one_by_one(tmp_path: Path) -> None:
    body = read_shape(write_config(tmp_path / "moe", GPT_OSS_120B)).body
    mlp = body.layers[0].mlp
    assert isinstance(mlp, MoE)
    met = meeting(body, Share(0, 4), 1)
    assert met.collectives == pytest.approx(2 + len(body.layers) * (3 + mlp.experts_per_token))
    assert meeting(body, Share(0, 4, "reduce"), 1).collectives == 2 + 2 * len(body.layers), "parts of all in one sum"


def test_the_command_prints_links_and_refuses_no_ranks(tmp_path: Path) -> None:
    llama = write_config(tmp_path / "llama", LLAMA_8B)
    shown = CliRunner().invoke(app, ["limits", str(llama), *GIVEN, "--ranks", "4"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0 and "4 ranks, one forward" in shown.stdout and "ms, NVLink" in shown.stdout
    found = json.loads(CliRunner().invoke(app, ["limits", str(llama), *GIVEN, "--ranks", "4", "--json"]).stdout)
    one, summed = (next(met for met in found["links"] if met["parallel_mode"] == mode) for mode in ("gather", "reduce"))
    assert summed["collectives"] == 2 + 2 * 32 and summed["sent_bytes"] == 32 * 4096 * 4 + 4096 * 4 + 32
    width = 4096 + 4096 + 14336 + 4096
    assert one["rows"] == 1 and one["collectives"] == 2 + 4 * 32
    assert one["sent_bytes"] == 32 * width + 4096 * 4 + 32, "a quarter of the widths of 32 layers, 4 bytes each"
    assert one["ms"]["NVLink"] == pytest.approx(130 * 8e-3 + 3 * one["sent_bytes"] / 450e6)
    assert set(one["ms"]) == {link.name for link in LINKS}
    assert json.loads(CliRunner().invoke(app, ["limits", str(llama), *GIVEN, "--json"]).stdout)["links"] == []
    assert (
        "ranks=0: must be at least 1" in CliRunner().invoke(app, ["limits", str(llama), *GIVEN, "--ranks", "0"]).output
    )
