"""Checkpoint files: finding them, reading tensors one at a time, and matching names to parameters through weight maps.

A checkpoint is a directory in Hugging Face's layout or, for targets, a GGUF file (`gguf/`); `TensorSource` is what both
have in common. Knows nothing of families or drafts; load.py and formats.py bring the maps. Every failure is a
CheckpointError that names the file and the fix, and every tensor that does not fit is listed, not the first one only.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

from safetensors import SafetensorError, safe_open

from aquiline.blocks import FLOATS, Array
from aquiline.checks import parse_json
from aquiline.errors import CheckpointError
from aquiline.models.known_pairs import target_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATTERNS = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_IGNORED = ["original/*", "consolidated*", "metal/*"]
BYTES = ("U8", "uint8")
"""The dtype of packed blocks in Hugging Face checkpoints, by its names in their files."""


def resolve(path: str | Path, *, revision: str | None = None) -> Path:
    """Where a checkpoint is: that of a known pair's target, a directory, a .gguf file, or else a Hugging Face hub id,
    downloaded into a directory.

    A directory without config.json stands for the one .gguf file in it. Downloads safetensors, JSON and tokenizer files
    only, and pytorch_model.bin where there are no safetensors. Raises CheckpointError when the path is none of these,
    for a directory of several .gguf files, and if the download fails."""
    found = Path(target_of(path)).expanduser()
    if found.is_dir():
        return _in_directory(found)
    if is_gguf(found):
        return found
    if found.exists():
        raise CheckpointError(f"{path} is a file; name the directory that holds config.json, or a .gguf file")
    if not is_hub_id(str(path)):
        raise CheckpointError(f"{path} is neither a directory nor a .gguf file nor a Hugging Face id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def download(patterns: list[str]) -> Path:
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED))

    try:
        found = download(_PATTERNS)
        return found if any(found.glob("*.safetensors")) else download([*_PATTERNS, "pytorch_model.bin"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a directory here, and the Hugging Face hub did not give it: {error}. Check the name, the "
            "network and, for gated models, `hf auth login`"
        ) from error


def is_hub_id(name: str) -> bool:
    """Whether a name can be that of a checkpoint on the Hugging Face hub: owner/name."""
    return _HUB_ID.fullmatch(name) is not None


def is_gguf(path: Path) -> bool:
    """Whether a path is a file whose name ends in .gguf."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def _in_directory(directory: Path) -> Path:
    if (directory / "config.json").exists():
        return directory
    files = sorted(file for file in directory.iterdir() if is_gguf(file))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{directory} holds {len(files)} GGUF files; name one of them: {names}")
    return files[0] if files else directory


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError when it is missing, broken or not an object."""
    try:
        data = parse_json(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; a checkpoint directory needs it") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error}); it must be a file that this user may read") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); download or write it again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} holds a JSON {type(data).__name__}, not an object")
    return data


class TensorSource(Protocol):
    """The tensors of a model by Hugging Face's names: shapes without reading, contents one at a time.

    `path`: the directory or file that holds them, or else what errors name. `readable`: the dtypes that `get` can
    return as floats."""

    path: Path
    readable: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Every tensor's name, sorted."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""

    def dtype(self, name: str) -> str:
        """A tensor's dtype as its file names it, without reading it."""

    def get(self, name: str, index: int | None = None) -> Array:
        """Read one tensor, or the slice at an index of its first axis alone; it is not kept."""


class Tensors:
    """The tensors of one checkpoint directory, by name: shapes without reading, contents one at a time.

    Reads model.safetensors, the shards of model.safetensors.index.json, or pytorch_model.bin (weights only: no code
    is run). Raises CheckpointError on missing, truncated or corrupt files."""

    readable: tuple[str, ...] = ("F32", "F16", "BF16", *FLOATS)

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._handles: dict[str, Any] = {}
        self._loaded: dict[str, Array] = {}
        for file in self._files():
            if file.suffix == ".bin":
                self._loaded.update(_read_bin(file))
                continue
            handle = _open(file)
            for name in handle.keys():  # noqa: SIM118
                self._handles[name] = handle

    @property
    def metadata(self) -> dict[str, str] | None:
        """What the first safetensors file says beside its tensors; None without any."""
        handle = next(iter(self._handles.values()), None)
        return None if handle is None else handle.metadata()

    def _files(self) -> list[Path]:
        single, index = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if index.exists():
            files = [self.path / name for name in _shards(index)]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise CheckpointError(f"{self.path} lacks {', '.join(missing)}, named by {index.name}; fetch them")
            return files
        binary = self.path / "pytorch_model.bin"
        found = [file for file in (single, binary) if file.exists()]
        if not found:
            raise CheckpointError(
                f"{self.path} has no weights: model.safetensors, model.safetensors.index.json or pytorch_model.bin"
            )
        return found[:1]

    @property
    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted([*self._handles, *self._loaded])

    def __contains__(self, name: str) -> bool:
        return name in self._handles or name in self._loaded

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        if name in self._loaded:
            return tuple(self._loaded[name].shape)
        return tuple(self._handles[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """A tensor's dtype as its file names it, without reading it."""
        if name in self._loaded:
            return self._loaded[name].dtype.name
        return str(self._handles[name].get_slice(name).get_dtype())

    def get(self, name: str, index: int | slice | None = None) -> Array:
        """Read one tensor, or an index or a slice of its first axis alone; it is not kept."""
        if name in self._loaded:
            return self._loaded[name] if index is None else self._loaded[name][index]
        handle = self._handles[name]
        try:
            tensor: Array = handle.get_tensor(name) if index is None else handle.get_slice(name)[index]
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read ({error}); download it again") from error
        return tensor


def _shards(index: Path) -> list[str]:
    """The shards that an index names, sorted. All of them must lie below the index's folder: a downloaded index must
    not choose which other files of this machine are read. Symbolic links may lead out of the folder, since the hub's
    cache consists of them: the owner of the folder makes links, an index cannot."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensors to files; download it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) < 256:
            raise CheckpointError(f"{index}: weight_map[{tensor!r}]={name!r} must be the name of a file")
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{index}: weight_map[{tensor!r}]={name!r} must be a file in the folder of the index")
    return sorted(set(weight_map.values()))


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or corrupt ({error}); download it again") from error


def _read_bin(file: Path) -> dict[str, Array]:
    try:
        import torch

        from aquiline.ops.torch_arrays import array_of
    except ImportError:
        fix = "pip install 'aquiline[torch]', or save it again as model.safetensors"
        raise CheckpointError(f"{file} is in torch's own format, and torch is not installed: {fix}") from None
    try:
        data = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # an unpickler fed with broken bytes raises whatever they make it do
        raise CheckpointError(f"{file} is truncated, corrupt or holds more than tensors ({error})") from error
    tensor = torch.Tensor
    if not isinstance(data, dict) or not all(isinstance(k, str) and isinstance(t, tensor) for k, t in data.items()):
        raise CheckpointError(f"{file} is not a dictionary of tensors; save a plain state_dict")
    return {name: array_of(values) for name, values in data.items()}


ROWS, COLUMNS = 0, 1  # the axes tensor parallelism splits: a projection's outputs, or its inputs


@dataclass(frozen=True)
class Entry:
    """One line of a weight map: the tensor `source` of `shape` fills rows [start, start + ...) of parameter `target`.

    Fused parameters have several entries. `shard` is the source's axis that tensor parallelism splits, None where
    every rank keeps a copy.

    is_stacked: the first axis counts experts, each of which is read as a matrix of its own. is_transposed: an expert is
    [inputs, outputs]. pairs: the axis of what is read along which outputs of gate and up take turns. holds: floats, or
    half of a weight in MXFP4: nibbles [E, N, K / 32, 16] or scales [E, N, K / 32]. offset: added in float32 to a vector
    that stays float32 in any dtype; None for one that is rounded to the dtype."""

    source: str
    target: str
    shape: tuple[int, ...]
    start: int = 0
    shard: int | None = None
    is_stacked: bool = False
    is_transposed: bool = False
    pairs: int | None = None
    holds: Literal["floats", "nibbles", "scales"] = "floats"
    offset: float | None = None

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and inputs of the matrix of floats, or of one expert's."""
        rows, inputs = self.shape[-2:]
        return (inputs, rows) if self.is_transposed else (rows, inputs)


def check_entries(tensors: TensorSource, entries: Iterable[Entry], is_ignored: Callable[[str], bool]) -> list[str]:
    """Every missing, unexpected or mis-shaped tensor, and every one whose dtype is not read there, one line each; empty
    if the checkpoint fits."""
    problems, known = [], set()
    for entry in entries:
        known.add(entry.source)
        if entry.source not in tensors:
            problems.append(f"missing tensor {entry.source} {list(entry.shape)}")
        elif tensors.shape(entry.source) != entry.shape:
            found = list(tensors.shape(entry.source))
            problems.append(f"tensor {entry.source} has shape {found}, the config says {list(entry.shape)}")
        elif (dtype := tensors.dtype(entry.source)) not in (readable := _readable(tensors, entry)):
            problems.append(f"tensor {entry.source} has dtype {dtype}; {', '.join(readable)} are read")
    extra = [name for name in tensors.names if name not in known and not is_ignored(name)]
    return problems + [f"unexpected tensor {name} {list(tensors.shape(name))}" for name in extra]


def _readable(tensors: TensorSource, entry: Entry) -> tuple[str, ...]:
    return tensors.readable if entry.holds == "floats" else BYTES


def refuse(where: Path | str, problems: list[str]) -> None:
    """Raise one CheckpointError that lists every problem, or return if there is none."""
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(f"{where} does not fit ({len(problems)} problem{'s' * (len(problems) > 1)}):\n{lines}")
