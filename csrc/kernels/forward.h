// A whole decoder forward as one call of the pool: every worker walks all layers, meeting the others at barriers. For
// few rows a barrier costs as much as a small linear, so there are four a layer: after attention, o, gate_up and down.
// A norm of what a layer adds to the residual stream takes one more.
#pragma once
#include "attention.h"
#include "experts.h"

namespace AQ_NAMESPACE {

using aq::ForwardJob;

static void rope_table(int position, const float* inv_freq, float scale, int half, float* cosine, float* sine) {
  for (int i = 0; i < half; i++) {
    double c, s;
    cos_sin((float)position * inv_freq[i], &c, &s);
    cosine[i] = (float)c * scale, sine[i] = (float)s * scale;
  }
}

static void rotate(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; i++) {
    const float first = x[i], second = x[half + i];
    x[i] = first * cosine[i] - second * sine[i];
    x[half + i] = second * cosine[i] + first * sine[i];
  }
}

template <class S> static void store_key(const Pages<S>& pages, int index, const float* key, const float* value) {
  S* k = const_cast<S*>(pages.key_group(index)) + index % 16;
  S* v = const_cast<S*>(pages.value(index));
  for (int d = 0; d < pages.dim; d++) narrow(key[d], k + d * 16);
  for (int d = 0; d < pages.dim; d++) narrow(value[d], v + d);
}

static void store_key(const Pages<Code>& pages, int index, const float* key, const float* value) {
  alignas(64) uint32_t words[aq::kMaxHeadDim / 4];
  const size_t scale = pages.scale(index);
  const_cast<float*>(pages.k_scales)[scale] = head_codes(key, pages.dim, (int8_t*)words);
  uint32_t* k = (uint32_t*)const_cast<Code*>(pages.key_group(index)) + index % 16;
  for (int i = 0; i < pages.dim / 4; i++) k[i * 16] = words[i] ^ 0x80808080u;
  const_cast<float*>(pages.v_scales)[scale] = head_codes(value, pages.dim, (int8_t*)words);
  Code* v = const_cast<Code*>(pages.value(index / 4 * 4)) + index % 4;
  for (int d = 0; d < pages.dim; d++) v[d * 4] = Code{((const uint8_t*)words)[d]};
}

static void store_key(const AqKV& kv, int layer, int head, const AqRows& rows, int row, const float* key,
                      const float* value) {
  if (rows.write[row] < 0) return;
  with_keys(kv.dtype, [&](auto* element) {
    const int32_t* table = rows.page_table + (size_t)rows.slots[row] * rows.table_stride;
    store_key(Pages<ValueOf<decltype(element)>>(kv, layer, head, table), rows.write[row], key, value);
  });
}

// Writes the residual stream of one row and, for a draft, its first input: [norm of the embedding; norm of g]. g may be
// `hidden` itself, since a draft feeds back its own output.
template <class E>
static void enter_row(const ForwardJob& job, int row, const E* embedding) {
  const AqModel& model = *job.model;
  const AqLayer& layer = model.layers[0];
  const int width = model.hidden;
  float* hidden = job.hidden + (size_t)row * width;
  if (!model.is_draft) {
    for (int i = 0; i < width; i += 16) store(hidden + i, mul(load(embedding + i), set1(model.embed_scale)));
    return;
  }
  const float* g = job.g + (size_t)row * width;
  const size_t at = (size_t)row * 2 * width;
  norm_into(layer.attention.qkv, job.normed, at, embedding, layer.input_norm, width, model.eps);
  norm_into(layer.attention.qkv, job.normed, at + width, g, layer.hidden_norm, width, model.eps);
  if (row >= job.num_states) return;
  if (model.norm_before_residual) rms_norm_row(g, layer.hidden_norm, width, model.eps, hidden);
  else memmove(hidden, g, width * sizeof(float));
}

// What one worker does before the first layer: its share of the rotary angles and of the rows.
static void enter(const Worker& worker, const ForwardJob& job) {
  const AqModel& model = *job.model;
  const int width = model.hidden, half = model.head_dim / 2, num_rows = job.rows->num_rows;
  const Share angles = share(worker, num_rows * half), rows = share(worker, num_rows);
  for (int i = angles.begin; i < angles.end; i++) {
    const int position = job.rows->positions[i / half], local = num_rows * half + i;
    rope_table(position, model.inv_freq + i % half, model.rope_scale, 1, job.cosine + i, job.sine + i);
    if (model.local_inv_freq != nullptr)
      rope_table(position, model.local_inv_freq + i % half, model.local_rope_scale, 1, job.cosine + local,
                 job.sine + local);
  }
  for (int r = rows.begin; r < rows.end; r++) {
    const size_t token = (size_t)job.rows->tokens[r] * width;
    with_elements(model.embed_dtype, [&](auto* element) { enter_row(job, r, (decltype(element))model.embed + token); });
    with_blocks(model.embed_dtype, [&](auto format) {
      float* row = job.embedded + (size_t)r * width;
      unpack_row<decltype(format)>(model.embed, width, job.rows->tokens[r], row);
      enter_row(job, r, (const float*)row);
    });
  }
  worker.barrier();
}

// What the keys of a layer are stored less: nothing where they are floats.
static const float* key_shift_of(const ForwardJob& job, const AqLayer& layer) {
  return job.kv->k_scales == nullptr ? nullptr : layer.attention.key_shift;
}

// Norms and rotates one head of qkv. A key head is also written to the cache, together with its value head.
static void finish_head(const ForwardJob& job, const AqLayer& layer, int index, int row, int head) {
  const AqModel& model = *job.model;
  const int dim = model.head_dim, half = dim / 2, kv_head = head - model.num_heads;
  float* x = job.qkv + (size_t)row * job.attention.q_stride + (size_t)head * dim;
  const float* norm = kv_head < 0 ? layer.attention.q_norm : layer.attention.k_norm;
  if (norm != nullptr) rms_norm_row(x, norm, dim, model.eps, x);
  const bool is_local = model.local_inv_freq != nullptr && layer.attention.window > 0;
  const size_t angles = ((size_t)row + (is_local ? job.rows->num_rows : 0)) * half;
  rotate(x, job.cosine + angles, job.sine + angles, half);
  if (kv_head < 0) return;
  if (const float* shift = key_shift_of(job, layer); shift != nullptr)
    for (int d = 0; d < dim; d += 16) store(x + d, sub(load(x + d), load(shift + (size_t)kv_head * dim + d)));
  store_key(*job.kv, index, kv_head, *job.rows, row, x, x + (size_t)model.num_kv_heads * dim);
}

// Computes, from the normed input, the attention of kv heads `mine` and of the query heads that read them.
static void attend_own(const Worker& worker, const ForwardJob& job, const AttentionJob& attend, Share mine,
                       const void* normed) {
  const AqModel& model = *job.model;
  const AqLayer& layer = model.layers[attend.layer];
  const int num_rows = job.rows->num_rows, num_states = job.num_states, dim = model.head_dim;
  const int group = model.num_heads / model.num_kv_heads;
  const Share queries{mine.begin * group, mine.end * group};
  const Share keys{model.num_heads + mine.begin, model.num_heads + mine.end};
  const Share values{keys.begin + model.num_kv_heads, keys.end + model.num_kv_heads};
  const Items items(attend, mine);
  fetch_first(attend, items);
  const auto project = [&](Share heads, int rows) {
    linear_store(layer.attention.qkv, Share{heads.begin * dim / 16, heads.end * dim / 16}, normed, rows, job.qkv);
  };
  project(queries, num_states), project(keys, num_rows), project(values, num_rows);
  for (int r = 0; r < num_rows; r++) {
    for (int h = queries.begin; h < queries.end && r < num_states; h++) finish_head(job, layer, attend.layer, r, h);
    for (int h = keys.begin; h < keys.end; h++) finish_head(job, layer, attend.layer, r, h);
  }
  run_items(worker, attend, items);
}

static void attend_shared(const Worker& worker, const ForwardJob& job, const AttentionJob& attend, const void* normed) {
  const AqModel& model = *job.model;
  const AqLayer& layer = model.layers[attend.layer];
  const int num_rows = job.rows->num_rows, num_heads = model.num_heads + model.num_kv_heads;
  fetch_first(attend, Items(attend, worker));
  const AqLinear& qkv = layer.attention.qkv;
  if (job.num_states == num_rows) {
    linear_store(qkv, share_blocks(worker, qkv), normed, num_rows, job.qkv);
  } else {
    const int num_queries = model.num_heads * model.head_dim / 16;
    const Share keys = share(worker, 2 * model.num_kv_heads * model.head_dim / 16);
    linear_store(qkv, share(worker, num_queries), normed, job.num_states, job.qkv);
    linear_store(qkv, Share{num_queries + keys.begin, num_queries + keys.end}, normed, num_rows, job.qkv);
  }
  worker.barrier();
  const Share heads = share(worker, num_rows * num_heads);
  for (int i = heads.begin; i < heads.end; i++) {
    const int row = i / num_heads, head = i % num_heads;
    if (row < job.num_states || head >= model.num_heads) finish_head(job, layer, attend.layer, row, head);
  }
  worker.barrier();
  attention(worker, attend);
}

// Copies this worker's share of the residual stream, the output of layer `index`, to the features if it is captured. No
// other worker writes to the stream before its next barrier.
static void capture(const Worker& worker, const ForwardJob& job, int index) {
  const AqModel& model = *job.model;
  const size_t width = model.hidden;
  const Share mine = share(worker, job.num_states);
  int c = 0;
  while (c < model.num_capture && model.capture[c] != index) c++;
  if (job.features == nullptr || c == model.num_capture) return;
  for (size_t r = mine.begin; r < (size_t)mine.end; r++)
    if (job.features[r] != nullptr) memcpy(job.features[r] + c * width, job.hidden + r * width, width * sizeof(float));
}

// Adds what a linear gives for x to the residual stream, after `norm` if that is not NULL. The last barrier is the
// caller's.
static void add_output(const Worker& worker, const ForwardJob& job, const AqLinear& linear, const float* norm,
                       const void* x, int rows) {
  if (norm == nullptr) return linear_add(worker, linear, x, rows, job.hidden);
  const int width = linear.n;
  linear_store(linear, share_blocks(worker, linear), x, rows, job.outputs);
  worker.barrier();
  const Share mine = share(worker, rows);
  for (size_t r = mine.begin; r < (size_t)mine.end; r++) {
    float *own = job.outputs + r * width, *to = job.hidden + r * width;
    rms_norm_row(own, norm, width, job.model->eps, own);
    for (int i = 0; i < width; i += 16) store(to + i, add(load(to + i), load(own + i)));
  }
}

// The MLP of a dense layer, from the residual stream to the residual stream. The last barrier is the caller's.
static void dense(const Worker& worker, const ForwardJob& job, const AqLayer& layer, int rows) {
  const AqMlp& mlp = layer.mlp;
  const void* normed =
      norm_rows(worker, job.hidden, nullptr, rows, layer.post_norm, job.model->eps, mlp.gate_up, job.normed);
  linear_activated(worker, mlp, normed, rows, job.gate_up);
  worker.barrier();
  const void* gated = rounded_rows(worker, mlp.down, job.gate_up, rows, job.codes);
  add_output(worker, job, mlp.down, layer.mlp_out_norm, gated, rows);
}

static void forward(const Worker& worker, const ForwardJob& job) {
  const AqModel& model = *job.model;
  const int num_rows = job.rows->num_rows, num_states = job.num_states;
  // A worker that owns whole kv heads needs no queries, keys or values of another worker.
  const bool owns_heads = model.num_kv_heads % worker.count == 0;
  AttentionJob attend = job.attention;
  enter(worker, job);
  const bool is_timed = job.seconds != nullptr && worker.index == 0;
  double last = is_timed ? aq::seconds() : 0.0;
  const auto lap = [&](int part) {
    if (!is_timed) return;
    const double now = aq::seconds();
    job.seconds[part] += now - last, last = now;
  };
  for (int index = 0; index < model.num_layers; index++) {
    const AqLayer& layer = model.layers[index];
    attend.layer = index, attend.window = layer.attention.window, attend.sinks = layer.attention.sinks;
    attend.key_shift = key_shift_of(job, layer);
    attend.is_rounded = takes_rounded(layer.attention.o.dtype);
    const int linears = layer.attention.o.dtype;
    attend.pair_block = holds_rounded(job.kv->dtype) ? aq::pair_block(is_dot(linears), is_tiled(linears)) : nullptr;
    const void* normed = job.normed;
    if (!model.is_draft)
      normed = norm_rows(worker, job.hidden, nullptr, num_rows, layer.input_norm, model.eps, layer.attention.qkv,
                         job.normed);
    if (owns_heads) attend_own(worker, job, attend, share(worker, model.num_kv_heads), normed);
    else attend_shared(worker, job, attend, normed);
    worker.barrier();
    const void* attended = rounded_rows(worker, layer.attention.o, job.attended, num_states, job.codes);
    add_output(worker, job, layer.attention.o, layer.attention_out_norm, attended, num_states);
    worker.barrier();
    lap(0);
    if (layer.mlp.experts == nullptr) dense(worker, job, layer, num_states);
    else mixture(worker, job, layer, num_states);
    worker.barrier();
    capture(worker, job, index);
    lap(1);
  }
}

}  // namespace AQ_NAMESPACE
