from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from aquiline.models.draft_vocabulary import choose_vocabulary
from aquiline.train.batches import Batches, RowPiece, cut, gather, pack
from aquiline.train.documents import Rejects, RowReader
from aquiline.train.readers import is_held_out, load_split, read_documents


def ids(**changes: object) -> RowReader:
    tokenizer = Tokenizer(WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    fields = {"vocab_size": 48, "boundary": 0, "bos": 0, "tokenizer": tokenizer, "special": (0,)}
    return RowReader(**{**fields, **changes})  # type: ignore[arg-type]


def read(path: Path, rejects: Rejects | None = None, **changes: object) -> list[list[int]]:
    documents = read_documents([path], ids(**changes), rejects or Rejects())
    return [d.tokens.tolist() for d in documents]


def test_text_gets_the_bos_the_tokenizer_does_not_add(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("a b c")
    (tmp_path / "y.md").write_text("c c")
    (tmp_path / "z.rs").write_text("b b b")
    assert read(tmp_path) == [[0, 1, 2, 3], [0, 3, 3]]
    assert read(tmp_path / "x.py", bos=None) == [[1, 2, 3]]


def test_bin_documents_split_at_the_boundary(tmp_path: Path) -> None:
    np.array([7, 8, 9, 0, 1, 2, 0, 3, 4], np.uint16).tofile(tmp_path / "d.bin")
    assert read(tmp_path / "d.bin") == [[7, 8, 9], [0, 1, 2], [0, 3, 4]]
    with pytest.raises(ValueError, match="neither"):
        read(tmp_path / "d.bin", boundary=None)
    with pytest.raises(ValueError, match="uint16"):
        read(tmp_path / "d.bin", vocab_size=100_000)


def test_bad_rows_are_counted_and_the_good_ones_kept(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [0, 1, 2, 3]}, {"input_ids": [0, 1, 2], "loss_mask": [0, 0, 1]}, {"text": "a b"},
        {"input_ids": [0, 1, 99]}, {"input_ids": [0, 1, 2], "loss_mask": [1]}, {"input_ids": "x"}, [1],
        {"input_ids": [0, 1, 2], "loss_mask": [1, 1, 0]}, {"input_ids": [5]}, {"input_ids": [True, False, True]},
    ]  # fmt: skip
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n{broken\n\n")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00\x99")
    rejects = Rejects()
    assert read(tmp_path, rejects) == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert sum(rejects.counts.values()) == 9
    assert rejects.counts["not JSON"] == 1 and rejects.examples["not JSON"] == "d.jsonl:10"
    assert rejects.counts["no token counted by its loss mask"] == 1
    assert any("unreadable" in r for r in rejects.counts)


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("{broken\n")
    with pytest.raises(ValueError, match=r"no training document left.*not JSON"):
        load_split([path], [], ids())
    with pytest.raises(ValueError, match="does not exist"):
        load_split([tmp_path / "nowhere"], [], ids())
    with pytest.raises(ValueError, match="suffix"):
        read(path.rename(tmp_path / "d.csv"))


def test_the_split_follows_the_key_and_held_out_paths_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": [0, 1 + i % 40, 2]}) for i in range(200)))
    split = load_split([path], [], ids())
    held = sum(is_held_out(f"d.jsonl:{i}") for i in range(200))
    assert 0 < held == split.held_out.num_documents and split.train.num_documents == 200 - held
    (tmp_path / "h.txt").write_text("a b c")
    split = load_split([path], [tmp_path / "h.txt"], ids())
    assert split.train.num_documents == 200 and split.held_out.num_documents == 1


def test_rows_hold_every_piece_once_and_documents_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 90, 60)
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": [0] + [1 + i % 47] * int(n)}) for i, n in enumerate(lengths)))
    corpus = load_split([path], [path], ids()).train
    pieces = cut(corpus, 32, 8)
    rows = pack(pieces, 32)
    assert sorted(p.start for row in rows for p in row) == sorted(p.start for p in pieces)
    assert all(sum(p.length for p in row) <= 32 for row in rows)
    assert sum(p.length for p in pieces) > 0.9 * sum(n for n in np.diff(corpus.starts) if n >= 8)
    batch = gather(corpus, Batches(corpus, 32, 4, 5, seed=1).at(0), 32, "cpu")
    for b in range(4):
        for t in range(32):
            d = int(batch.document[b, t])
            starts = t == 0 or int(batch.document[b, t - 1]) != d
            expected = 0 if starts else int(batch.positions[b, t - 1]) + 1
            assert d == -1 or int(batch.positions[b, t]) == expected
            assert d >= 0 or not batch.mask[b, t]


@pytest.mark.parametrize(("counted", "starts"), [((3, 11), [0]), ((3, 12), [0, 10]), ((1, 19), [10]), ((2, 9), [0])])
def test_a_piece_is_kept_for_tokens_that_a_row_predicts(
    tmp_path: Path, counted: tuple[int, ...], starts: list[int]
) -> None:
    """Of 20 tokens in two pieces two count; no row predicts the first two of a piece."""
    row = {"input_ids": [0] + [1] * 19, "loss_mask": [int(place in counted) for place in range(20)]}
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    corpus = load_split([tmp_path / "d.jsonl"], [tmp_path / "d.jsonl"], ids()).train
    assert [piece.start for piece in cut(corpus, 10, 5)] == starts


def test_pieces_are_packed_where_they_fit_best() -> None:
    """A piece of 3 that took the gap of 4 would leave no two gaps of 2."""
    pieces = [RowPiece(start, length) for start, length in enumerate((2, 6, 3, 7, 2))]
    assert [[p.length for p in row] for row in pack(pieces, 10)] == [[7, 3], [6, 2, 2]]


def test_batches_depend_on_the_step_alone(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": [0] + [1 + i % 47] * 40}) for i in range(9)))
    corpus = load_split([path], [path], ids()).train
    first, again = (Batches(corpus, 16, 4, 3, seed=5) for _ in range(2))
    late = again.at(11)
    for step in range(12):
        rows = first.at(step)
    assert rows == late and again.at(2) == Batches(corpus, 16, 4, 3, seed=5).at(2)
    epoch = first.steps_in_first_epoch
    assert first.at(epoch) != first.at(0), "another epoch, another order"


def test_vocabulary_is_special_then_frequent_ascending() -> None:
    counts = np.array([0, 5, 1, 9, 0, 5, 0], np.int64)
    vocabulary = choose_vocabulary(counts, special=(0, 6), size=5)
    assert vocabulary.ids.tolist() == [0, 1, 3, 5, 6] and vocabulary.coverage == pytest.approx(19 / 20)
    assert choose_vocabulary(counts, (0, 6), None).ids.tolist() == list(range(7))
    tied = choose_vocabulary(np.array([5, 5, 5, 5, 0, 5], np.int64), special=(4,), size=3)
    assert tied.ids.tolist() == [0, 1, 4], "of equals the lowest"
    for size in (2, 8):
        with pytest.raises(ValueError, match="draft_vocab_size"):
            choose_vocabulary(counts, (0, 6), size)
