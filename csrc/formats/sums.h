// Accumulators: how the products of a tile of ROWS rows by BLOCKS blocks of 16 outputs become sums. The tile (tile.h)
// keeps one Vec of sums per row and block in registers and writes sums [ROWS][kPanelWidth].
//
// The loops carry an unroll pragma because GCC otherwise keeps the registers in memory.
#pragma once
#include "simd/simd.h"

namespace AQ_NAMESPACE {

constexpr int kPanel = 4;  // output blocks computed before moving on: they stay in L2 for all row tiles
constexpr int kPanelWidth = kPanel * 16;

template <int ROWS, int BLOCKS> AQ_INLINE void clear(Vec (&sum)[ROWS][BLOCKS]) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) sum[r][b] = zero();
}

// Every sum is one chain of fused multiply-adds over k, in order.
struct InOrder {
  template <int ROWS, int BLOCKS> AQ_INLINE void start(Vec (&sum)[ROWS][BLOCKS], float*) { clear(sum); }
  template <int ROWS, int BLOCKS> AQ_INLINE void open(Vec (&)[ROWS][BLOCKS]) {}
  template <class Step, int ROWS, int BLOCKS>
  AQ_INLINE void close(Vec (&)[ROWS][BLOCKS], const Step*, size_t, float*) {}
  template <int ROWS, int BLOCKS> AQ_INLINE void finish(Vec (&sum)[ROWS][BLOCKS], float* sums) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) store(sums + r * kPanelWidth + b * 16, sum[r][b]);
  }
};

// The same, going on from the sums in memory.
struct OnTop : InOrder {
  template <int ROWS, int BLOCKS> AQ_INLINE void start(Vec (&sum)[ROWS][BLOCKS], float* sums) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) sum[r][b] = load(sums + r * kPanelWidth + b * 16);
  }
};

// Every step is a chain of its own that starts from zero; sum = fma(chain, scale_of(step), sum) over the steps in
// order. The chain stays in registers, the sum in memory.
struct InGroups {
  template <int ROWS, int BLOCKS> AQ_INLINE void start(Vec (&)[ROWS][BLOCKS], float* sums) {
    for (int r = 0; r < ROWS; r++) memset(sums + r * kPanelWidth, 0, BLOCKS * 16 * sizeof(float));
  }
  template <int ROWS, int BLOCKS> AQ_INLINE void open(Vec (&sum)[ROWS][BLOCKS]) { clear(sum); }
  // step: the current step of the first block. The same step of the next block lies `block` steps further on.
  template <class Step, int ROWS, int BLOCKS>
  AQ_INLINE void close(Vec (&sum)[ROWS][BLOCKS], const Step* step, size_t block, float* sums) {
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) {
      const Vec scale = scale_of(step[b * block]);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        float* total = sums + r * kPanelWidth + b * 16;
        store(total, fma(sum[r][b], scale, load(total)));
      }
    }
  }
  template <int ROWS, int BLOCKS> AQ_INLINE void finish(Vec (&)[ROWS][BLOCKS], float*) {}
};

}  // namespace AQ_NAMESPACE
