"""SmolLM2's GGUF file once more with its matrices stored otherwise, for every engine to run as it is.

Run: python benchmarks/restored.py DIR. Writes DIR/smollm2-q8_0.gguf and DIR/smollm2-bf16.gguf from the weights of the
name `smollm2`: every matrix of the file, whose blocks are Q4_1 and Q8_0, is unpacked and stored as Q8_0 or bfloat16,
every vector and all metadata stay. So tokenizer, template and geometry are the same, and a comparison at each storage
is one of engines. Values change only where Q4_1 is rounded to Q8_0 or bfloat16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
from gguf import quants

from aquiline.models.known_pairs import SMOLLM2_WEIGHTS

STORED = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "bf16": gguf.GGMLQuantizationType.BF16}
FILE_TYPES = {"q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "bf16": gguf.LlamaFileType.MOSTLY_BF16}
SET_BY_WRITER = ("general.architecture", "general.file_type")


def restore(source: Path, to: Path, stored: str) -> None:
    """Write `source` to `to` with its matrices stored as named by a key of STORED."""
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture")
    assert architecture is not None, f"{source} names no architecture"
    writer = gguf.GGUFWriter(to, architecture.contents())
    writer.add_file_type(FILE_TYPES[stored])
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in SET_BY_WRITER:
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quants.quantize(values, STORED[stored]), raw_dtype=STORED[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write both files and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for stored in STORED:
        to = directory / f"smollm2-{stored}.gguf"
        restore(SMOLLM2_WEIGHTS.find(), to, stored)
        print(f"{to}: {to.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
