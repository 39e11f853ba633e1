// The tile of a linear: rows by blocks of 16 outputs, over the packed weights of one format.
//
// A tile keeps ROWS x BLOCKS sums of 16 outputs in registers and streams BLOCKS weight blocks at once. With few rows
// several blocks give enough independent chains to hide the latency of an FMA and enough streams for the memory; with
// many rows the registers go to rows, each weight then serving several FMAs.
#pragma once
#include "formats/formats.h"

namespace AQ_NAMESPACE {

constexpr int kTileRows = Format::kRows, kMostRows = 32;  // of a tile: in float32 arithmetic, in any
constexpr int kPrefetchBytes = 8192;  // ahead, over all blocks of a tile: a stream alone needs more

constexpr int blocks_for(int rows) {
  return rows * 4 <= kAccumulators || rows == 1 ? 4 : rows * 2 <= kAccumulators ? 2 : 1;
}

// The offset of step i from the first step of a block of `steps`. Past the end of its block a stream continues in the
// next panel, not in the neighbouring block.
template <int BLOCKS> constexpr size_t ahead_of(int i, int steps) {
  return (size_t)i + (i < steps ? 0 : (size_t)(BLOCKS - 1) * steps);
}

// Computes sums[r * kPanelWidth + 16 b + lane] for ROWS rows and BLOCKS consecutive blocks. next: at step i the tile
// prefetches step i + next; with next = 0 it prefetches what it reads itself a little later. stride: inputs from one
// row of x to the next. The loops over rows and blocks carry an unroll pragma because GCC otherwise keeps the sums in
// memory.
template <class F, int ROWS, int BLOCKS>
static __attribute__((noinline)) void tile(const typename F::Step* w, int steps, const typename F::Input* x,
                                           size_t stride, size_t next, float* sums) {
  using Step = typename F::Step;
  constexpr int kAhead = kPrefetchBytes / BLOCKS / (int)sizeof(Step);
  constexpr int kUnits = F::kParts * F::kUnits, kInputs = kUnits * F::kRun;
  constexpr int kUnitBytes = (int)(sizeof(Step) - F::kUnitsFrom) / kUnits;
  Vec sum[ROWS][BLOCKS];
  F::Sum::start(sum, sums);
  for (int i = 0; i < steps; i++) {
    const Step* ahead = w + (next != 0 ? next + i : ahead_of<BLOCKS>(i + kAhead, steps));
    F::Sum::open(sum);
    for (int part = 0; part < F::kParts; part++) {
#pragma GCC unroll 8
      for (int u = 0; u < F::kUnits; u++) {
        const int index = part * F::kUnits + u;
        decltype(F::unit(*w, 0)) unit[BLOCKS];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++) {
          unit[b] = F::unit(w[(size_t)b * steps + i], index);
          if (index * kUnitBytes % 64 == 0)  // a line
            prefetch((const char*)(ahead + (size_t)b * steps) + F::kUnitsFrom + index * kUnitBytes);
        }
#pragma GCC unroll 8
        for (int j = 0; j < F::kRun; j++) {
#pragma GCC unroll 8
          for (int b = 0; b < BLOCKS; b++) {
            const auto weight = F::weight(unit[b], j);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
              sum[r][b] = fma(set1(x[r * stride + i * kInputs + index * F::kRun + j]), weight, sum[r][b]);
          }
        }
      }
    }
    F::Sum::close(sum, w + i, steps, sums);
  }
  F::Sum::finish(sum, sums);
}

// ROWS rows by num_blocks <= kPanel blocks, in the widest tiles that fit the registers.
template <class F, int ROWS>
static void row_tile(const typename F::Step* w, int num_blocks, int steps, const typename F::Input* x, size_t stride,
                     size_t next, float* sums) {
  constexpr int kBlocks = blocks_for(ROWS);
  for (int b = 0; b < num_blocks;) {
    const typename F::Step* from = w + (size_t)b * steps;
    const int left = num_blocks - b;
    if (kBlocks >= 4 && left >= 4) {
      tile<F, ROWS, kBlocks >= 4 ? 4 : 1>(from, steps, x, stride, next, sums + b * 16), b += 4;
    } else if (kBlocks >= 2 && left >= 2) {
      tile<F, ROWS, kBlocks >= 2 ? 2 : 1>(from, steps, x, stride, next, sums + b * 16), b += 2;
    } else {
      tile<F, ROWS, 1>(from, steps, x, stride, next, sums + b * 16), b += 1;
    }
  }
}

template <class F>
static void any_tile(int rows, const typename F::Step* w, int num_blocks, int steps, const typename F::Input* x,
                     size_t stride, size_t next, float* sums) {
  constexpr int kRows = F::kRows;
  switch (rows) {
    case 1: row_tile<F, 1>(w, num_blocks, steps, x, stride, next, sums); break;
    case 2: row_tile<F, 2>(w, num_blocks, steps, x, stride, next, sums); break;
    case 3: row_tile<F, 3>(w, num_blocks, steps, x, stride, next, sums); break;
    case 4: row_tile<F, 4>(w, num_blocks, steps, x, stride, next, sums); break;
    case 5: row_tile<F, 5>(w, num_blocks, steps, x, stride, next, sums); break;
    case 6: row_tile<F, 6>(w, num_blocks, steps, x, stride, next, sums); break;
    case 7: row_tile<F, kRows == 8 ? 7 : 6>(w, num_blocks, steps, x, stride, next, sums); break;
    default: row_tile<F, kRows>(w, num_blocks, steps, x, stride, next, sums); break;
  }
}

}  // namespace AQ_NAMESPACE
