// y = x w^T over packed weights: every output is one chain of fused multiply-adds in k order, whatever the number of
// rows and threads.
//
// A tile keeps ROWS x BLOCKS sums of 16 outputs in registers and streams BLOCKS weight blocks at once. With few rows
// several blocks give enough independent chains to hide the latency of an FMA and enough streams for the memory; with
// many rows the registers go to rows, each weight then serving several FMAs. Workers split the output blocks.
#pragma once
#include "kernels.h"
#include "math.h"

namespace AQ_NAMESPACE {

using aq::Worker;

constexpr int kPanel = 4;                // output blocks computed before moving on: they stay in L2 for all row tiles
constexpr int kPanelWidth = kPanel * 16;
constexpr int kTileRows = 6;
constexpr int kPrefetchBytes = 2048;

constexpr int blocks_for(int rows) { return rows * 4 <= kAccumulators || rows == 1 ? 4 : rows * 2 <= kAccumulators ? 2 : 1; }

// Contiguous share of worker.index among `count` items.
struct Share {
  int begin, end;
};
AQ_INLINE Share share(const Worker& worker, int count) {
  return Share{(int)((int64_t)count * worker.index / worker.count),
               (int)((int64_t)count * (worker.index + 1) / worker.count)};
}

// sums[r * kPanelWidth + 16 b + lane] for ROWS rows and BLOCKS consecutive blocks; k is a multiple of 16. The loops
// over rows and blocks carry an unroll pragma because GCC otherwise keeps the sums in memory.
template <int ROWS, int BLOCKS, class W>
static __attribute__((noinline)) void tile(const W* w, int k, const float* x, size_t x_stride, float* sums) {
  constexpr int kUnroll = 4;
  constexpr int kAhead = kPrefetchBytes / (int)(16 * sizeof(W));  // steps of k
  const size_t block = (size_t)k * 16;
  Vec sum[ROWS][BLOCKS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) sum[r][b] = zero();
  for (int i = 0; i < k; i += kUnroll) {
    // Past the end of its block a stream continues in the next panel, not in its neighbour.
    const W* ahead = w + (size_t)(i + kAhead) * 16 + (i + kAhead < k ? 0 : (BLOCKS - 1) * block);
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++)
#pragma GCC unroll 8
      for (int line = 0; line < kUnroll * 16 * (int)sizeof(W); line += 64) prefetch((const char*)(ahead + b * block) + line);
#pragma GCC unroll 8
    for (int u = 0; u < kUnroll; u++) {
      Vec weight[BLOCKS];
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) weight[b] = load(w + b * block + (size_t)(i + u) * 16);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const Vec value = set1(x[r * x_stride + i + u]);
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++) sum[r][b] = fma(value, weight[b], sum[r][b]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) store(sums + r * kPanelWidth + b * 16, sum[r][b]);
}

// ROWS rows by num_blocks <= kPanel blocks, in the widest tiles that fit the registers.
template <int ROWS, class W>
static void row_tile(const W* w, int num_blocks, int k, const float* x, size_t x_stride, float* sums) {
  constexpr int kBlocks = blocks_for(ROWS);
  for (int b = 0; b < num_blocks;) {
    const W* from = w + (size_t)b * k * 16;
    const int left = num_blocks - b;
    if (kBlocks >= 4 && left >= 4) {
      tile<ROWS, kBlocks >= 4 ? 4 : 1>(from, k, x, x_stride, sums + b * 16), b += 4;
    } else if (kBlocks >= 2 && left >= 2) {
      tile<ROWS, kBlocks >= 2 ? 2 : 1>(from, k, x, x_stride, sums + b * 16), b += 2;
    } else {
      tile<ROWS, 1>(from, k, x, x_stride, sums + b * 16), b += 1;
    }
  }
}

// Calls epilogue(row, column, width, sums) for every row and panel of this worker; width <= kPanelWidth columns are
// valid. Panels start at even blocks, so a gate block and its up block come together.
template <class W, class Epilogue>
static void linear_rows(const Worker& worker, const AqLinear& linear, const float* x, size_t x_stride, int rows,
                        const Epilogue& epilogue) {
  const int k = linear.k, num_blocks = (linear.n + 15) / 16;
  const Share pairs = share(worker, (num_blocks + 1) / 2);
  const int end = 2 * pairs.end < num_blocks ? 2 * pairs.end : num_blocks;
  const int num_tiles = (rows + kTileRows - 1) / kTileRows;
  for (int block = 2 * pairs.begin; block < end; block += kPanel) {
    const W* w = (const W*)linear.weight + (size_t)block * k * 16;
    const int blocks = end - block < kPanel ? end - block : kPanel;
    const int column = block * 16;
    const int width = linear.n - column < blocks * 16 ? linear.n - column : blocks * 16;
    for (int t = 0; t < num_tiles; t++) {  // balanced: 8 rows are 4 + 4, not 6 + 2
      const int first = (int)((int64_t)rows * t / num_tiles), last = (int)((int64_t)rows * (t + 1) / num_tiles);
      const float* from = x + first * x_stride;
      alignas(64) float sums[kTileRows * kPanelWidth];
      switch (last - first) {
        case 1: row_tile<1>(w, blocks, k, from, x_stride, sums); break;
        case 2: row_tile<2>(w, blocks, k, from, x_stride, sums); break;
        case 3: row_tile<3>(w, blocks, k, from, x_stride, sums); break;
        case 4: row_tile<4>(w, blocks, k, from, x_stride, sums); break;
        case 5: row_tile<5>(w, blocks, k, from, x_stride, sums); break;
        default: row_tile<6>(w, blocks, k, from, x_stride, sums); break;
      }
      for (int r = first; r < last; r++) {
        float* row_sums = sums + (r - first) * kPanelWidth;
        if (linear.bias != nullptr)
          for (int i = 0; i < width; i++) row_sums[i] += linear.bias[column + i];
        epilogue(r, column, width, row_sums);
      }
    }
  }
}

template <class Epilogue>
static void linear_rows(const Worker& worker, const AqLinear& linear, const float* x, int rows, const Epilogue& epilogue) {
  if (linear.dtype == AQ_BFLOAT16) linear_rows<uint16_t>(worker, linear, x, linear.k, rows, epilogue);
  else linear_rows<float>(worker, linear, x, linear.k, rows, epilogue);
}

static void linear_store(const Worker& worker, const AqLinear& linear, const float* x, int rows, float* y) {
  linear_rows(worker, linear, x, rows, [&](int row, int column, int width, const float* sums) {
    memcpy(y + (size_t)row * linear.n + column, sums, width * sizeof(float));
  });
}

// y += x w^T, for the residual stream.
static void linear_add(const Worker& worker, const AqLinear& linear, const float* x, int rows, float* y) {
  linear_rows(worker, linear, x, rows, [&](int row, int column, int width, const float* sums) {
    float* to = y + (size_t)row * linear.n + column;
    for (int i = 0; i < width; i++) to[i] += sums[i];
  });
}

AQ_INLINE void swiglu_run(const float* gate_up, float* y) {
  store(y, mul(silu(load(gate_up)), load(gate_up + 16)));
}

// y [rows, n / 2] = silu(gate) * up for a weight whose gate and up rows alternate in runs of 16.
static void linear_swiglu(const Worker& worker, const AqLinear& linear, const float* x, int rows, float* y) {
  linear_rows(worker, linear, x, rows, [&](int row, int column, int width, const float* sums) {
    float* to = y + ((size_t)row * linear.n + column) / 2;
    for (int i = 0; i < width; i += 32) swiglu_run(sums + i, to + i / 2);
  });
}

// y = x / sqrt(mean(x^2) + eps) * weight; x may be y. width is a multiple of 16.
static void rms_norm_row(const float* x, const float* weight, int width, float eps, float* y) {
  Vec squares = zero();
  for (int i = 0; i < width; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)width + eps);
  for (int i = 0; i < width; i += 16) store(y + i, mul(mul(load(x + i), set1(scale)), load(weight + i)));
}

}  // namespace AQ_NAMESPACE
