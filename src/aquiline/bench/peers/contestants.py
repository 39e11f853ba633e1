"""The contestants: aquiline at one setting, a peer at one setting. Both have the same methods."""

from __future__ import annotations

from aquiline.bench.peers.base import Peer, PeerOutput, PeerRun, PeerSpec
from aquiline.bench.peers.results import PeerModel, result_of
from aquiline.bench.results.result import ModelFacts, Result, Scenario, describe
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.llm import Result as OwnRun
from aquiline.spec.drafting import Drafting


class Own:
    """aquiline at one setting."""

    def __init__(self, name: str, llm: LLM, spec: Drafting) -> None:
        self.name, self.label, self.llm, self.spec = name, f"aquiline {name}", llm, spec
        self.runs: list[OwnRun] = []

    @property
    def texts(self) -> list[PeerOutput]:
        """The outputs of all runs, in a peer's form."""
        outputs = [output for run in self.runs for output in run.outputs]
        return [PeerOutput(len(o.token_ids), o.token_ids, [o.ttft_ms, o.total_ms]) for o in outputs]

    @property
    def is_plain(self) -> bool:
        """Whether the setting decodes without drafts."""
        return not self.spec.is_speculative

    def run(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> None:
        """One measured run."""
        self.runs.append(self.llm.run(prompts, sampling, spec=self.spec))

    def result(self, scenario: Scenario, model: PeerModel) -> Result:
        """Of the measured runs."""
        system = self.llm.models.system()
        facts = ModelFacts(
            target=model.target, draft=model.draft if self.spec.is_speculative else None, dtype=str(system["dtype"]),
            arithmetic=str(system["arithmetic"]), random_weights=model.is_random, simulated_tau=None,
            weight_bytes=self.llm.models.weight_bytes,
        )  # fmt: skip
        return describe(scenario, self.name, self.spec, facts, self.llm, self.runs)


class Other:
    """A peer at one setting."""

    def __init__(self, spec: PeerSpec, peer: Peer) -> None:
        self.label, self.spec, self.peer = spec.label, spec, peer
        self.runs: list[PeerRun] = []

    @property
    def texts(self) -> list[PeerOutput]:
        """The outputs of all runs."""
        return [output for run in self.runs for output in run.outputs]

    def run(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> None:
        """One measured run."""
        self.runs.append(self.peer.generate(prompts, sampling[0].max_tokens, sampling[0].temperature))

    def result(self, scenario: Scenario, model: PeerModel) -> Result:
        """Of the measured runs."""
        return result_of(scenario, self.spec, self.peer, model, self.runs)
