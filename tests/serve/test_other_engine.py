"""Our own server as the other engine of a comparison: it takes the prompts, and counts its drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.serve.serving import running
from typer.testing import CliRunner

from aquiline.cli.main import app
from aquiline.serve.server_config import ServerConfig


@pytest.mark.slow
def test_the_gate_reads_what_the_comparison_wrote(tmp_path: Path) -> None:
    with running(ServerConfig(served_model_name=("target",))) as server:
        peer = f"openai:eagle=3:{server.url}/v1#target"
        sizes = ("--prompt-tokens", "24", "--new-tokens", "16", "--repeats", "6", "--num-spec-tokens", "3")
        words = ["compare", "--target", "bundled", "--peer", peer, *sizes, "--out", str(tmp_path), "--json"]
        compared = CliRunner().invoke(app, words)
    assert compared.exit_code == 0, (compared.stderr, compared.exception)
    done = CliRunner().invoke(app, ["gate", str(tmp_path), "--over-peers", "0.01", "--peer-tau-gap", "0.5", "--json"])
    speed, tau = json.loads(done.stdout)["checks"]
    assert done.exit_code == 0 and speed["verdict"] == tau["verdict"] == "pass"
    assert tau["ours"] == "chain-3" and " against " in tau["measured"]
    done = CliRunner().invoke(app, ["gate", str(tmp_path), "--over-peers", "1000", "--json"])
    assert done.exit_code == 1 and json.loads(done.stdout)["checks"][0]["verdict"] == "fail"
