"""Mixtures whose experts stay in MXFP4 compute what the torch twin computes with the unpacked weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import TINY, init_random
from tests.gpu.running import DEVICE, int32, poison, randn, zeros
from torch import Tensor

from aquiline.backends.torch import reference
from aquiline.backends.torch.decoder import DecoderLayer
from aquiline.blocks import MXFP4, in_memory
from aquiline.models.model_config import Experts
from aquiline.ops.triton.experts import ExpertBlocks, ExpertRoutes, expert_down, expert_gate_up, route, sum_experts

E, H, INNER = 5, 64, 96


def random_blocks(count: int, rows: int, inputs: int, seed: int, scales: tuple[int, int] = (118, 124)) -> Tensor:
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, rows, inputs // 32, 17), dtype=np.uint8)
    blocks[..., 0] = random.integers(*scales, blocks.shape[:-1])
    return torch.from_numpy(blocks.reshape(count, rows, -1)).to(DEVICE)


def floats(blocks: Tensor) -> Tensor:
    """What blocks [E, N, 17 K / 32] stand for, as gguf-py computes it; [E * N, K]."""
    return torch.from_numpy(in_memory(blocks.flatten(0, 1).cpu().numpy(), MXFP4).dequantised()).to(DEVICE)


@dataclass(frozen=True, eq=False)
class Mixture:
    """A layer of the twin, and its experts packed."""

    layer: DecoderLayer
    config: Experts
    gate_up: ExpertBlocks
    down: ExpertBlocks

    @classmethod
    def new(cls, config: Experts, **model: Any) -> Mixture:
        shape = dataclasses.replace(TINY, intermediate_size=INNER, experts=config, **model)
        layer, up, down = DecoderLayer(shape, 0), random_blocks(E, 2 * INNER, H, 1), random_blocks(E, H, INNER, 2)
        init_random(layer, 3)
        layer.to(DEVICE)
        layer.gate_up.data, layer.down.data = floats(up), floats(down)
        biases = (None if bias is None else bias.data for bias in (layer.gate_up_bias, layer.down_bias))
        packed = (ExpertBlocks.of(blocks, bias) for blocks, bias in zip((up, down), biases, strict=True))
        return cls(layer, config, *packed)

    def logits(self, x: Tensor) -> Tensor:
        assert self.layer.router is not None
        return reference.linear(x, self.layer.router, self.layer.router_bias)

    def run(self, x: Tensor, slots: Tensor, logits: Tensor | None = None) -> tuple[Tensor, ExpertRoutes]:
        R, P, c = len(x), self.config.per_token, self.layer.config
        routes = ExpertRoutes.new(R, E, P, x.device)
        inner, outputs, out = poison(R * P, INNER), poison(R * P, H), poison(R, H)
        how: dict[str, Any] = {"kind": c.activation, "limit": c.activation_limit}
        for launch in (
            *route("ROUTE", self.logits(x) if logits is None else logits, slots, routes, over_all=self.config.over_all),
            expert_gate_up("UP", x, self.gate_up, routes, inner, **how),
            expert_down("DOWN", inner, self.down, routes, outputs),
            sum_experts("SUM", outputs, routes, slots, out),
        ):
            launch.run()
        return out, routes


def rows_of(count: int) -> tuple[Tensor, Tensor]:
    slots = zeros(count, dtype=torch.int32)
    slots[2::7] = -1
    return randn(count, H, seed=count), slots


MIXTURES: dict[str, tuple[Experts, dict[str, Any]]] = {
    "gpt_oss": (Experts(E, 4, has_bias=True), {"activation": "clamped", "activation_limit": 1.5}),
    "over all": (Experts(E, 2, over_all=True), {}),
    "one": (Experts(E, 1), {"activation": "geglu"}),
}


@pytest.mark.parametrize(("config", "model"), MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("num_rows", [1, 19])
@torch.inference_mode()
def test_a_mixture_is_the_twins(config: Experts, model: dict[str, Any], num_rows: int) -> None:
    mixture, (x, slots) = Mixture.new(config, **model), rows_of(num_rows)
    live = slots >= 0
    out, routes = mixture.run(x, slots)
    ids, weights = reference.route(mixture.logits(x), config.per_token, config.over_all)
    assert torch.equal(routes.experts[live].long(), ids[live]) and set(routes.experts[~live].flatten().tolist()) <= {-1}
    torch.testing.assert_close(routes.weights[live], weights[live])
    torch.testing.assert_close(out[live], mixture.layer.mixture(x, config)[live], atol=2e-5, rtol=2e-5)
    assert out[~live].isnan().all(), "a dead row is not written"


@torch.inference_mode()
def test_a_row_alone_has_the_bits_of_a_row_among_others() -> None:
    mixture, (x, slots) = Mixture.new(Experts(E, 4, has_bias=True)), rows_of(19)
    logits = mixture.logits(x)  # a product of torch's depends on the number of rows
    out, _ = mixture.run(x, slots, logits)
    for row in (0, 18):
        alone, _ = mixture.run(*(rows[row : row + 1] for rows in (x, slots, logits)))
        assert torch.equal(alone[0], out[row])


def test_pairs_of_one_expert_are_one_group_and_ties_go_to_the_lowest_expert() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [9.0, 9.0, 9.0, 9.0], [3.0, 0.0, 0.0, 4.0]], device=DEVICE)
    routes = ExpertRoutes.new(3, 4, 2, logits.device)
    for launch in route("ROUTE", logits, int32([5, -1, 0]), routes, over_all=False):
        launch.run()
    assert routes.experts.tolist() == [[1, 2], [-1, -1], [3, 0]]
    assert routes.group_experts.tolist() == [1, 2, 3, 0] and routes.counts.tolist() == [1, 1, 1, 1]
    assert routes.pairs[:, 0].tolist() == [0, 1, 4, 5]

    for launch in route("ROUTE", logits, int32([0] * 3), routes, over_all=False):
        launch.run()
    assert routes.experts.tolist() == [[1, 2], [0, 1], [3, 0]]
    groups = zip(routes.group_experts.tolist(), routes.counts.tolist(), routes.pairs.tolist(), strict=True)
    assert {expert: own[:count] for expert, count, own in groups} == {1: [0, 3], 2: [1], 0: [2, 5], 3: [4]}


def test_a_router_that_finds_no_number_makes_the_row_none() -> None:
    mixture, (x, slots) = Mixture.new(Experts(E, 2)), rows_of(2)
    x[1, 5] = torch.nan
    out, routes = mixture.run(x, slots)
    assert out[1].isnan().all() and not out[0].isnan().any() and (routes.experts[1] < E).all()


@pytest.mark.parametrize("scales", [(0, 4), (120, 130), (250, 253)], ids=["smallest", "usual", "largest"])
def test_every_code_and_scale_is_unpacked_to_its_value(scales: tuple[int, int]) -> None:
    blocks = random_blocks(1, 32, 64, 9, scales)
    blocks.view(1, 32, 2, 17)[0, :16, :, 1] = (
        torch.arange(16, dtype=torch.uint8, device=DEVICE)[:, None] * 17
    )  # every code, both halves
    routes, one_hot, found = ExpertRoutes.new(64, 1, 1, blocks.device), torch.eye(64, device=DEVICE), zeros(64, 32)
    for launch in route("ROUTE", zeros(64, 1), int32([0] * 64), routes, over_all=False):
        launch.run()
    expert_down("DOWN", one_hot, ExpertBlocks.of(blocks), routes, found).run()
    assert torch.equal(found.T, floats(blocks))


def test_mixtures_that_do_not_fit_are_refused_by_name() -> None:
    mixture, (x, slots) = Mixture.new(Experts(E, 2)), rows_of(3)
    routes = ExpertRoutes.new(3, E, 2, x.device)
    with pytest.raises(ValueError, match="129 rows with 4 experts each; give at most 128 rows"):
        ExpertRoutes.new(129, E, 4, x.device)
    with pytest.raises(ValueError, match="routes have 2 experts a row in 5 groups"):
        route("ROUTE", zeros(3, 7), slots, routes, over_all=False)
    with pytest.raises(ValueError, match=r"UP's experts have the shape \(5, 64, 96\); out has 96 outputs"):
        expert_gate_up("UP", x, mixture.down, routes, zeros(6, INNER), kind="swiglu")
    with pytest.raises(ValueError, match="kind='relu' is no activation"):
        expert_gate_up("UP", x, mixture.gate_up, routes, zeros(6, INNER), kind="relu")
