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

using aq::Group;
using aq::Pair;
using aq::Unpaired;
using aq::Worker;

constexpr int kPanel = 4;                // output blocks computed before moving on: they stay in L2 for all row tiles
constexpr int kPanelWidth = kPanel * 16;
constexpr int kTileRows = 6;
constexpr int kPrefetchBytes = 8192;  // ahead, over all blocks of a tile: a stream alone needs more

constexpr int blocks_for(int rows) { return rows * 4 <= kAccumulators || rows == 1 ? 4 : rows * 2 <= kAccumulators ? 2 : 1; }

// Contiguous share of worker.index among `count` items.
struct Share {
  int begin, end;
};
AQ_INLINE Share share(const Worker& worker, int count) {
  return Share{(int)((int64_t)count * worker.index / worker.count),
               (int)((int64_t)count * (worker.index + 1) / worker.count)};
}

// How weights W meet inputs X, k of them. kRows: of a tile; the bfloat16 dot product (pairs by pairs) is so fast that
// weights should serve more rows. block(k): the weights of one block of outputs.
template <class W, class X> struct Tiling {
  static constexpr int kRows = kTileRows;
  static constexpr size_t block(int k) { return (size_t)k * 16; }
};
template <> struct Tiling<Pair, Pair> : Tiling<float, float> { static constexpr int kRows = 8; };
template <> struct Tiling<Pair, float> : Tiling<float, float> {
  static constexpr size_t block(int k) { return (size_t)k * 8; }
};
template <> struct Tiling<Group, float> : Tiling<float, float> {
  static constexpr size_t block(int k) { return (size_t)k / AQ_GROUP; }
};

// Where the weights of step i of a block, of `steps` of `size` weights, lie behind its first. Past the end of its block a
// stream continues in the next panel, not in its neighbour.
template <int BLOCKS> constexpr size_t ahead_of(int i, int steps, int size) {
  return ((size_t)i + (i < steps ? 0 : (size_t)(BLOCKS - 1) * steps)) * size;
}

// sums[r * kPanelWidth + 16 b + lane] for ROWS rows and BLOCKS consecutive blocks of k steps, a multiple of 4. next: how
// far behind each weight the one lies that is to be fetched meanwhile; 0 for what this tile itself reads a little later.
// The loops over rows and blocks carry an unroll pragma because GCC otherwise keeps the sums in memory.
template <int ROWS, int BLOCKS, class W, class X>
static __attribute__((noinline)) void tile(const W* w, int k, const X* x, size_t next, float* sums) {
  constexpr int kUnroll = 4;
  constexpr int kAhead = kPrefetchBytes / BLOCKS / (int)(16 * sizeof(W));  // steps of k
  const size_t block = (size_t)k * 16;
  Vec sum[ROWS][BLOCKS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) sum[r][b] = zero();
  for (int i = 0; i < k; i += kUnroll) {
    const W* ahead = w + (next != 0 ? next + (size_t)i * 16 : ahead_of<BLOCKS>(i + kAhead, k, 16));
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++)
#pragma GCC unroll 8
      for (int line = 0; line < kUnroll * 16 * (int)sizeof(W); line += 64) prefetch((const char*)(ahead + b * block) + line);
#pragma GCC unroll 8
    for (int u = 0; u < kUnroll; u++) {
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) {
        const auto weight = load(w + b * block + (size_t)(i + u) * 16);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sum[r][b] = fma(set1(x[(size_t)r * k + i + u]), weight, sum[r][b]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) store(sums + r * kPanelWidth + b * 16, sum[r][b]);
}

// The same over bfloat16 pairs, whose halves become two weights by one operation each.
template <int ROWS, int BLOCKS>
static __attribute__((noinline)) void tile(const Pair* w, int k, const float* x, size_t next, float* sums) {
  constexpr int kUnroll = 2;
  constexpr int kAhead = kPrefetchBytes / BLOCKS / (int)(16 * sizeof(Pair));
  const int num_pairs = k / 2;
  const size_t block = (size_t)num_pairs * 16;
  Vec sum[ROWS][BLOCKS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) sum[r][b] = zero();
  for (int i = 0; i < num_pairs; i += kUnroll) {
    const Pair* ahead = w + (next != 0 ? next + (size_t)i * 16 : ahead_of<BLOCKS>(i + kAhead, num_pairs, 16));
#pragma GCC unroll 8
    for (int u = 0; u < kUnroll; u++) {
      const Pair* pairs = w + (size_t)(i + u) * 16;
      const float* inputs = x + 2 * (i + u);
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) {
        const Vec weight = first(pairs + b * block);
        prefetch(ahead + b * block + u * 16);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sum[r][b] = fma(set1(inputs[(size_t)r * k]), weight, sum[r][b]);
      }
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) {
        const Vec weight = second(pairs + b * block);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sum[r][b] = fma(set1(inputs[(size_t)r * k + 1]), weight, sum[r][b]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) store(sums + r * kPanelWidth + b * 16, sum[r][b]);
}

// The same over int4 groups: the sum of a group stays in registers, and its scaled value joins those in memory.
template <int ROWS, int BLOCKS>
static __attribute__((noinline)) void tile(const Group* w, int k, const float* x, size_t next, float* sums) {
  constexpr int kAhead = kPrefetchBytes / BLOCKS / (int)sizeof(Group);
  const int num_groups = k / AQ_GROUP;
  for (int r = 0; r < ROWS; r++) memset(sums + r * kPanelWidth, 0, BLOCKS * 16 * sizeof(float));
  for (int g = 0; g < num_groups; g++, x += AQ_GROUP) {
    const Group* ahead = w + (next != 0 ? next + g : ahead_of<BLOCKS>(g + kAhead, num_groups, 1));
    Vec sum[ROWS][BLOCKS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) sum[r][b] = zero();
    for (int i = 0; i < AQ_GROUP / 8; i++) {
      IVec codes[BLOCKS];
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) {
        codes[b] = iload(w[b * num_groups + g].codes[i]);
        prefetch(ahead[b * num_groups].codes[i]);
      }
#pragma GCC unroll 8
      for (int u = 0; u < 8; u++) {
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++) {
          const Vec weight = nibble(codes[b], u);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) sum[r][b] = fma(set1(x[(size_t)r * k + i * 8 + u]), weight, sum[r][b]);
        }
      }
    }
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) {
      const Vec scale = load(w[b * num_groups + g].scale);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        float* total = sums + r * kPanelWidth + b * 16;
        store(total, fma(sum[r][b], scale, load(total)));
      }
    }
  }
}

// ROWS rows by num_blocks <= kPanel blocks, in the widest tiles that fit the registers.
template <int ROWS, class W, class X>
static void row_tile(const W* w, int num_blocks, int k, const X* x, size_t next, float* sums) {
  constexpr int kBlocks = blocks_for(ROWS);
  for (int b = 0; b < num_blocks;) {
    const W* from = w + b * Tiling<W, X>::block(k);
    const int left = num_blocks - b;
    if (kBlocks >= 4 && left >= 4) {
      tile<ROWS, kBlocks >= 4 ? 4 : 1>(from, k, x, next, sums + b * 16), b += 4;
    } else if (kBlocks >= 2 && left >= 2) {
      tile<ROWS, kBlocks >= 2 ? 2 : 1>(from, k, x, next, sums + b * 16), b += 2;
    } else {
      tile<ROWS, 1>(from, k, x, next, sums + b * 16), b += 1;
    }
  }
}

template <class W, class X>
static void any_tile(int rows, const W* w, int num_blocks, int k, const X* x, size_t next, float* sums) {
  constexpr int kRows = Tiling<W, X>::kRows;
  switch (rows) {
    case 1: row_tile<1>(w, num_blocks, k, x, next, sums); break;
    case 2: row_tile<2>(w, num_blocks, k, x, next, sums); break;
    case 3: row_tile<3>(w, num_blocks, k, x, next, sums); break;
    case 4: row_tile<4>(w, num_blocks, k, x, next, sums); break;
    case 5: row_tile<5>(w, num_blocks, k, x, next, sums); break;
    case 6: row_tile<6>(w, num_blocks, k, x, next, sums); break;
    case 7: row_tile<kRows == 8 ? 7 : 6>(w, num_blocks, k, x, next, sums); break;
    default: row_tile<kRows>(w, num_blocks, k, x, next, sums); break;
  }
}

#if !defined(AQ_DOT)
static void any_tile(int rows, const Pair* w, int num_blocks, int num_pairs, const Pair* x, size_t next, float* sums) {
  aq::dot_tile(rows, w, num_blocks, num_pairs, x, next, sums);
}

// Calls epilogue(row, column, width, sums) for every row and panel of output blocks `mine`, of k steps each; width <=
// kPanelWidth columns are valid.
template <class W, class X, class Epilogue>
static void panels(const AqLinear& linear, int k, Share mine, const X* x, int rows, const Epilogue& epilogue) {
  constexpr int kRows = Tiling<W, X>::kRows;
  const int num_tiles = (rows + kRows - 1) / kRows;
  const float* scale = aq::output_scale(linear);
  for (int block = mine.begin; block < mine.end; block += kPanel) {
    const W* w = (const W*)linear.weight + block * Tiling<W, X>::block(k);
    const int blocks = mine.end - block < kPanel ? mine.end - block : kPanel;
    const int column = block * 16;
    const int width = linear.n - column < blocks * 16 ? linear.n - column : blocks * 16;
    for (int t = 0; t < num_tiles; t++) {  // balanced: 8 rows by 6 are 4 + 4, not 6 + 2
      const int first = (int)((int64_t)rows * t / num_tiles), last = (int)((int64_t)rows * (t + 1) / num_tiles);
      alignas(64) float sums[kRows * kPanelWidth];
      // The first tile streams the panel from memory, the second the next panel into L2: no tile has to wait for all of it.
      const size_t next = t == 1 ? kPanel * Tiling<W, X>::block(k) : 0;
      any_tile(last - first, w, blocks, k, x + (size_t)first * k, next, sums);
      for (int r = first; r < last; r++) {
        float* row_sums = sums + (r - first) * kPanelWidth;
        if (scale != nullptr)
          for (int i = 0; i < width; i++) row_sums[i] *= scale[column + i];
        if (linear.bias != nullptr)
          for (int i = 0; i < width; i++) row_sums[i] += linear.bias[column + i];
        epilogue(r, column, width, row_sums);
      }
    }
  }
}

AQ_INLINE bool takes_bfloat16(const AqLinear& linear) { return linear.dtype == AQ_BFLOAT16_DOT; }

// x [rows, k] is float, or bfloat16 where the linear takes that.
template <class Epilogue>
static void linear_rows(const AqLinear& linear, Share mine, const void* x, int rows, const Epilogue& epilogue) {
  switch (linear.dtype) {
    case AQ_BFLOAT16_DOT: panels<Pair>(linear, linear.k / 2, mine, (const Pair*)x, rows, epilogue); break;
    case AQ_BFLOAT16: panels<Pair>(linear, linear.k, mine, (const float*)x, rows, epilogue); break;
    case AQ_INT8: panels<int8_t>(linear, linear.k, mine, (const float*)x, rows, epilogue); break;
    case AQ_INT4: panels<Group>(linear, linear.k, mine, (const float*)x, rows, epilogue); break;
    default: panels<float>(linear, linear.k, mine, (const float*)x, rows, epilogue);
  }
}

// The output blocks of one worker. They start at even ones, so that a gate block and its up block come together.
static Share share_blocks(const Worker& worker, const AqLinear& linear) {
  const int num_blocks = (linear.n + 15) / 16;
  const Share pairs = share(worker, (num_blocks + 1) / 2);
  return Share{2 * pairs.begin, 2 * pairs.end < num_blocks ? 2 * pairs.end : num_blocks};
}

static void linear_store(const AqLinear& linear, Share mine, const void* x, int rows, float* y) {
  linear_rows(linear, mine, x, rows, [&](int row, int column, int width, const float* sums) {
    memcpy(y + (size_t)row * linear.n + column, sums, width * sizeof(float));
  });
}

// y += x w^T, for the residual stream; `copy` (or NULL) also gets the new values, its rows copy_stride apart.
static void linear_add(const Worker& worker, const AqLinear& linear, const void* x, int rows, float* y, float* copy = nullptr,
                       size_t copy_stride = 0) {
  linear_rows(linear, share_blocks(worker, linear), x, rows, [&](int row, int column, int width, const float* sums) {
    float* to = y + (size_t)row * linear.n + column;
    for (int i = 0; i < width; i++) to[i] += sums[i];
    if (copy != nullptr) memcpy(copy + row * copy_stride + column, to, width * sizeof(float));
  });
}

template <class Y>
AQ_INLINE void swiglu_run(const float* gate_up, Y* y) {
  store(y, mul(silu(load(gate_up)), load(gate_up + 16)));
}

// y [rows, n / 2] = silu(gate) * up, as `next` takes it, for a weight whose gate and up rows alternate in runs of 16.
static void linear_swiglu(const Worker& worker, const AqLinear& linear, const void* x, int rows, const AqLinear& next, void* y) {
  linear_rows(linear, share_blocks(worker, linear), x, rows, [&](int row, int column, int width, const float* sums) {
    const size_t at = ((size_t)row * linear.n + column) / 2;
    for (int i = 0; i < width; i += 32)
      if (takes_bfloat16(next)) swiglu_run(sums + i, (uint16_t*)y + at + i / 2);
      else swiglu_run(sums + i, (float*)y + at + i / 2);
  });
}

// y = x / sqrt(mean(x^2) + eps) * weight; x may be y. width is a multiple of 16.
template <class X, class Y>
static void rms_norm_row(const X* x, const float* weight, int width, float eps, Y* y) {
  Vec squares = zero();
  for (int i = 0; i < width; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)width + eps);
  for (int i = 0; i < width; i += 16) store(y + i, mul(mul(load(x + i), set1(scale)), load(weight + i)));
}

// The norm of x as `next` takes it, from element `at` of its input y on.
template <class X>
static void norm_into(const AqLinear& next, void* y, size_t at, const X* x, const float* weight, int width, float eps) {
  if (takes_bfloat16(next)) rms_norm_row(x, weight, width, eps, (uint16_t*)y + at);
  else rms_norm_row(x, weight, width, eps, (float*)y + at);
}

// The normed rows of x [*, next.k] (those that row_index names, if given) for this worker to hand to `next`. Few rows are
// normed by every worker into a copy of its own, the same bits: that takes less time than meeting.
static const void* norm_rows(const Worker& worker, const float* x, const int32_t* row_index, int rows, const float* weight,
                             float eps, const AqLinear& next, float* normed) {
  const bool is_own = rows <= aq::kOwnRows;
  const size_t width = next.k;
  if (is_own) normed += worker.index * rows * width;
  const Share mine = is_own ? Share{0, rows} : share(worker, rows);
  for (int r = mine.begin; r < mine.end; r++)
    norm_into(next, normed, r * width, x + (row_index == nullptr ? r : row_index[r]) * width, weight, next.k, eps);
  if (!is_own) worker.barrier();
  return normed;
}

#endif  // AQ_DOT

}  // namespace AQ_NAMESPACE
