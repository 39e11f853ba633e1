"""Our decoders as OpenVINO graphs: a stateful target and the EAGLE-3 head, written operation by operation.

The existing exporters need an older transformers than ours, so the graph is written here. It has the form that
OpenVINO's own passes look for: keys and values are state; rotary embedding, RMS norm and attention are written as the
CPU plugin fuses them; nodes have the names by which OpenVINO GenAI finds the layers that a draft reads. Knows nothing
of pipelines.
Source: what optimum-intel 2.2 exports; openvino.genai@015a9936, eagle3_model_transforms.cpp, for drafts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import torch
from torch import Tensor

from aquiline.backends.torch.decoder import Decoder, DecoderLayer, load_target
from aquiline.backends.torch.eagle import DraftHead, load_draft
from aquiline.bench.peers.peer import stored_dtype
from aquiline.models.families import config_file, read_fields
from aquiline.models.model_config import ModelConfig
from aquiline.models.producers import read_draft_fields
from aquiline.models.rope import rotary
from conversions.converted import converted, shares_embedding

Node = Any
INT8_RANGE = 127.0


def target_folder(target: Path, int8: bool, model: str) -> Path:
    """The folder of a target, written if it is not there. model: the name of the graph's file."""

    def write(directory: Path) -> None:
        graph = target_graph(load_target(target, dtype=stored_dtype(target)), int8)
        _save(graph, directory / model, read_fields(config_file(target)))

    return converted([target], f"openvino{'-int8' if int8 else ''}", write)


def draft_folder(target: Path, draft: Path, int8: bool, model: str) -> Path:
    """The folder of a target's draft, written if it is not there.

    Raises ValueError for a draft that GenAI does not run."""

    def write(directory: Path) -> None:
        decoder = load_target(target, dtype=stored_dtype(target))
        head = load_draft(draft, decoder, dtype=stored_dtype(draft))
        if not shares_embedding(head, decoder):
            raise ValueError("draft: has an embedding of its own; OpenVINO GenAI puts the target's in its place")
        _save(draft_graph(head, int8), directory / model, read_draft_fields(config_file(draft)))

    return converted([target, draft], f"openvino-eagle3{'-int8' if int8 else ''}", write)


def _save(graph: Any, file: Path, config: dict[str, Any]) -> None:
    """Write a model and its config in the form that GenAI reads.

    GenAI requires some end token, though every run here ignores it."""
    ov.save_model(graph, file, False)
    (file.parent / "config.json").write_text(json.dumps(config))
    (file.parent / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))


def target_graph(decoder: Decoder, int8: bool) -> Any:
    """A target as OpenVINO GenAI runs it: token ids in, logits out. int8 rounds its linears' weights by output row.

    Raises ValueError for a target that norms the outputs of its blocks (gemma3)."""
    if decoder.config.output_norms:
        raise ValueError("target: output_norms=true; the OpenVINO peer writes targets without it")
    graph = _Graph(decoder.config, int8)
    embed = graph.floats(decoder.embed)
    hidden = ops.gather(embed, graph.ids, graph.ints(0))
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        normed = graph.norm(hidden, layer.input_norm)
        hidden = graph.layer(layer, normed, hidden, f"layers.{index}/residual")
    logits = graph.linear(graph.norm(hidden, decoder.final_norm), decoder.head)
    return graph.model({"logits": logits})


def draft_graph(head: DraftHead, int8: bool) -> Any:
    """An EAGLE-3 head in the form that OpenVINO GenAI takes: GenAI moves `fc` into the target and reads d2t as a
    constant result.

    Raises ValueError for variants of heads that GenAI does not know."""
    config = head.config
    for name in ("norm_before_fc", "fc_norm", "norm_feedback"):
        if getattr(config, name):
            raise ValueError(f"draft: {name}=true; OpenVINO GenAI runs EAGLE-3 heads without it")
    graph = _Graph(config.model, int8)
    features = ops.parameter([-1, -1, -1], np.float32, name="hidden_states")
    features.output(0).set_names({"hidden_states"})
    g = ops.matmul(features, graph.floats(head.fc), False, True)
    embedded = graph.norm(ops.gather(graph.floats(head.embed), graph.ids, graph.ints(0)), head.layer.input_norm)
    normed = graph.norm(g, head.hidden_norm)
    residual = normed if config.norm_before_residual else g
    hidden = graph.layer(head.layer, ops.concat([embedded, normed], -1), residual, "midlayer/residual")
    logits = graph.linear(graph.norm(hidden, head.norm), head.head)
    d2t = ops.constant(head.d2t.numpy(), name="d2t")
    model = graph.model({"logits": logits, "d2t": d2t}, [features])
    model.set_rt_info(True, "eagle3_mode")
    model.set_rt_info(" ".join(map(str, config.capture)), "hidden_layers_list")
    return model


class _Graph:
    """A graph under construction: its inputs, the nodes that all layers share, and the layers' state."""

    def __init__(self, config: ModelConfig, int8: bool) -> None:
        self.config, self.int8 = config, int8
        self.parameters = [
            ops.parameter([-1, -1], np.int64, name="input_ids"),
            ops.parameter([-1, -1], np.int64, name="attention_mask"),
            ops.parameter([-1, -1], np.int64, name="position_ids"),
            ops.parameter([-1], np.int32, name="beam_idx"),
        ]
        for parameter in self.parameters:
            parameter.output(0).set_names({parameter.get_friendly_name()})
        input_ids, self.attention_mask, position_ids, self.beam_idx = self.parameters
        self.ids = ops.convert(input_ids, np.int32)
        self.input_shape = ops.shape_of(input_ids)
        self.batch = ops.gather(self.input_shape, self.ints([0]), self.ints(0))
        self.mask = self._mask()
        self.cos, self.sin = self._rotation(position_ids)
        self.sinks: list[Node] = []

    def ints(self, values: int | list[int]) -> Node:
        """An int64 constant."""
        return ops.constant(np.array(values, np.int64))

    def floats(self, weight: Tensor) -> Node:
        """A weight as a constant in its stored dtype, with a node that widens it to float32."""
        data = weight.detach()
        if data.dtype != torch.bfloat16:
            return ops.constant(data.float().numpy(), shared_memory=False)
        bits = ov.Tensor(data.contiguous().view(torch.uint16).numpy(), list(data.shape), ov.Type.bf16)
        return ops.convert(ops.constant(bits, shared_memory=False), np.float32)  # a copy outlives the weights

    def linear(self, x: Node, weight: Tensor, bias: Tensor | None = None) -> Node:
        """x [..., In] -> [..., Out] by weight [Out, In]."""
        y = ops.matmul(x, self._rounded(weight) if self.int8 else self.floats(weight), False, True)
        return y if bias is None else ops.add(y, self.floats(bias))

    def _rounded(self, weight: Tensor) -> Node:
        """A weight as int8 rows with one scale each, with nodes that widen it to float32."""
        scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / INT8_RANGE
        rounded = (weight.float() / scale).round().to(torch.int8)
        return ops.multiply(ops.convert(ops.constant(rounded.numpy()), np.float32), ops.constant(scale.numpy()))

    def norm(self, x: Node, weight: Tensor) -> Node:
        """RMS norm over the last axis."""
        power = ops.reduce_mean(ops.power(x, np.float32(2)), self.ints([-1]), True)
        inverse = ops.divide(np.float32(1), ops.sqrt(ops.add(power, np.float32(self.config.rms_norm_eps))))
        return ops.multiply(self.floats(weight), ops.multiply(x, inverse))

    def layer(self, layer: DecoderLayer, x: Node, residual: Node, name: str) -> Node:
        """A decoder layer: normed input x [B, S, In] and residual [B, S, H]; its last sum carries `name`."""
        c = self.config
        weights = torch.split(layer.qkv, layer.split)
        biases = torch.split(layer.qkv_bias, layer.split) if layer.qkv_bias is not None else (None, None, None)
        heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        q, k, v = (
            ops.reshape(self.linear(x, weight, bias), self.ints([0, 0, count, c.head_dim]), True)
            for weight, bias, count in zip(weights, biases, heads, strict=True)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.norm(q, layer.q_norm), self.norm(k, layer.k_norm)
        q, k, v = (ops.transpose(t, self.ints([0, 2, 1, 3])) for t in (q, k, v))
        k, v = self._state(self._rotate(k), layer.index, "key"), self._state(v, layer.index, "value")
        mixed = ops.scaled_dot_product_attention(self._rotate(q), self._repeat(k), self._repeat(v), self.mask)
        flat = ops.reshape(
            ops.transpose(mixed, self.ints([0, 2, 1, 3])), self.ints([0, 0, c.num_heads * c.head_dim]), True
        )
        hidden = ops.add(residual, self.linear(flat, layer.o, layer.o_bias))
        normed = self.norm(hidden, layer.post_norm)
        gate, up = torch.chunk(layer.gate_up, 2)
        bias = layer.gate_up_bias
        gate_bias, up_bias = (None, None) if bias is None else torch.chunk(bias, 2)
        product = ops.multiply(ops.swish(self.linear(normed, gate, gate_bias)), self.linear(normed, up, up_bias))
        return ops.add(hidden, self.linear(product, layer.down, layer.down_bias), name=name)

    def _state(self, new: Node, layer: int, kind: str) -> Node:
        """The stored keys or values, followed by the new ones [B, Hkv, S, Dh]; the result is the next state."""
        c = self.config
        shape = ops.concat([self.batch, self.ints([c.num_kv_heads, 0, c.head_dim])], 0)
        empty = ops.broadcast(np.float32(0), shape)
        name = f"past_key_values.{layer}.{kind}present.{layer}.{kind}"
        past = ops.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, c.num_kv_heads, -1, c.head_dim]))
        whole = ops.concat([ops.gather(past, self.beam_idx, self.ints(0)), new], -2)
        self.sinks.append(ops.assign(whole, name))
        return whole

    def _repeat(self, x: Node) -> Node:
        """[B, Hkv, S, Dh] -> [B, Hq, S, Dh]."""
        c = self.config
        if c.num_heads == c.num_kv_heads:
            return x
        shape = ops.gather(ops.shape_of(x), self.ints([2]), self.ints(0))
        wide = [self.batch, self.ints([c.num_kv_heads, c.num_heads // c.num_kv_heads]), shape, self.ints([c.head_dim])]
        copies = ops.broadcast(ops.unsqueeze(x, self.ints(2)), ops.concat(wide, 0), broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(copies, self.ints([0, c.num_heads, -1, c.head_dim]), True)

    def _rotation(self, position_ids: Node) -> tuple[Node, Node]:
        """cos and sin [B, 1, S, Dh] of the positions."""
        rope = rotary(self.config.rope, self.config.head_dim, self.config.max_positions)
        frequencies = ops.constant(rope.inv_freq.reshape(1, -1, 1))
        positions = ops.convert(ops.unsqueeze(position_ids, self.ints(1)), np.float32)
        angles = ops.transpose(ops.matmul(frequencies, positions, False, False), self.ints([0, 2, 1]))
        both = ops.concat([angles, angles], -1)
        scale = np.float32(rope.scale)
        cos, sin = (ops.unsqueeze(f(both), self.ints(1)) for f in (ops.cos, ops.sin))
        return (cos, sin) if rope.scale == 1 else (ops.multiply(cos, scale), ops.multiply(sin, scale))

    def _rotate(self, x: Node) -> Node:
        """x * cos + rotate_half(x) * sin."""
        half = self.config.head_dim // 2
        ends = self.ints([half]), self.ints([np.iinfo(np.int64).max]), self.ints([1]), self.ints([3])
        second = ops.slice(x, *ends)
        first = ops.slice(x, self.ints([0]), self.ints([half]), self.ints([1]), self.ints([3]))
        turned = ops.concat([ops.multiply(second, np.float32(-1)), first], -1)
        return ops.add(ops.multiply(x, self.cos), ops.multiply(turned, self.sin))

    def _mask(self) -> Node:
        """The additive attention mask of the new rows, float [B, 1, S, all]: 0 for visible keys, else the lowest
        number."""
        length = ops.gather(ops.shape_of(self.attention_mask), self.ints(1), self.ints(0))
        new = ops.gather(self.input_shape, self.ints(1), self.ints(0))
        columns = ops.range(self.ints(0), length, self.ints(1), "i64")
        rows = ops.unsqueeze(ops.range(ops.subtract(length, new), length, self.ints(1), "i64"), self.ints(1))
        present = ops.not_equal(self.attention_mask, self.ints(0))
        seen = ops.logical_and(
            ops.unsqueeze(present, self.ints([1, 2])), ops.unsqueeze(ops.less_equal(columns, rows), self.ints([0, 1]))
        )
        return ops.select(seen, np.float32(0), np.float32(np.finfo(np.float32).min))

    def model(self, outputs: dict[str, Node], more: list[Node] | None = None) -> Any:
        """The finished model."""
        results = []
        for name, node in outputs.items():
            result = ops.result(node, name=name)
            result.output(0).set_names({name})
            results.append(result)
        return ov.Model(results, self.sinks, self.parameters + (more or []), "aquiline")
