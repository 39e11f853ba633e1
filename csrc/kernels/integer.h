// The tile of a linear in the third arithmetic (formats/integer_dot.h): rows of rounded inputs by blocks of 16 outputs.
// Compiled apart, for the instructions that integer dot products have (integer.cpp).
#pragma once
#include "kernels.h"
#include "tile.h"

namespace AQ_NAMESPACE {

constexpr int integer_blocks_for(int rows) { return rows * 4 <= kIntegerSums ? 4 : rows * 2 <= kIntegerSums ? 2 : 1; }

// x * factor, by shifts.
template <int factor> AQ_INLINE IVec times(IVec x) {
  if constexpr (factor == 0) return iset1(0);
  else if constexpr ((factor & (factor - 1)) == 0) return shl<__builtin_ctz(factor)>(x);
  else return iadd(times<(factor & -factor)>(x), times<(factor & (factor - 1))>(x));
}

// Minus the sum of a row's codes in a group, which may be a half of 32 inputs.
template <class F> AQ_INLINE int32_t minus_of(const Codes& row, int half) {
  return F::kGroupInputs == 32 ? row.minus : half == 0 ? row.minus_first : row.minus - row.minus_first;
}

// Prefetches, at group g of step i, its share of a step further on (`tile` says which), of all blocks.
template <class F, int BLOCKS>
AQ_INLINE void prefetch_group(const typename F::Step* w, int i, int g, int steps, size_t next) {
  using Step = typename F::Step;
  constexpr int kAhead = kPrefetchBytes / BLOCKS / (int)sizeof(Step) + 1;
  constexpr int kLines = ((int)sizeof(Step) + 63) / 64, kLinesOfGroup = (kLines + F::kGroups - 1) / F::kGroups;
  const Step* ahead = w + (next != 0 ? next + i : ahead_of<BLOCKS>(i + kAhead, steps));
#pragma GCC unroll 8
  for (int b = 0; b < BLOCKS; b++)
#pragma GCC unroll 16
    for (int line = 0; line < kLinesOfGroup; line++)
      prefetch((const char*)(ahead + (size_t)b * steps) + (g * kLinesOfGroup + line) * 64);
}

// What a block multiplies the integer sums of group g with.
template <class F> struct Factors {
  Vec scale, minimum;
  AQ_MEMBER Factors() = default;
  AQ_MEMBER Factors(const typename F::Step& step, int g) {
    if constexpr (F::kHasScale) scale = F::scale(step, g);
    if constexpr (F::kHasMinimum) minimum = F::minimum(step, g);
  }
  // Adds a row's integer sums to its float sums.
  AQ_MEMBER void fold(IVec sum, const Codes& row, float* at) const {
    Vec factor = set1(row.scale);
    if constexpr (F::kHasScale) factor = mul(factor, scale);
    Vec total = fma(to_float(sum), factor, load(at));
    if constexpr (F::kHasMinimum) total = fma(minimum, set1(row.total), total);
    store(at, total);
  }
};

// The integer sums stay in registers over a group, the float sums in memory. See `tile` for the arguments.
template <class F, int ROWS, int BLOCKS>
static __attribute__((noinline)) void integer_tile(const typename F::Step* w, int steps, const Codes* x, size_t stride,
                                                   size_t next, float* sums) {
  constexpr int kFours = F::kGroupInputs / 4;
  constexpr int kBias = F::kOffset - (F::kIsWide ? 128 - kByteBias : 0);
  for (int r = 0; r < ROWS; r++) memset(sums + r * kPanelWidth, 0, BLOCKS * 16 * sizeof(float));
  for (int i = 0; i < steps; i++) {
    for (int g = 0; g < F::kGroups; g++) {
      const int input = i * F::kChannels + g * F::kGroupInputs, half = input % 32 / 16;
      const Codes* in = x + input / 32;
      prefetch_group<F, BLOCKS>(w, i, g, steps, next);
      IVec sum[ROWS][BLOCKS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const IVec start = times<kBias>(iset1((uint32_t)minus_of<F>(in[r * stride], half)));
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++) sum[r][b] = start;
      }
#pragma GCC unroll 8
      for (int q = 0; q < kFours; q++) {
        IVec codes[BLOCKS];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++) codes[b] = F::codes(w[(size_t)b * steps + i], g, q);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const uint32_t four = in[r * stride].words[half * 4 + q];
#pragma GCC unroll 8
          for (int b = 0; b < BLOCKS; b++)
            if constexpr (F::kIsWide) sum[r][b] = dot_bytes(sum[r][b], codes[b], four);
            else sum[r][b] = dot(sum[r][b], codes[b], four);
        }
      }
      // Row by row: with the blocks outside, a scale of every row would stay in a register beside all sums.
      Factors<F> factors[BLOCKS];
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) factors[b] = Factors<F>(w[(size_t)b * steps + i], g);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++) factors[b].fold(sum[r][b], in[r * stride], sums + r * kPanelWidth + b * 16);
      }
    }
  }
}

template <class F, int ROWS>
static void integer_rows(const typename F::Step* w, int num_blocks, int steps, const Codes* x, size_t stride,
                         size_t next, float* sums) {
  constexpr int kBlocks = integer_blocks_for(ROWS);
  for (int b = 0; b < num_blocks;) {
    const typename F::Step* from = w + (size_t)b * steps;
    const int left = num_blocks - b;
    if (kBlocks >= 4 && left >= 4) {
      integer_tile<F, ROWS, kBlocks >= 4 ? 4 : 1>(from, steps, x, stride, next, sums + b * 16), b += 4;
    } else if (kBlocks >= 2 && left >= 2) {
      integer_tile<F, ROWS, kBlocks >= 2 ? 2 : 1>(from, steps, x, stride, next, sums + b * 16), b += 2;
    } else {
      integer_tile<F, ROWS, 1>(from, steps, x, stride, next, sums + b * 16), b += 1;
    }
  }
}

template <class F, int ROWS = kIntegerRows>
static void any_integer_tile(int rows, const void* w, int num_blocks, int steps, const void* x, size_t stride,
                             size_t next, float* sums) {
  if (rows == ROWS) {
    integer_rows<F, ROWS>((const typename F::Step*)w, num_blocks, steps, (const Codes*)x, stride, next, sums);
  } else if constexpr (ROWS > 1) {
    any_integer_tile<F, ROWS - 1>(rows, w, num_blocks, steps, x, stride, next, sums);
  }
}

// The tile of a format that takes Codes: what choose(format) says.
template <class Choose> AQ_INLINE aq::TileFunction integer_tile_of(int dtype, const Choose& choose) {
  aq::TileFunction tile = nullptr;
  with_format(dtype, [&](auto format) {
    if constexpr (kIsSame<typename decltype(format)::Input, Codes>) tile = choose(format);
  });
  return tile;
}

}  // namespace AQ_NAMESPACE
