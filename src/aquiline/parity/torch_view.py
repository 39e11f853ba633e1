"""What torch's own hooks show of the modules: inputs and outputs of both models, and the linears inside the draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aquiline.backends.base import Pair, Sizes
from aquiline.backends.torch.decoder import DecoderOutput
from aquiline.backends.torch.torch_backend import TorchBackend
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.parity.observe import DraftRows, StepOf
from aquiline.spec.drafting import Drafting
from aquiline.spec.tree import DraftTree
from aquiline.types import Float32


class Linears(TorchFunctionMode):
    """Hands on the outputs of linears whose weights have a name, by their memory."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names, self.outputs = names, dict[str, Tensor]()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; keep what a named linear gives."""
        found = func(*args, **(kwargs or {}))
        if func is F.linear and (name := self.names.get(args[1].data_ptr())) is not None:
            self.outputs[name] = found
        return found


class TorchView:
    """A torch backend. passes: those of the draft since the last call of `draft`, one of known rows before the rest."""

    def __init__(self, pair: Pair, sizes: Sizes) -> None:
        assert isinstance(pair, TorchPair), pair
        backend = pair.open(sizes)
        assert isinstance(backend, TorchBackend)
        self.pair, self.backend = pair, backend
        self.unseen: dict[str, str] = {}
        self.passes: list[tuple[list[int], dict[str, Float32]]] = []
        self.output: DecoderOutput
        names = {}
        if pair.head is not None:
            layer = pair.head.layer
            names = {layer.qkv.data_ptr(): "qkv", layer.o.data_ptr(): "attn_out", layer.down.data_ptr(): "ffn_out"}
        self.linears = Linears(names)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on both modules, for as long as it lasts."""
        hooks = [self.pair.decoder.register_forward_hook(self._see_target)]
        if self.pair.head is not None:
            hooks.append(self.pair.head.register_forward_hook(self._see_pass))
        try:
            with self.linears:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _see_target(self, module: Any, args: Any, output: DecoderOutput) -> None:
        self.output = output

    def _see_pass(self, module: Any, args: Any, output: Tensor) -> None:
        g, _, positions, attention = args
        head, pages = self.pair.head, attention.storage
        assert head is not None
        stages = {"fc_out": g, "pre_head_hidden": output, "logits": head.logits(output), **self.linears.outputs}
        stages |= {"keys": pages.k[0, attention.write], "values": pages.v[0, attention.write]}
        flat = {name: values.float().flatten(1).cpu().numpy() for name, values in stages.items()}
        self.passes.append((positions.tolist(), flat))

    @torch.inference_mode()
    def target(self, num_rows: int) -> dict[str, Float32]:
        """The rows of the last step; rows that only fill a shape are behind them."""
        hidden, features = (each[:num_rows] for each in (self.output.hidden, self.output.features))
        found = {"final_hidden": hidden, "logits": self.pair.decoder.logits(hidden), "features": features}
        return {name: values.float().cpu().numpy() for name, values in found.items()}

    def draft(self, step_of: StepOf, way: Drafting, root: int) -> tuple[DraftTree, list[DraftRows]]:
        """The passes of prompts and the first of a step have known rows, by their positions; the others have nodes."""
        num_known = len(self.passes) + 1
        tree = self.backend.draft(step_of(way)).read()
        seen, num_nodes = [], 0
        for number, (positions, stages) in enumerate(self.passes):
            is_node = number >= num_known
            numbers = [*range(num_nodes, num_nodes + len(positions))] if is_node else positions
            num_nodes += len(positions) if is_node else 0
            seen.append(DraftRows(numbers, is_node, stages))
        self.passes = []
        return tree, seen
