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

// The integer sums stay in registers over a group, the float sums in memory. See `tile` for the arguments.
template <class F, int ROWS, int BLOCKS>
static __attribute__((noinline)) void integer_tile(const typename F::Step* w, int steps, const Codes* x, size_t stride,
                                                   size_t next, float* sums) {
  using Step = typename F::Step;
  constexpr int kAhead = kPrefetchBytes / BLOCKS / (int)sizeof(Step) + 1, kFours = F::kGroupInputs / 4;
  constexpr int kLines = ((int)sizeof(Step) + 63) / 64, kLinesOfGroup = (kLines + F::kGroups - 1) / F::kGroups;
  constexpr int kBias = F::kOffset - (F::kIsWide ? 128 - kByteBias : 0);
  for (int r = 0; r < ROWS; r++) memset(sums + r * kPanelWidth, 0, BLOCKS * 16 * sizeof(float));
  for (int i = 0; i < steps; i++) {
    const Step* ahead = w + (next != 0 ? next + i : ahead_of<BLOCKS>(i + kAhead, steps));
    for (int g = 0; g < F::kGroups; g++) {
      const int input = i * F::kChannels + g * F::kGroupInputs, half = input % 32 / 16;
      const Codes* in = x + input / 32;
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++)
#pragma GCC unroll 16
        for (int line = 0; line < kLinesOfGroup; line++)
          prefetch((const char*)(ahead + (size_t)b * steps) + (g * kLinesOfGroup + line) * 64);
      IVec sum[ROWS][BLOCKS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const Codes& row = in[r * stride];
        const int32_t minus = F::kGroupInputs == 32 ? row.minus
                              : half == 0           ? row.minus_first
                                                    : row.minus - row.minus_first;
        const IVec start = times<kBias>(iset1((uint32_t)minus));
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
      Vec scale[BLOCKS], minimum[BLOCKS];
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) {
        const Step& step = w[(size_t)b * steps + i];
        if constexpr (F::kHasScale) scale[b] = F::scale(step, g);
        if constexpr (F::kHasMinimum) minimum[b] = F::minimum(step, g);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const Codes& row = in[r * stride];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++) {
          float* at = sums + r * kPanelWidth + b * 16;
          Vec factor = set1(row.scale);
          if constexpr (F::kHasScale) factor = mul(factor, scale[b]);
          Vec total = fma(to_float(sum[r][b]), factor, load(at));
          if constexpr (F::kHasMinimum) total = fma(minimum[b], set1(row.total), total);
          store(at, total);
        }
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

}  // namespace AQ_NAMESPACE
