// All kernels, compiled once per instruction set (setup.py names it: AQ_NAMESPACE, AQ_SIMD).
#include "forward.h"
#include "sample.h"

namespace AQ_NAMESPACE {

static void linear(const Worker& worker, const aq::LinearJob& job) {
  const void* x = job.x;
  if (takes_rounded(job.linear->dtype)) {
    const Share mine = share(worker, job.rows * (job.linear->k / 16));
    for (size_t i = mine.begin; i < (size_t)mine.end; i++) store((Rounded*)job.rounded + i * 16, load(job.x + i * 16));
    worker.barrier();
    x = job.rounded;
  }
  x = rounded_rows(worker, *job.linear, x, job.rows, (Codes*)job.rounded);
  linear_store(*job.linear, share_blocks(worker, *job.linear), x, job.rows, job.y);
}

static void rms_norm(const float* x, const float* weight, int rows, int width, float eps, float* y) {
  for (size_t r = 0; r < (size_t)rows; r++) rms_norm_row(x + r * width, weight, width, eps, y + r * width);
}

static void swiglu(const float* gate_up, int rows, int width, float* y) {
  for (size_t i = 0; i < (size_t)rows * width; i += 16)
    store(y + i, mul(silu(load(gate_up + 2 * i)), load(gate_up + 2 * i + 16)));
}

static void rope(float* x, const int32_t* positions, const float* inv_freq, float scale, int rows, int heads, int dim) {
  const int half = dim / 2;
  for (size_t r = 0; r < (size_t)rows; r++) {
    float cosine[aq::kMaxHeadDim / 2], sine[aq::kMaxHeadDim / 2];
    rope_table(positions[r], inv_freq, scale, half, cosine, sine);
    for (int h = 0; h < heads; h++) rotate(x + (r * heads + h) * dim, cosine, sine, half);
  }
}

static void write_kv(const AqKV& kv, int layer, const AqRows& rows, const float* k, const float* v) {
  for (int r = 0; r < rows.num_rows; r++)
    for (int h = 0; h < kv.num_kv_heads; h++) {
      const size_t at = ((size_t)r * kv.num_kv_heads + h) * kv.head_dim;
      store_key(kv, layer, h, rows, r, k + at, v + at);
    }
}

static void gumbel_row(uint64_t seed, int32_t position, int count, float* noise) {
  const Noise key(seed, position);
  for (int i = 0; i < count; i += 16) {
    float lane[16];
    store(lane, gumbel(key, iadd(iota(), iset1(i))));
    memcpy(noise + i, lane, (count - i < 16 ? count - i : 16) * sizeof(float));
  }
}

// exp and log alone, so that a test can measure their accuracy.
static void exp_log(const float* x, int count, float* exps, float* logs) {
  for (int i = 0; i < count; i++) exps[i] = exp1(x[i]), logs[i] = x[i] > 0.0f ? log1(x[i]) : 0.0f;
}

extern const aq::Kernels kKernels;
const aq::Kernels kKernels = {forward,  attention, linear, head_logits, head_topk,  draw,
                              rms_norm, swiglu,    rope,   write_kv,    gumbel_row, exp_log};

}  // namespace AQ_NAMESPACE
