from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from native_calls import ISAS, bits, draw, forward_some, guess, move_kv, parts, tensor
from test_sampling import best_two, reference_draws, sampling

from aquiline.backends.cpu import calls
from aquiline.backends.cpu.native_pages import new_pages
from aquiline.backends.torch import reference as ref
from aquiline.errors import NativeError
from aquiline.models.model_config import ModelConfig, RopeConfig
from aquiline.models.model_weights import AttentionWeights, DenseWeights, LayerWeights, ModelWeights
from aquiline.ops.torch_arrays import array_of
from aquiline.types import Rows

HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCAB = 64, 4, 2, 32, 96, 203
SCALED = {"factor": 1.0, "attention_factor": 1.1, "original_max_position_embeddings": 400.0}
CONFIG = ModelConfig(
    family="llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_layers=3, num_heads=HEADS,
    num_kv_heads=KV_HEADS, head_dim=DIM, max_positions=400, rms_norm_eps=1e-5, rope=RopeConfig(10000.0, "yarn", SCALED),
)  # fmt: skip


def random_weights(dtype=torch.bfloat16, layers=3, draft=False, extras=False):
    generator = torch.Generator().manual_seed(layers)

    def weight(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    def norm(n):
        return array_of(1 + 0.1 * torch.randn(n, generator=generator))

    def bias(n):
        return array_of(weight(n)) if extras else None

    width = (HEADS + 2 * KV_HEADS) * DIM
    return ModelWeights(
        config=CONFIG,
        embed=parts(weight(VOCAB, HIDDEN, scale=8.0)),
        layers=tuple(
            LayerWeights(
                AttentionWeights(
                    qkv=parts(weight(width, 2 * HIDDEN if draft else HIDDEN)),
                    o=parts(weight(HIDDEN, HEADS * DIM)),
                    qkv_bias=bias(width),
                    o_bias=bias(HIDDEN),
                    q_norm=norm(DIM) if extras else None,
                    k_norm=norm(DIM) if extras else None,
                    sinks=np.linspace(-1, 1, HEADS, dtype=np.float32) if extras else None,
                    window=40 if extras and i % 2 else 0,
                ),
                DenseWeights(
                    gate_up=parts(weight(2 * FFN, HIDDEN)),
                    down=parts(weight(HIDDEN, FFN)),
                    gate_up_bias=bias(2 * FFN),
                    down_bias=bias(HIDDEN),
                ),
                input_norm=norm(HIDDEN),
                post_norm=norm(HIDDEN),
                hidden_norm=norm(HIDDEN) if draft else None,
            )
            for i in range(layers)
        ),
        final_norm=norm(HIDDEN),
        head=parts(weight(VOCAB, HIDDEN)),
        capture=() if draft else (0, layers - 1),
        is_draft=draft,
    )


def new_kv(weights, pages=12, page_size=16, dtype=torch.bfloat16):
    name = str(dtype).removeprefix("torch.")
    kv = new_pages(pages, len(weights.layers), KV_HEADS, DIM, page_size, name)
    for array in (kv.k, kv.v) if kv.k_scales is None else (kv.k_scales, kv.v_scales):
        array.fill(np.nan)
    return kv, np.random.default_rng(0).permutation(pages).astype(np.int32)[None].copy()


def reference_forward(w, tokens, positions, paths, g=None, kv_dtype=torch.bfloat16):
    """Every row's residual stream and features, written from the reference ops; paths[i]: the rows that row i sees."""
    embed = tensor(w.embed).float()[torch.as_tensor(tokens).long()]
    if not w.is_draft:
        embed = embed * w.config.embed_scale

    def angles(rotary):
        return ref.rope_cos_sin(torch.as_tensor(positions), tensor(rotary.inv_freq), rotary.scale)

    def norm(x, weight):
        return ref.rms_norm(x, tensor(weight), w.config.rms_norm_eps)

    def linear(x, weight, bias=None):
        return ref.linear(x, tensor(weight), tensor(bias))

    features, x = [], embed if g is None else g
    for index, layer in enumerate(w.layers):
        a, mlp = layer.attention, layer.mlp
        h = norm(embed if w.is_draft else x, layer.input_norm)
        if w.is_draft:
            normed_g = norm(g, layer.hidden_norm)
            h, x = torch.cat((h, normed_g), -1), normed_g if w.norm_before_residual else g
        qkv = linear(h, a.qkv, a.qkv_bias).view(len(tokens), -1, DIM)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        if a.q_norm is not None:
            q, k = norm(q, a.q_norm), norm(k, a.k_norm)
        cos, sin = angles(w.local_rotary if a.window and w.local_rotary else w.rotary)
        q, k, v = ref.rope(q, cos, sin), ref.rope(k, cos, sin).to(kv_dtype).float(), v.to(kv_dtype).float()
        seen = [path[-a.window :] if a.window else path for path in paths]
        scale = w.config.attention_scale
        rows = [ref.attention(q[i], k[p], v[p], scale, tensor(a.sinks)) for i, p in enumerate(seen)]
        out = linear(torch.stack(rows), a.o, a.o_bias)
        x = x + (out if layer.attention_out_norm is None else norm(out, layer.attention_out_norm))
        normed = norm(x, layer.post_norm)
        if w.config.experts is not None:
            out = mixture(normed, mlp, w.config.experts, w.config.activation_limit)
        else:
            inner = ref.activate(linear(normed, mlp.gate_up, mlp.gate_up_bias), w.config.activation)
            out = linear(inner, mlp.down, mlp.down_bias)
        x = x + (out if layer.mlp_out_norm is None else norm(out, layer.mlp_out_norm))
        if index in w.capture:
            features.append(x)
    return x, torch.cat(features, -1) if features else None


def mixture(x, w, config, limit=0.0):
    """Each row's experts one after the other, in float64: the chosen ones by their logits, ties to the lowest id."""
    router, biases = tensor(w.router).double(), (w.router_bias, w.gate_up_bias, w.down_bias)
    router_bias, gate_up_bias, down_bias = (0 if b is None else tensor(b).double() for b in biases)
    total = torch.zeros_like(x)
    for row, vector in enumerate(x.double()):
        logits = router @ vector + router_bias
        chosen = sorted(range(config.count), key=lambda e: (-float(logits[e]), e))[: config.per_token]
        weights = torch.softmax(logits, 0)[chosen] if config.over_all else torch.softmax(logits[chosen], 0)
        for weight, e in zip(weights, chosen, strict=True):
            gate, up = (tensor((w.gate_up[e],)).double() @ vector + (gate_up_bias[e] if config.has_bias else 0)).chunk(
                2
            )
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                inner = up * gate * torch.sigmoid(gate)
            down = tensor((w.down[e],)).double() @ inner + (down_bias[e] if config.has_bias else 0)
            total[row] += (weight * down).float()
    return total


def chunk_rows(table, tokens, first, num):
    """Rows of a prompt: KV indices first .. first + num - 1."""
    rows = Rows(num, 4, table, num=num)
    index = np.arange(first, first + num)
    rows.tokens[:], rows.positions[:], rows.write[:], rows.context_len[:] = tokens[index], index, index, index + 1
    return rows


def run(model, kv, rows, width=HIDDEN, features=0, g=None):
    hidden = np.full((rows.max_rows, width), np.nan, np.float32)
    captured = np.full((rows.max_rows, features * width), np.nan, np.float32) if features else None
    model.forward(kv, rows, hidden, captured, g)
    return hidden, captured


TOKENS = np.random.default_rng(3).integers(0, VOCAB, 140).astype(np.int32)


def like_gemma(w):
    """The same weights in a model that has what Gemma 3 adds."""
    rng = np.random.default_rng(9)

    def norm():
        return (1 + 0.1 * rng.normal(size=HIDDEN)).astype(np.float32)

    config = replace(
        w.config, output_norms=True, local_rope=RopeConfig(100.0, "linear", {"factor": 2.0}), activation="geglu",
        embed_scale=HIDDEN**0.5, query_pre_attn_scalar=20.0,
    )  # fmt: skip
    layers = [replace(layer, attention_out_norm=norm(), mlp_out_norm=norm()) for layer in w.layers]
    return replace(w, config=config, layers=tuple(layers))


def check_same_bits(model, w):
    """The same bits of every row in other chunks, on other threads and instruction sets."""
    expected = None
    for isa, threads, sizes in (
        (ISAS[0], 1, [140]),
        (ISAS[0], 2, [1] * 140),
        (ISAS[0], 3, [64, 7, 69]),
        (ISAS[len(ISAS) // 2], 2, [13, 127]),
        (ISAS[-1], 5, [100, 40]),
    ):
        calls.select_isa(isa)
        calls.set_threads(threads)
        kv, table = new_kv(w)
        starts = np.cumsum([0, *sizes[:-1]])
        parts = [
            run(model, kv, chunk_rows(table, TOKENS, s, n), features=2) for s, n in zip(starts, sizes, strict=True)
        ]
        got = bits(np.concatenate([np.concatenate(part, axis=1) for part in parts]))
        expected = got if expected is None else expected
        assert np.array_equal(got, expected), (isa, threads, sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "norms-biases-window-sinks", "gemma"])
def test_target_matches_reference(dtype, kind, isa):
    w = random_weights(dtype, extras=kind != "llama")
    w = like_gemma(w) if kind == "gemma" else w
    stored = torch.float32 if dtype == torch.float32 else torch.bfloat16
    kv, table = new_kv(w, dtype=stored)
    num = 100 if isa != "portable" else 20
    hidden, captured = run(calls.NativeModel(w), kv, chunk_rows(table, TOKENS, 0, num), features=2)
    expected, features = reference_forward(
        w, TOKENS[:num], np.arange(num), [list(range(i + 1)) for i in range(num)], kv_dtype=stored
    )
    # Where a key lands on the other side of a bf16 rounding boundary, the results differ by its share of the attention.
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    np.testing.assert_allclose(hidden, expected, atol=tolerance * float(expected.abs().max()))
    np.testing.assert_allclose(captured, features, atol=tolerance * float(features.abs().max()))


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_draft_matches_reference_and_feeds_back_in_place(norm_before_residual, isa):
    w = replace(random_weights(torch.float32, 1, draft=True), norm_before_residual=norm_before_residual)
    kv, table = new_kv(w, dtype=torch.float32)
    g = np.random.default_rng(1).normal(0, 1, (20, HIDDEN)).astype(np.float32)
    rows = chunk_rows(table, np.concatenate([[0], TOKENS]), 1, 20)  # row j is stored at j + 1; index 0 stays empty
    rows.key_start[:], rows.positions[:] = 1, np.arange(20)
    expected, _ = reference_forward(
        w, rows.tokens, np.arange(20), [list(range(i + 1)) for i in range(20)], torch.as_tensor(g), torch.float32
    )
    model = calls.NativeModel(w)
    hidden, _ = run(model, kv, rows, g=g)
    np.testing.assert_allclose(hidden, expected, atol=2e-5 * float(expected.abs().max()))
    model.forward(kv, rows, g, None, g)
    assert np.array_equal(bits(g), bits(hidden))


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("codes", [None, "int8"])
def test_bits_do_not_depend_on_chunks_threads_or_isa(kind, codes):
    w = random_weights(extras=True)
    w = like_gemma(w) if kind == "gemma" else w
    check_same_bits(calls.NativeModel(w, "int8" if codes else "float32", codes), w)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("root", [15, 16, 62, 63, 64, 65, 100])
def test_tree_equals_sequences_decoded_alone_and_moving_its_path_keeps_them_equal(root, stored):
    """A root with two children and a grandchild below the second; then the winning path made contiguous."""
    w = random_weights(extras=True)
    model = calls.NativeModel(w)
    kv, table = new_kv(w, dtype=stored)
    run(model, kv, chunk_rows(table, TOKENS, 0, root))
    tokens = np.array([TOKENS[root], 7, 8, 9, 10], np.int32)
    paths = [(root,), (root, root + 1), (root, root + 2), (root, root + 2, root + 3)]
    rows = Rows(8, 4, table, num=4)
    for i, path in enumerate(paths):
        rows.tokens[i], rows.positions[i], rows.write[i] = tokens[i], root + len(path) - 1, root + i
        rows.context_len[i], rows.tail_len[i] = root, len(path)
        rows.tail[i, : len(path)] = path
    tree, _ = run(model, kv, rows)
    alone, alone_table = new_kv(w, dtype=stored)
    sequence = np.concatenate([TOKENS[:root], tokens[[0, 2, 3, 4]]])
    run(model, alone, chunk_rows(alone_table, sequence, 0, root))
    decoded = [run(model, alone, chunk_rows(alone_table, sequence, root + i, 1))[0][0] for i in range(4)]
    assert np.array_equal(bits(tree[[0, 2, 3]]), bits(np.stack(decoded[:3])))
    slots, src, dst = (np.array(a, np.int32) for a in ([0, 0], [root + 2, root + 3], [root + 1, root + 2]))
    move_kv(kv, table, slots, src, dst)
    after, _ = run(model, kv, chunk_rows(table, sequence, root + 3, 1))
    assert np.array_equal(bits(after[0]), bits(decoded[3]))


def test_head_draws_what_its_logits_say():
    w = random_weights()
    model = calls.NativeModel(w)
    hidden = np.random.default_rng(2).normal(0, 1, (40, HIDDEN)).astype(np.float32)
    index = np.random.default_rng(4).permutation(40)[:30].astype(np.int32)
    s = sampling(30, 0.9, seed=5)
    s["temperature"][::3], s["top_k"][::4], s["top_p"][::5], s["min_p"][::7] = 0.0, 11, 0.8, 0.02
    d2t = np.cumsum(np.random.default_rng(5).integers(0, 4, VOCAB)).astype(np.int32)
    ids = torch.as_tensor(np.arange(VOCAB) + d2t)
    normed = ref.rms_norm(torch.as_tensor(hidden[index]), tensor(w.final_norm), w.config.rms_norm_eps)
    exact = ref.linear(normed, tensor(w.head))
    results = []
    for isa in ISAS:
        calls.select_isa(isa)
        for threads in (1, 2):
            calls.set_threads(threads)
            logits = model.logits(hidden, index)
            assert model.draw(hidden, index, s).tolist() == draw(logits, s).tolist() == reference_draws(logits, s)
            drafted = model.draw(hidden, index, s, d2t).tolist()
            assert drafted == reference_draws(logits, s, ids) and set(drafted) <= set(ids.tolist())
            results.append(bits(logits))
    np.testing.assert_allclose(logits, exact, atol=1e-5)
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("vocab", [1, 2, 17, VOCAB])
@pytest.mark.parametrize("ties", [False, True])
def test_a_guess_is_a_draw_with_its_runner_up(vocab, ties):
    """Over every filter, by all instruction sets and thread counts; with equal logits the lowest id is second too."""
    w = random_weights()
    head = tensor(w.head)[:vocab].clone()
    if ties:
        head[1::2] = head[: vocab // 2]
    model = calls.NativeModel(replace(w, head=parts(head)))
    hidden = np.random.default_rng(2).normal(0, 1, (40, HIDDEN)).astype(np.float32)
    hidden[39] = np.nan
    index, s = np.arange(40, dtype=np.int32), sampling(40, 0.9, seed=5)
    s["temperature"][::3], s["top_k"][::4], s["top_p"][::5], s["min_p"][::7] = 0.0, 11, 0.8, 0.02
    s["top_k"][20], s["temperature"][20] = 1, 0.5
    d2t = np.cumsum(np.random.default_rng(5).integers(0, 4, vocab)).astype(np.int32)
    for offsets, ids in ((None, torch.arange(vocab)), (d2t, torch.as_tensor(np.arange(vocab) + d2t))):
        expected = [best_two(row, how, ids) for row, how in zip(model.logits(hidden, index), s, strict=True)]
        for isa in ISAS:
            calls.select_isa(isa)
            for threads in (1, 2, 3):
                calls.set_threads(threads)
                tokens, runners_up, margins = guess(model, hidden, index, s, offsets)
                assert tokens.tolist() == model.draw(hidden, index, s, offsets).tolist()
                assert [*zip(tokens, runners_up, strict=True)] == [two[:2] for two in expected]
                np.testing.assert_allclose(margins, [two[2] for two in expected], atol=2e-5)
    assert (tokens[39], runners_up[39], margins[39]) == (-1, -1, 0)
    assert (runners_up[20], margins[20]) == (-1, np.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codes", [None, "int8"])
def test_rows_without_states_write_the_same_keys(dtype, codes, isa):
    """Of a draft over a prompt and behind it: keys, values and the states that are left are those of a whole forward,
    to the bit, in whatever order the rows stand."""
    w = random_weights(dtype, 1, True, extras=True)
    model = calls.NativeModel(w, "int8" if codes else "float32", codes)
    for num, num_states in ((17, 16), (70, 0), (70, 1), (70, 3), (70, 69)):
        g = np.random.default_rng(4).normal(0, 1, (num, HIDDEN)).astype(np.float32)
        whole, table = new_kv(w)
        hidden = np.zeros((num, HIDDEN), np.float32)
        rows = chunk_rows(table, TOKENS, 0, num)
        model.forward(whole, rows, hidden, None, g)
        for threads in (1, 2, 3):
            calls.set_threads(threads)
            order = np.random.default_rng(num_states).permutation(num)
            kv, _ = new_kv(w)
            mixed = chunk_rows(table, TOKENS, 0, num)
            for name in ("tokens", "positions", "write", "context_len"):
                getattr(mixed, name)[:] = getattr(rows, name)[order]
            states = np.full((num, HIDDEN), np.nan, np.float32)
            forward_some(model, kv, mixed, num_states, states, np.ascontiguousarray(g[order]))
            assert np.array_equal(kv.k.view(np.int16), whole.k.view(np.int16))
            assert np.array_equal(kv.v.view(np.int16), whole.v.view(np.int16))
            assert np.array_equal(bits(states[:num_states]), bits(hidden[order[:num_states]]))
            assert np.isnan(states[num_states:]).all()


@pytest.mark.parametrize(
    ("is_draft", "num_states", "message"),
    [(False, 2, "all 3 rows of this model have states"), (True, 4, "must be in"), (True, -1, "must be in")],
)
def test_rows_that_cannot_be_without_states(is_draft, num_states, message):
    w = random_weights(layers=1 if is_draft else 3, draft=is_draft)
    kv, table = new_kv(w)
    g = np.zeros((4, HIDDEN), np.float32)
    with pytest.raises(NativeError, match=f"num_states={num_states}: {message}"):
        forward_some(calls.NativeModel(w), kv, chunk_rows(table, TOKENS, 0, 3), num_states, g.copy(), g)


@pytest.mark.parametrize("k", [1, 4, 150])
def test_top_k_by_what_a_draw_prefers_begins_with_the_draw(k, isa):
    """And its log-probabilities are those of the logits over the temperature plus the noise of the target's ids."""
    w = random_weights()
    model = calls.NativeModel(w)
    hidden = np.random.default_rng(k).normal(0, 1, (9, HIDDEN)).astype(np.float32)
    index, s = np.arange(9, dtype=np.int32), sampling(9, 0.7, seed=3)
    s["temperature"][:2] = 0.0
    d2t = np.cumsum(np.random.default_rng(5).integers(0, 4, VOCAB)).astype(np.int32)
    ids = torch.as_tensor(np.arange(VOCAB) + d2t)
    top, logits = model.top_k(hidden, index, k, s, d2t), torch.as_tensor(model.logits(hidden, index))
    assert top.ids[:, 0].tolist() == model.draw(hidden, index, s, d2t).tolist()
    for row, how, found, logprobs in zip(logits, s, top.ids, top.logprobs, strict=True):
        if how["temperature"] > 0:
            row.div_(float(how["temperature"])).add_(ref.gumbel(int(how["seed"]), int(how["position"]), ids))
        best, expected = ref.top_k(row[None], k)
        assert found.tolist() == ids[best[0]].tolist()
        np.testing.assert_allclose(logprobs, expected[0], atol=2e-5)
    plain = model.top_k(hidden, index, k)
    assert (top.ids[:2] == (plain.ids + d2t[plain.ids])[:2]).all() and (top.ids[2:] != plain.ids[2:]).any()


@pytest.mark.parametrize("k", [1, 4, 10, 150, VOCAB])
def test_top_k_takes_ties_in_id_order(k, isa):
    w = random_weights(torch.float32)
    head = tensor(w.head).clone()
    head[[5, 77, 130]] = head[11].clone()  # equal logits
    model = calls.NativeModel(replace(w, head=parts(head)))
    hidden = np.random.default_rng(k).normal(0, 1, (9, HIDDEN)).astype(np.float32)
    hidden[0] = 0  # every logit is equal
    index = np.arange(9, dtype=np.int32)
    logits = model.logits(hidden, index)
    top = model.top_k(hidden, index, k)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    assert np.array_equal(top.ids, order)
    logprobs = torch.log_softmax(torch.as_tensor(logits).double(), -1).gather(1, torch.as_tensor(order))
    np.testing.assert_allclose(top.logprobs, logprobs, atol=2e-6)
