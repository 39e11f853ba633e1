// A whole decoder forward as one call of the pool: every worker walks all layers, meeting the others at barriers.
#pragma once
#include "attention.h"

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

template <class S>
static void store_key(const AqKV& kv, int layer, int head, const AqRows& rows, int row, const float* key, const float* value) {
  const Pages<S> pages(kv, layer, head, rows.page_table + (size_t)rows.slots[row] * rows.table_stride);
  const int index = rows.write[row];
  S* k = const_cast<S*>(pages.key_group(index)) + index % 16;
  S* v = const_cast<S*>(pages.value(index));
  for (int d = 0; d < kv.head_dim; d++) narrow1(key[d], k + d * 16);
  for (int d = 0; d < kv.head_dim; d++) narrow1(value[d], v + d);
}

static void store_key(const AqKV& kv, int layer, int head, const AqRows& rows, int row, const float* key, const float* value) {
  if (rows.write[row] < 0) return;
  if (kv.dtype == AQ_BFLOAT16) store_key<uint16_t>(kv, layer, head, rows, row, key, value);
  else store_key<float>(kv, layer, head, rows, row, key, value);
}

static void embed_row(const AqModel& model, int token, float* to) {
  const size_t from = (size_t)token * model.hidden;
  if (model.embed_dtype == AQ_BFLOAT16)
    for (int i = 0; i < model.hidden; i += 16) store(to + i, load((const uint16_t*)model.embed + from + i));
  else
    memcpy(to, (const float*)model.embed + from, model.hidden * sizeof(float));
}

// The first layer's input of one row. `g` may be `hidden` itself: a draft feeds back its own output.
static void enter_row(const ForwardJob& job, int row) {
  const AqModel& model = *job.model;
  const AqLayer& layer = model.layers[0];
  const int width = model.hidden, half = model.head_dim / 2;
  rope_table(job.rows->positions[row], model.inv_freq, model.rope_scale, half, job.cosine + (size_t)row * half,
             job.sine + (size_t)row * half);
  float* hidden = job.hidden + (size_t)row * width;
  float* normed = job.normed + (size_t)row * layer.qkv.k;
  if (!model.is_draft) {
    embed_row(model, job.rows->tokens[row], hidden);
    rms_norm_row(hidden, layer.input_norm, width, model.eps, normed);
    return;
  }
  const float* g = job.g + (size_t)row * width;
  embed_row(model, job.rows->tokens[row], normed);
  rms_norm_row(normed, layer.input_norm, width, model.eps, normed);
  rms_norm_row(g, layer.hidden_norm, width, model.eps, normed + width);
  memmove(hidden, model.norm_before_residual ? normed + width : g, width * sizeof(float));
}

// Norms and rotates one head of qkv; a key head also goes to the cache, with its value.
static void finish_head(const ForwardJob& job, const AqLayer& layer, int index, int row, int head) {
  const AqModel& model = *job.model;
  const int dim = model.head_dim, half = dim / 2, kv_head = head - model.num_heads;
  float* x = job.qkv + (size_t)row * layer.qkv.n + (size_t)head * dim;
  const float* norm = kv_head < 0 ? layer.q_norm : layer.k_norm;
  if (norm != nullptr) rms_norm_row(x, norm, dim, model.eps, x);
  rotate(x, job.cosine + (size_t)row * half, job.sine + (size_t)row * half, half);
  if (kv_head >= 0) store_key(*job.kv, index, kv_head, *job.rows, row, x, x + (size_t)model.num_kv_heads * dim);
}

// The residual stream after layer `index`: kept as a feature if asked for, normed for the next layer if there is one.
static void leave_row(const ForwardJob& job, int index, int row) {
  const AqModel& model = *job.model;
  const int width = model.hidden;
  const float* hidden = job.hidden + (size_t)row * width;
  if (job.features != nullptr)
    for (int c = 0; c < model.num_capture; c++)
      if (model.capture[c] == index)
        memcpy(job.features + ((size_t)row * model.num_capture + c) * width, hidden, width * sizeof(float));
  if (index + 1 < model.num_layers)
    rms_norm_row(hidden, model.layers[index + 1].input_norm, width, model.eps, job.normed + (size_t)row * width);
}

static void forward(const Worker& worker, const ForwardJob& job) {
  const AqModel& model = *job.model;
  const int num_rows = job.rows->num_rows, num_heads = model.num_heads + model.num_kv_heads;
  const Share rows = share(worker, num_rows), heads = share(worker, num_rows * num_heads);
  AttentionJob attend = job.attention;
  for (int r = rows.begin; r < rows.end; r++) enter_row(job, r);
  worker.barrier();
  for (int index = 0; index < model.num_layers; index++) {
    const AqLayer& layer = model.layers[index];
    linear_store(worker, layer.qkv, job.normed, num_rows, job.qkv);
    worker.barrier();
    for (int i = heads.begin; i < heads.end; i++) finish_head(job, layer, index, i / num_heads, i % num_heads);
    worker.barrier();
    attend.layer = index, attend.window = layer.window, attend.sinks = layer.sinks;
    attention(worker, attend);
    worker.barrier();
    linear_add(worker, layer.o, job.attended, num_rows, job.hidden);
    worker.barrier();
    for (int r = rows.begin; r < rows.end; r++)
      rms_norm_row(job.hidden + (size_t)r * model.hidden, layer.post_norm, model.hidden, model.eps,
                   job.normed + (size_t)r * model.hidden);
    worker.barrier();
    linear_swiglu(worker, layer.gate_up, job.normed, num_rows, job.gate_up);
    worker.barrier();
    linear_add(worker, layer.down, job.gate_up, num_rows, job.hidden);
    worker.barrier();
    for (int r = rows.begin; r < rows.end; r++) leave_row(job, index, r);
    worker.barrier();
  }
}

}  // namespace AQ_NAMESPACE
