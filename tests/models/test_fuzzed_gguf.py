"""Damaged GGUF files: whatever one says of sizes, offsets, counts and types, it loads or is refused as a checkpoint."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aquiline.backends.torch.decoder import load_target
from aquiline.errors import CheckpointError
from aquiline.models.gguf.reader import read_gguf
from aquiline.models.load import check_fits, open_tensors, read_model_config, read_target
from aquiline.text.gguf_tokenizer import chat_template, special_tokens
from aquiline.text.tokenizer import load_tokenizer
from checkpoints import write_mxfp4, write_target
from gguf_files import chatml, trained, write_gguf_target

HUGE = (0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
"""Numbers that overflow something."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file of packed blocks with a tokenizer."""
    folder = tmp_path_factory.mktemp("sound")
    vocabulary = trained()
    write_target(
        folder, num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=vocabulary.get_vocab_size()
    )
    write_gguf_target(folder / "m.gguf", folder, kind=lambda name: "Q4_1", vocabulary=chatml())
    return (folder / "m.gguf").read_bytes()


@pytest.fixture(scope="module")
def header(sound: bytes, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes before the tensors' contents."""
    file = tmp_path_factory.mktemp("header") / "m.gguf"
    file.write_bytes(sound)
    return min(info.start for info in read_gguf(file).tensors.values())


def assert_loads_or_is_refused(data: bytes, file: Path) -> None:
    file.write_bytes(data)
    for use in (
        read_model_config,
        load_tokenizer,
        lambda path: load_target(path, dtype="packed"),
        lambda path: load_target(path, dtype="bfloat16"),
        lambda path: check_fits({open_tensors(path): "float32"}),
    ):
        run: Callable[[Path], object] = use
        try:
            run(file)
        except CheckpointError as error:
            assert str(file) in str(error)


def fuzz(max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    shared = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=shared)


@fuzz(80)
@given(data=st.data())
def test_any_bytes_of_the_header(data: st.DataObject, sound: bytes, header: int, tmp_path: Path) -> None:
    changed = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, header - 1))
        changed[at] = data.draw(st.integers(0, 255))
    assert_loads_or_is_refused(bytes(changed), tmp_path / "m.gguf")


@fuzz(80)
@given(data=st.data())
def test_any_number_of_the_header(data: st.DataObject, sound: bytes, header: int, tmp_path: Path) -> None:
    """A count, length, dimension, offset or type becomes a number that overflows something."""
    changed = bytearray(sound)
    at = data.draw(st.integers(8, header - 9))
    form, top = data.draw(st.sampled_from((("<I", 2**32), ("<Q", 2**64))))
    struct.pack_into(form, changed, at, data.draw(st.sampled_from(HUGE)) % top)
    assert_loads_or_is_refused(bytes(changed), tmp_path / "m.gguf")


@fuzz(30)
@given(share=st.floats(0, 1))
def test_any_truncation(share: float, sound: bytes, tmp_path: Path) -> None:
    assert_loads_or_is_refused(sound[: int(share * len(sound))], tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file of experts in MXFP4."""
    folder = tmp_path_factory.mktemp("experts")
    write_mxfp4(folder, num_hidden_layers=1)
    write_gguf_target(folder / "m.gguf", folder)
    return (folder / "m.gguf").read_bytes()


@fuzz(80)
@given(data=st.data())
def test_any_number_of_the_header_with_experts(data: st.DataObject, experts: bytes, tmp_path: Path) -> None:
    changed, file = bytearray(experts), tmp_path / "m.gguf"
    form, top = data.draw(st.sampled_from((("<I", 2**32), ("<Q", 2**64))))
    at = data.draw(st.integers(8, experts.index(b"token_embd") + 60))  # the list of tensors ends there
    struct.pack_into(form, changed, at, data.draw(st.sampled_from(HUGE)) % top)
    file.write_bytes(changed)
    for use in (
        lambda: read_target(file, dtype="packed"),
        lambda: read_target(file),
        lambda: check_fits({open_tensors(file): "int8"}),
    ):
        try:
            use()
        except CheckpointError as error:
            assert str(file) in str(error)


def infos(sound: bytes, name: str) -> int:
    """Where a tensor's dimensions begin: behind its name and their count."""
    return sound.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + 4


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("field", ["rows", "width", "type", "offset"])
def test_any_number_of_a_tensor(field: str, number: int, sound: bytes, tmp_path: Path) -> None:
    changed = bytearray(sound)
    at = infos(sound, "blk.1.ffn_down.weight") + {"width": 0, "rows": 8, "type": 16, "offset": 20}[field]
    form = "<I" if field == "type" else "<Q"
    struct.pack_into(form, changed, at, number % (2**32 if field == "type" else 2**64))
    assert_loads_or_is_refused(bytes(changed), tmp_path / "m.gguf")


def test_tensors_that_overlap_are_refused(sound: bytes, tmp_path: Path) -> None:
    changed, file = bytearray(sound), tmp_path / "m.gguf"
    down, up = infos(sound, "blk.1.ffn_down.weight"), infos(sound, "blk.1.ffn_up.weight")
    changed[down + 20 : down + 28] = changed[up + 20 : up + 28]
    file.write_bytes(changed)
    with pytest.raises(
        CheckpointError, match=r"tensors blk\.1\.ffn_(down|up)\.weight and blk\.1\.ffn_(down|up)\.weight overl"
    ):
        load_target(file)


def test_an_offset_between_two_alignments_is_refused(sound: bytes, tmp_path: Path) -> None:
    changed, file = bytearray(sound), tmp_path / "m.gguf"
    at = infos(sound, "blk.1.ffn_down.weight") + 20
    struct.pack_into("<Q", changed, at, struct.unpack_from("<Q", changed, at)[0] + 1)
    file.write_bytes(changed)
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_down\.weight begins at \d+, no multiple of 32"):
        load_target(file)


def test_lists_in_lists_without_an_end_are_refused(sound: bytes, tmp_path: Path) -> None:
    """A list of one list of one list ...: each level takes twelve bytes."""
    file = tmp_path / "m.gguf"
    field = struct.pack("<Q", 1) + b"x" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20_000
    file.write_bytes(sound[:24] + field + sound[24:])
    with pytest.raises(CheckpointError, match="lists in lists"):
        read_model_config(file)


OTHER_KINDS = {
    "a list": struct.pack("<IIQII", 9, 4, 2, 32, 1),
    "an empty list": struct.pack("<IIQ", 9, 4, 0),
    "lists in a list": struct.pack("<IIQIQI", 9, 9, 1, 4, 1, 9),
    "texts": struct.pack("<IIQQ1s", 9, 8, 1, 1, b"x"),
    "a text": struct.pack("<IQ2s", 8, 2, b"32"),
    "true": struct.pack("<I?", 7, True),
    "not a number": struct.pack("<If", 6, math.nan),
    "infinity": struct.pack("<Id", 12, math.inf),
    "below 0": struct.pack("<Iq", 11, -1),
    "huge": struct.pack("<IQ", 10, 2**64 - 1),
}
"""Values of metadata: the number of the type, and bytes."""
MAY_HAVE = (
    "general.alignment", "split.count", "llama.expert_count", "llama.rope.scaling.factor", "llama.rope.scaling.type",
    "llama.rope.scale_linear", "llama.rope.scaling.attn_factor", "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.padding_token_id", "tokenizer.ggml.scores",
)  # fmt: skip
"""Fields that are read and that the file does not have."""


def with_field(sound: bytes, name: str, value: bytes) -> bytes:
    """The file with another value of a field; the one that it has is called otherwise. The header grows by a multiple
    of the alignment, so that tensors stay where they are read."""
    own, none = struct.pack("<Q", len(name)) + name.encode(), struct.pack("<Q", len(name)) + b"_" * len(name)
    count, grown = struct.unpack_from("<Q", sound, 16)[0], len(own) + len(value) + 8 + 3 + 4 + 8
    filler = struct.pack("<Q3sIQ", 3, b"pad", 8, -grown % 32) + b"x" * (-grown % 32)
    return sound[:16] + struct.pack("<Q", count + 2) + own + value + filler + sound[24:].replace(own, none, 1)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_any_field_of_another_kind(kind: str, sound: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(with_field(sound, "general.name", OTHER_KINDS["a text"]))
    load_target(file, dtype="packed")
    for name in (*read_gguf(file).fields, *MAY_HAVE):
        file.write_bytes(with_field(sound, name, OTHER_KINDS[kind]))
        for use in (read_model_config, load_tokenizer, special_tokens, chat_template):
            try:
                use(file)
            except CheckpointError as error:
                assert str(file) in str(error)


@pytest.mark.parametrize(
    ("kind", "shown"), [("a list", r"\[32, 1\]"), ("a text", "'32'"), ("true", "True"), ("below 0", "-1")]
)
def test_an_alignment_that_is_no_number_is_refused(kind: str, shown: str, sound: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(with_field(sound, "general.alignment", OTHER_KINDS[kind]))
    with pytest.raises(CheckpointError, match=rf"general\.alignment={shown} must be a positive integer"):
        load_target(file)


def test_more_layers_than_any_model_has_are_refused_at_once(sound: bytes, tmp_path: Path) -> None:
    changed, file = bytearray(sound), tmp_path / "m.gguf"
    key = b"llama.block_count"
    struct.pack_into("<I", changed, sound.index(key) + len(key) + 4, 2**31 - 1)
    file.write_bytes(changed)
    with pytest.raises(CheckpointError, match="num_hidden_layers=2147483647 must be a positive integer, at most"):
        load_target(file)
