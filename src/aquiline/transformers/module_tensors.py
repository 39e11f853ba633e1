"""The weights of a transformers model where they are: its parameters as the tensors of a checkpoint, by the same names.

So every family, name and refusal of the loader (`models/load.py`) holds for a module too.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from aquiline.blocks import FLOATS, Array
from aquiline.models.families import model_config
from aquiline.models.model_config import ModelConfig
from aquiline.ops.torch_arrays import array_of

_HOMES = ("transformers.models.", "transformers.activations", "torch.nn.modules.")
"""Where the classes of a model's parts are defined whose arithmetic is the family's."""


class ModuleTensors:
    """The tensors of a model as `save_pretrained` would name them. On a CPU they share the module's memory, except
    experts, which transformers holds in another layout and converts here."""

    readable: tuple[str, ...] = tuple(FLOATS)

    def __init__(self, model: PreTrainedModel) -> None:
        self.path = Path(type(model).__name__)
        self._tensors: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())

    @property
    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        """A tensor's dtype as torch names it."""
        return str(self._tensors[name].dtype).removeprefix("torch.")

    def get(self, name: str, index: int | None = None) -> Array:
        """One tensor on the host, or the slice at an index of its first axis alone."""
        tensor = self._tensors[name]
        return array_of(tensor if index is None else tensor[index])


def config_of(model: PreTrainedModel) -> ModelConfig:
    """The geometry of a model. Raises CheckpointError for a family that does not run here, naming what does, and for
    what its config asks for beyond that."""
    kind = type(model).__name__
    return model_config(model.config.to_dict() | {"architectures": [kind]}, Path(kind) / "config", {})


def check_parts(model: PreTrainedModel) -> None:
    """Raises ValueError for the first part of a model that computes something else than its family does: an adapter, a
    layer that was replaced, a hook, a weight that is elsewhere, dropout."""
    for name, part in model.named_modules():
        kind = type(part)
        where, home = name or kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
        if not home.startswith(_HOMES):
            adapters = getattr(part, "active_adapters", None)
            of = f" with adapters {adapters}" if adapters else ""
            raise ValueError(
                f"{where}: is a {home}{of}, and the family's own layers run here; merge adapters into the weights "
                "(merge_and_unload of peft), or put the layer back"
            )
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        changed = [each for each in hooks if not str(getattr(each, "__module__", "")).startswith("transformers.")]
        if changed or "forward" in vars(part):
            raise ValueError(f"{where}: has a forward hook or a forward of its own, which would not run; remove it")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"{name}: is on the meta device (offloaded); load the model without device_map")
    dropout = getattr(model.config, "attention_dropout", 0.0)
    if model.training and dropout:
        raise ValueError(f"attention_dropout={dropout} in training mode: there is no dropout here; call model.eval()")


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """What changes when a weight is replaced or written to: place and version counter of every tensor. Writing through
    `tensor.data`, or to a tensor made in inference mode, counts no version and is not noticed."""
    tensors = chain(model.parameters(), model.buffers())
    return tuple((each.data_ptr(), each.dtype, 0 if each.is_inference() else each._version) for each in tensors)
