// Linears in the fourth arithmetic (formats/bfloat16_tiles.h) over tile registers: packed weights are what a register
// holds, 32 channels of 16 outputs, so that nothing is unpacked. Up to 32 rows take little longer than one.
#pragma once
#include "simd/tile_registers.h"
#include "tile.h"

namespace AQ_NAMESPACE {

constexpr int kGroupSteps = 32 / Bfloat16Tiles::kChannels;  // that are summed before they are added to a sum

// Registers 0 and 1 hold inputs of the first rows and of the others, 2 and 3 weights, 4 to 7 sums: of four blocks of
// outputs or, with more than 16 rows, of two blocks, 6 and 7 those of the second one.
class PairTile {
  using F = Bfloat16Tiles;
  using Step = F::Step;

 public:
  AQ_MEMBER PairTile(int rows, const Step* w, int num_blocks, int steps, const Pair* x, size_t stride, size_t next)
      : first_rows_(rows > kTileRegisterRows ? (rows + 1) / 2 : rows),
        last_rows_(rows - first_rows_),
        num_blocks_(num_blocks),
        steps_(steps),
        stride_(stride),
        next_(next),
        w_(w),
        x_(x) {}

  AQ_MEMBER void run(float* sums) const {
    const int whole = steps_ / kGroupSteps * kGroupSteps;
    const int blocks = last_rows_ > 0 ? 2 : 4;
    for (int b = 0; b < num_blocks_; b += blocks) {
      if (whole > 0) multiply(0, whole, kGroupSteps, b, sums + b * 16);
      if (whole < steps_) multiply(whole, steps_, steps_ - whole, b, sums + b * 16);
    }
  }

 private:
  AQ_MEMBER TileShapes shapes(int group_steps) const {
    TileShapes shapes;
    const int pairs = group_steps * F::kUnits;
    shapes.set(0, first_rows_, pairs * 4);
    shapes.set(1, last_rows_, pairs * 4);
    for (int weights = 2; weights < 4; weights++) shapes.set(weights, pairs, kTileBytes);
    for (int sums = 4; sums < 8; sums++)
      shapes.set(sums, last_rows_ > 0 && sums % 2 == 1 ? last_rows_ : first_rows_, kTileBytes);
    return shapes;
  }

  // Adds to the sums of the blocks from `block` on the products of steps [from, to), group_steps at a time.
  AQ_MEMBER void multiply(int from, int to, int group_steps, int block, float* sums) const {
    TileRegisters registers(shapes(group_steps));
    const int blocks = num_blocks_ - block;
    const auto each_sum = [&](const auto& visit) {
      visit(Index<4>{}, sums);
      if (last_rows_ > 0) {
        visit(Index<5>{}, sums + first_rows_ * kPanelWidth);
        if (blocks > 1) visit(Index<6>{}, sums + 16), visit(Index<7>{}, sums + first_rows_ * kPanelWidth + 16);
      } else {
        if (blocks > 1) visit(Index<5>{}, sums + 16);
        if (blocks > 2) visit(Index<6>{}, sums + 32);
        if (blocks > 3) visit(Index<7>{}, sums + 48);
      }
    };
    constexpr size_t kRowBytes = kPanelWidth * sizeof(float);
    if (from > 0) each_sum([&](auto sum, float* at) { registers.template load<sum.value>(at, kRowBytes); });
    for (int i = from; i < to; i += group_steps) {
      const Pair* x = x_ + i * F::kUnits;
      registers.template load<0>(x, stride_ * sizeof(Pair));
      if (last_rows_ > 0) {
        registers.template load<1>(x + first_rows_ * stride_, stride_ * sizeof(Pair));
        load_weights<2>(registers, block, i);
        registers.template add_pairs<4, 0, 2>();
        registers.template add_pairs<5, 1, 2>();
        if (blocks == 1) continue;
        load_weights<3>(registers, block + 1, i);
        registers.template add_pairs<6, 0, 3>();
        registers.template add_pairs<7, 1, 3>();
      } else {
        load_weights<2>(registers, block, i);
        registers.template add_pairs<4, 0, 2>();
        if (blocks == 1) continue;
        load_weights<3>(registers, block + 1, i);
        registers.template add_pairs<5, 0, 3>();
        if (blocks == 2) continue;
        load_weights<2>(registers, block + 2, i);
        registers.template add_pairs<6, 0, 2>();
        if (blocks == 3) continue;
        load_weights<3>(registers, block + 3, i);
        registers.template add_pairs<7, 0, 3>();
      }
    }
    each_sum([&](auto sum, float* at) { registers.template store<sum.value>(at, kRowBytes); });
  }

  template <int T> AQ_MEMBER void load_weights(TileRegisters& registers, int block, int i) const {
    const Step* weights = w_ + (size_t)block * steps_ + i;
    if (next_ != 0)
      for (int step = 0; step < kGroupSteps; step++)
#pragma GCC unroll 4
        for (int pair = 0; pair < F::kUnits; pair++) prefetch(weights[next_ + step].pairs[pair]);
    registers.template load<T>(weights, kTileBytes);
  }

  template <int number> struct Index {
    static constexpr int value = number;
  };
  const int first_rows_, last_rows_, num_blocks_, steps_;
  const size_t stride_, next_;
  const Step* const w_;
  const Pair* const x_;
};

// The same for one row, which waits for the weights: registers of 16 floats stream them faster. See `tile`.
template <int BLOCKS>
static __attribute__((noinline)) void one_row_pairs(const Bfloat16Tiles::Step* w, int steps, const Pair* x, size_t next,
                                                    float* sums) {
  constexpr int kAhead = kPrefetchBytes / BLOCKS / (int)sizeof(*w);
  const Flushing flushing;
  Vec sum[1][BLOCKS], even[1][BLOCKS], odd[1][BLOCKS];
  clear(sum);
  for (int i = 0; i < steps; i++) {
    const Bfloat16Tiles::Step* ahead = w + (next != 0 ? next + i : ahead_of<BLOCKS>(i + kAhead, steps));
    if (i % kGroupSteps == 0) clear(even), clear(odd);
#pragma GCC unroll 8
    for (int u = 0; u < Bfloat16Tiles::kUnits; u++) {
      uint32_t both;
      memcpy(&both, x + i * Bfloat16Tiles::kUnits + u, sizeof both);
      const Vec first = as_float(shl<16>(iset1(both))), second = as_float(iand(iset1(both), iset1(0xffff0000)));
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) {
        const uint32_t* pairs = (const uint32_t*)w[(size_t)b * steps + i].pairs[u];
        prefetch(ahead[(size_t)b * steps].pairs[u]);
        even[0][b] = fma(first, low_halves(pairs), even[0][b]);
        odd[0][b] = fma(second, high_halves(pairs), odd[0][b]);
      }
    }
    if ((i + 1) % kGroupSteps == 0 || i + 1 == steps)
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) sum[0][b] = add(sum[0][b], add(even[0][b], odd[0][b]));
  }
  InOrder::finish(sum, sums);
}

static void pair_tile(int rows, const void* w, int num_blocks, int steps, const void* x, size_t stride, size_t next,
                      float* sums) {
  const Bfloat16Tiles::Step* weights = (const Bfloat16Tiles::Step*)w;
  const Pair* inputs = (const Pair*)x;
  if (!kHasTileRegisters || rows > 1) return PairTile(rows, weights, num_blocks, steps, inputs, stride, next).run(sums);
  if (num_blocks == kPanel) return one_row_pairs<kPanel>(weights, steps, inputs, next, sums);
  for (int b = 0; b < num_blocks; b++)
    one_row_pairs<1>(weights + (size_t)b * steps, steps, inputs, next, sums + b * 16);
}

}  // namespace AQ_NAMESPACE
