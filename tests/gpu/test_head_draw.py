"""Draws, runners-up and children that kernels find are the torch twin's, whatever rows stand beside a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.running import DEVICE, int32, poison, randn, zeros
from torch import Tensor

from aquiline.backends.torch import draw as twin
from aquiline.backends.torch.slot_state import RowSampling
from aquiline.ops.triton.head_draw import (
    DrawRows,
    TileBest,
    VocabularyHead,
    best_by_tile,
    best_of_logits,
    head_logits,
    pick_children,
    pick_draws,
)
from aquiline.ops.triton.linear import LinearTiles

TILES = LinearTiles(block_n=32, block_k=32)
NARROW = LinearTiles(block_n=16)
"""Tiles all of whose scores are among the best."""
H, V, NUM_SLOTS = 48, 150, 4
TEMPERATURES = torch.tensor([0.0, 0.7, 1.0, 2.5])
SEEDS = torch.tensor([[7, 0], [2**32 - 1, 2**31 + 5], [0, 2**32 - 1], [123456789, 99]])
IDS = torch.randperm(2**17, generator=torch.Generator().manual_seed(1))[:V].sort().values


def words(seeds: Tensor) -> Tensor:
    """Seeds as the device has them: each word's bits as an int32."""
    return torch.from_numpy(seeds.numpy().astype("uint32").view("int32")).to(DEVICE)


def some(num_rows: int, seed: int = 0) -> tuple[Tensor, VocabularyHead, DrawRows]:
    """Rows of every slot, a dead one among them where there are several."""
    random = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(num_rows, H, generator=random), torch.randn(V, H, generator=random) / 4
    slots = torch.arange(num_rows, dtype=torch.int32) % NUM_SLOTS
    slots[1::5] = -1
    positions = torch.randint(0, 9000, (num_rows,), generator=random, dtype=torch.int32)
    rows = DrawRows(slots.to(DEVICE), positions.to(DEVICE), TEMPERATURES.to(DEVICE), words(SEEDS))
    return x.to(DEVICE), VocabularyHead(weight.to(DEVICE)), rows


def sampling_of(rows: DrawRows, live: Tensor) -> RowSampling:
    """How the live rows draw, on the CPU, where the twin runs."""
    own = rows.slots.cpu()[live].long()
    unused: Any = None
    positions = rows.positions.cpu()[live].long() + rows.ahead
    return RowSampling(TEMPERATURES[own], unused, unused, unused, SEEDS[own], positions, filters=False)


def found(x: Tensor, head: VocabularyHead, rows: DrawRows, count: int) -> TileBest:
    best = TileBest.new(len(x), V, count, x.device, TILES)
    best_by_tile(x, head, rows, best, TILES).run()
    return best


def found_in(logits: Tensor, rows: DrawRows, count: int) -> TileBest:
    best = TileBest.new(*logits.shape, count, logits.device, TILES)
    best_of_logits(logits, rows, best, TILES).run()
    return best


def drawn(best: TileBest, rows: DrawRows, **settings: Any) -> Tensor:
    tokens = int32([-9] * len(rows.slots))
    pick_draws(best, rows.slots, tokens, **settings).run()
    return tokens.cpu()


@pytest.mark.parametrize("num_rows", [1, 16, 19])
@pytest.mark.parametrize("ids", [None, IDS], ids=["target", "draft"])
def test_draws_are_the_twins(num_rows: int, ids: Tensor | None) -> None:
    x, head, rows = some(num_rows)
    head, live = VocabularyHead(head.weight, None if ids is None else ids.int().to(DEVICE)), rows.slots.cpu() >= 0
    tokens = drawn(found(x, head, rows, 1), rows)
    logits, own = (x @ head.weight.T).cpu(), torch.arange(V) if ids is None else ids
    assert torch.equal(tokens[live].long(), twin.draw(logits[live], sampling_of(rows, live), own))
    assert set(tokens[~live].tolist()) <= {-1}


def test_noise_is_the_twins_up_to_rounding() -> None:
    rows = DrawRows(int32([0, 1, 2, 3]), int32([0, 5, 2**31 - 3, 77]), torch.ones(4, device=DEVICE), words(SEEDS))
    best, every = TileBest.new(4, 512, 16, rows.seed.device, NARROW), zeros(4, 512)
    best_of_logits(every, rows, best, NARROW).run()
    every.scatter_(1, best.ids.flatten(1).long(), best.scores.flatten(1))
    unused: Any = None
    own = RowSampling(torch.ones(4), unused, unused, unused, SEEDS, rows.positions.cpu().long() + 1, filters=False)
    expected = twin.gumbel(own, torch.arange(512))
    assert (every.cpu() - expected).abs().max() < 2e-6
    assert expected.max() > 6 and expected.min() < -1.7


def test_a_row_alone_has_the_bits_of_a_row_among_others() -> None:
    x, head, rows = some(19)
    best = found(x, head, rows, 2)
    for row in (0, 7, 17):
        alone = DrawRows(rows.slots[row : row + 1], rows.positions[row : row + 1], rows.temperature, rows.seed)
        own = found(x[row : row + 1], head, alone, 2)
        assert torch.equal(own.scores[0], best.scores[row]) and torch.equal(own.ids[0], best.ids[row])


def test_logits_on_the_way_change_no_bit() -> None:
    x, head, rows = some(6)
    logits = poison(6, V)
    head_logits(x, head, rows.slots, logits, TILES).run()
    live = rows.slots >= 0
    torch.testing.assert_close(logits[live], (x[live].double() @ head.weight.double().T).float(), atol=1e-5, rtol=0)
    assert logits[~live].isnan().all(), "a dead row is not written"
    fused, read = found(x, head, rows, 3), found_in(logits, rows, 3)
    for ours, theirs in zip(vars(fused).values(), vars(read).values(), strict=True):
        assert torch.equal(ours[live], theirs[live])


def greedy(num_rows: int) -> DrawRows:
    slots = int32([0] * num_rows)
    return DrawRows(slots, slots, TEMPERATURES.to(DEVICE), words(SEEDS))


def test_ties_go_to_the_lowest_id_within_and_across_tiles() -> None:
    logits = zeros(2, V)
    logits[0, [40, 37, 100]] = 5.0
    logits[1, [99, 33, 140, 64]] = 5.0
    rows = greedy(2)
    assert drawn(found_in(logits, rows, 1), rows).tolist() == [37, 33]
    best, tokens, logprobs = found_in(logits, rows, 5), zeros(2, 5, dtype=torch.int32), zeros(2, 5)
    pick_children(best, rows.slots, tokens, logprobs).run()
    assert tokens.tolist() == [[37, 40, 100, 0, 1], [33, 64, 99, 140, 0]]


@pytest.mark.parametrize("otherwise", [-1, 17])
def test_logits_that_are_no_numbers_draw_no_token(otherwise: int) -> None:
    logits = randn(4, V, seed=2)
    logits[0, 77] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3:] = -torch.inf
    logits[3, 5] = torch.inf
    rows = greedy(4)
    tokens = drawn(found_in(logits, rows, 1), rows, otherwise=otherwise)
    assert tokens.tolist() == [otherwise, otherwise, int(logits[2].argmax()), 5]


def test_runners_up_and_margins_are_the_twins() -> None:
    x, head, rows = some(19)
    live, tokens, margins = rows.slots.cpu() >= 0, zeros(19, 2, dtype=torch.int32), zeros(19)
    pick_draws(found(x, head, rows, 2), rows.slots, tokens, margins=margins).run()
    logits, sampling = (x @ head.weight.T).cpu()[live], sampling_of(rows, live)
    best, second, _ = twin.guess(logits, sampling, torch.arange(V))
    assert torch.equal(tokens.cpu()[live].long(), torch.stack((best, second), 1))
    ranked = twin.scores(logits, sampling, torch.arange(V), filters=False).sort(descending=True).values
    torch.testing.assert_close(margins.cpu()[live], ranked[:, 0] - ranked[:, 1], atol=1e-5, rtol=0)

    only = zeros(2, V) - torch.inf
    only[0, 9], only[1, 9] = 1.0, torch.nan
    pick_draws(found_in(only, greedy(2), 2), greedy(2).slots, tokens[:2], margins=margins[:2]).run()
    assert tokens[:2].tolist() == [[9, -1], [-1, -1]] and margins[:2].tolist() == [torch.inf, 0.0]


@pytest.mark.parametrize("count", [1, 3, 16])
def test_children_and_their_log_probabilities_are_the_twins(count: int) -> None:
    x, head, rows = some(18)
    head, live = VocabularyHead(head.weight, IDS.int().to(DEVICE)), rows.slots.cpu() >= 0
    tokens, wide = zeros(6, 3 * count + 2, dtype=torch.int32), zeros(6, 3 * count + 2)
    above = -torch.arange(18.0)
    best = found(x, head, rows, count)
    pick_children(best, rows.slots, tokens[:, 2:], wide[:, 2:], above=above.to(DEVICE)).run()
    tokens, wide = tokens.cpu(), wide.cpu()
    ids, logprobs = twin.children((x @ head.weight.T).cpu()[live], sampling_of(rows, live), IDS, count)
    assert torch.equal(tokens[:, 2:].reshape(18, count)[live].long(), ids)
    expected = above[live, None] + logprobs.clamp(max=0)
    torch.testing.assert_close(wide[:, 2:].reshape(18, count)[live], expected, atol=2e-5, rtol=1e-6)
    assert not tokens[:, :2].any() and not wide[:, :2].any(), "only the given columns are written"


def test_children_of_logits_that_are_no_numbers_are_different_tokens_that_nothing_prefers() -> None:
    logits = poison(2, V)
    logits[1, :] = -torch.inf
    rows, tokens, logprobs = greedy(2), zeros(2, 4, dtype=torch.int32), zeros(2, 4)
    pick_children(found_in(logits, rows, 4), rows.slots, tokens, logprobs).run()
    assert tokens.tolist() == [[0, 1, 2, 3]] * 2 and (logprobs == -torch.inf).all()


def test_buffers_that_do_not_fit_are_refused_by_name() -> None:
    x, head, rows = some(3)
    best = TileBest.new(3, V, 1, x.device, TILES)
    with pytest.raises(ValueError, match=r"count=17: .*draft_top_k"):
        TileBest.new(3, V, 17, x.device)
    with pytest.raises(ValueError, match=r"best\.scores has the shape \(3, 5, 1\); make it \(3, 2, 1\)"):
        best_by_tile(x, head, rows, best)
    with pytest.raises(ValueError, match=r"the head's ids is torch\.int64; convert it to int32"):
        best_by_tile(x, VocabularyHead(head.weight, IDS.to(DEVICE)), rows, best, TILES)
    with pytest.raises(ValueError, match="count 1 and margins is tensor"):
        pick_draws(best, rows.slots, int32([0] * 3), margins=zeros(3))
    with pytest.raises(ValueError, match=r"tokens has the shape \(3, 2\); 3 rows have 3 children"):
        pick_children(best, rows.slots, zeros(3, 2, dtype=torch.int32), zeros(3, 2))
