// y = x w^T over packed weights: every output is one chain of fused multiply-adds in k order, whatever the number of
// rows and threads. Workers split the output blocks.
#pragma once
#include "kernels.h"
#include "math.h"
#include "round.h"
#include "unpack.h"

namespace AQ_NAMESPACE {

using aq::Worker;

// Contiguous share of worker.index among `count` items.
struct Share {
  int begin, end;
};
AQ_INLINE Share share(const Worker& worker, int count) {
  return Share{(int)((int64_t)count * worker.index / worker.count),
               (int)((int64_t)count * (worker.index + 1) / worker.count)};
}

// How the linears of one format are computed: which tile, what it takes, and how its weights lie in memory.
struct Tiling {
  aq::TileFunction tile;
  int rows, wide_rows;         // of a tile at most, of fewer than kWideFrom rows and of more
  int step_bytes, channels;
  int input_bytes, per_input;  // size of an input as the tile takes it, and how many channels it holds
  const float* output_scale;
  AQ_MEMBER int num_tiles(int num_rows) const {
    const int most = num_rows < aq::kWideFrom ? rows : wide_rows;
    return (num_rows + most - 1) / most;
  }
};

template <class F>
static void typed_tile(int rows, const void* w, int num_blocks, int steps, const void* x, size_t stride, size_t next,
                       float* sums) {
  any_tile<F>(rows, (const typename F::Step*)w, num_blocks, steps, (const typename F::Input*)x, stride, next, sums);
}

AQ_INLINE Tiling tiling_of(const AqLinear& linear) {
  Tiling tiling{};
  with_format(linear.dtype, [&](auto format) {
    using F = decltype(format);
    using Input = typename F::Input;
    constexpr int kPerInput = kIsSame<Input, Codes> ? 32 : kIsSame<Input, Pair> ? 2 : 1;
    if constexpr (kIsSame<Input, Codes> || F::kIsTiled) tiling.tile = aq::integer_tiles->of(linear.dtype);
    else if constexpr (F::kIsApart) tiling.tile = aq::dot_tile;
    else if constexpr (F::kIsUnpacked) tiling.tile = unpacked_tile<F>;
    else tiling.tile = typed_tile<F>;
    tiling.rows = kIsSame<Input, Codes> ? aq::integer_tiles->rows : F::kRows;
    tiling.wide_rows = kIsSame<Input, Codes> ? aq::integer_tiles->wide_rows : F::kRows;
    tiling.step_bytes = sizeof(typename F::Step), tiling.channels = F::kChannels;
    tiling.input_bytes = sizeof(Input), tiling.per_input = kPerInput;
    tiling.output_scale = F::output_scale(linear);
  });
  return tiling;
}

// linear_rows for one part of a linear, whose first output is `offset`.
template <class Epilogue>
static void part_rows(const AqLinear& linear, Share mine, int offset, const void* x, int rows,
                      const Epilogue& epilogue) {
  const Tiling tiling = tiling_of(linear);
  const int num_tiles = tiling.num_tiles(rows), steps = linear.k / tiling.channels;
  const size_t stride = (size_t)linear.k / tiling.per_input;
  for (int block = mine.begin; block < mine.end; block += kPanel) {
    const char* w = (const char*)linear.weight + (size_t)block * steps * tiling.step_bytes;
    const int blocks = mine.end - block < kPanel ? mine.end - block : kPanel;
    const int column = block * 16;
    const int width = linear.n - column < blocks * 16 ? linear.n - column : blocks * 16;
    for (int t = 0; t < num_tiles; t++) {  // balanced: 8 rows by 6 are 4 + 4, not 6 + 2
      const int first = (int)((int64_t)rows * t / num_tiles), last = (int)((int64_t)rows * (t + 1) / num_tiles);
      alignas(64) float sums[kMostRows * kPanelWidth];
      // The first tile streams the panel from memory, the second the next panel into L2: no tile has to wait for all of
      // it.
      const size_t next = t == 1 ? (size_t)kPanel * steps : 0;
      const char* from = (const char*)x + first * stride * tiling.input_bytes;
      tiling.tile(last - first, w, blocks, steps, from, stride, next, sums);
      for (int r = first; r < last; r++) {
        float* row_sums = sums + (r - first) * kPanelWidth;
        if (tiling.output_scale != nullptr)
          for (int i = 0; i < width; i++) row_sums[i] *= tiling.output_scale[column + i];
        if (linear.bias != nullptr)
          for (int i = 0; i < width; i++) row_sums[i] += linear.bias[column + i];
        epilogue(r, offset + column, width, row_sums);
      }
    }
  }
}

// Calls epilogue(row, column, width, sums) for every row of x [rows, k], as the linear's format takes it, and every
// panel of the output blocks `mine`. sums holds width <= kPanelWidth outputs, from `column` on.
template <class Epilogue>
static void linear_rows(const AqLinear& linear, Share mine, const void* x, int rows, const Epilogue& epilogue) {
  int first = 0;
  for (const AqLinear* part = &linear; part != nullptr; part = part->rest) {
    const int blocks = (part->n + 15) / 16, end = mine.end - first;
    const Share own{mine.begin > first ? mine.begin - first : 0, end < blocks ? end : blocks};
    if (own.begin < own.end) part_rows(*part, own, first * 16, x, rows, epilogue);
    first += blocks;
  }
}

// The output blocks of one worker. They start at even ones, so that a gate block and its up block come together.
static Share share_blocks(const Worker& worker, const AqLinear& linear) {
  const int num_blocks = (aq::num_outputs(linear) + 15) / 16;
  const Share pairs = share(worker, (num_blocks + 1) / 2);
  return Share{2 * pairs.begin, 2 * pairs.end < num_blocks ? 2 * pairs.end : num_blocks};
}

static void linear_store(const AqLinear& linear, Share mine, const void* x, int rows, float* y) {
  const size_t stride = aq::num_outputs(linear);
  linear_rows(linear, mine, x, rows, [&](int row, int column, int width, const float* sums) {
    memcpy(y + row * stride + column, sums, width * sizeof(float));
  });
}

// Rows of x [rows, linear.k] as the linear takes them: float rows that it wants as codes are rounded into `codes`,
// other rows are taken to be what it wants. If they are few, every worker rounds all of them into a copy of its own,
// because that takes less time than a barrier.
static const void* rounded_rows(const Worker& worker, const AqLinear& linear, const void* x, int rows, Codes* codes) {
  if (!takes_codes(linear.dtype)) return x;
  const bool is_own = rows <= aq::kOwnRows;
  const size_t width = linear.k / 32;
  if (is_own) codes += worker.index * rows * width;
  const Share mine = is_own ? Share{0, rows} : share(worker, rows);
  for (size_t r = mine.begin; r < (size_t)mine.end; r++)
    store_codes(codes + r * width, (const float*)x + r * linear.k, linear.k);
  if (!is_own) worker.barrier();
  return codes;
}

// y += x w^T, for the residual stream.
static void linear_add(const Worker& worker, const AqLinear& linear, const void* x, int rows, float* y) {
  linear_rows(linear, share_blocks(worker, linear), x, rows, [&](int row, int column, int width, const float* sums) {
    float* to = y + (size_t)row * linear.n + column;
    for (int i = 0; i < width; i++) to[i] += sums[i];
  });
}

AQ_INLINE Vec activated(const AqMlp& mlp, Vec gate, Vec up) {
  if (mlp.activation == AQ_CLAMPED) return clamped_swiglu(gate, up, mlp.limit);
  return mlp.activation == AQ_GEGLU ? geglu(gate, up) : mul(silu(gate), up);
}

// Writes the activations of `width` sums, in which runs of 16 of gate and up alternate: half as many.
template <class Y> AQ_INLINE void store_activated(const AqMlp& mlp, const float* sums, int width, Y* y) {
  for (int i = 0; i < width; i += 32) store(y + i / 2, activated(mlp, load(sums + i), load(sums + i + 16)));
}

// y [rows, n / 2]: the activations of mlp.gate_up, as float or Rounded, whichever `down` takes.
static void linear_activated(const Worker& worker, const AqMlp& mlp, const void* x, int rows, void* y) {
  const bool is_rounded = takes_rounded(mlp.down.dtype);
  const Share mine = share_blocks(worker, mlp.gate_up);
  linear_rows(mlp.gate_up, mine, x, rows, [&](int row, int column, int width, const float* sums) {
    const size_t at = ((size_t)row * mlp.gate_up.n + column) / 2;
    if (is_rounded) store_activated(mlp, sums, width, (Rounded*)y + at);
    else store_activated(mlp, sums, width, (float*)y + at);
  });
}

template <class X> AQ_INLINE float norm_scale(const X* x, int width, float eps) {
  Vec squares = zero();
  for (int i = 0; i < width; i += 16) squares = fma(load(x + i), load(x + i), squares);
  return 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)width + eps);
}

// y = x / sqrt(mean(x^2) + eps) * weight; x may be y. width is a multiple of 16.
template <class X, class Y>
static void rms_norm_row(const X* x, const float* weight, int width, float eps, Y* y) {
  const float scale = norm_scale(x, width, eps);
  for (int i = 0; i < width; i += 16) store(y + i, mul(mul(load(x + i), set1(scale)), load(weight + i)));
}

// The same as codes; width is a multiple of 32.
template <class X>
static void rms_norm_row(const X* x, const float* weight, int width, float eps, Codes* y) {
  const float scale = norm_scale(x, width, eps);
  const auto normed = [&](int i) { return mul(mul(load(x + i), set1(scale)), load(weight + i)); };
  for (int i = 0; i < width; i += 32) store_codes(y + i / 32, normed(i), normed(i + 16));
}

// Writes the norm of x to y from element `at` on, as whatever `next` takes.
template <class X>
static void norm_into(const AqLinear& next, void* y, size_t at, const X* x, const float* weight, int width, float eps) {
  if (takes_codes(next.dtype)) rms_norm_row(x, weight, width, eps, (Codes*)y + at / 32);
  else if (takes_rounded(next.dtype)) rms_norm_row(x, weight, width, eps, (Rounded*)y + at);
  else rms_norm_row(x, weight, width, eps, (float*)y + at);
}

// Norms rows of x [*, next.k] (those that row_index names, if given) and returns what this worker hands to `next`. If
// the rows are few, every worker norms all of them into a copy of its own, because that takes less time than a barrier.
static const void* norm_rows(const Worker& worker, const float* x, const int32_t* row_index, int rows,
                             const float* weight, float eps, const AqLinear& next, float* normed) {
  const bool is_own = rows <= aq::kOwnRows;
  const size_t width = next.k;
  if (is_own) normed += worker.index * rows * width;  // as floats, the largest form
  const Share mine = is_own ? Share{0, rows} : share(worker, rows);
  for (int r = mine.begin; r < mine.end; r++)
    norm_into(next, normed, r * width, x + (row_index == nullptr ? r : row_index[r]) * width, weight, next.k, eps);
  if (!is_own) worker.barrier();
  return normed;
}

}  // namespace AQ_NAMESPACE
