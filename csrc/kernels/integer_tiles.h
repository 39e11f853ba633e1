// Linears in the third arithmetic over tile registers (simd/tile_registers.h), for many rows: the same integer sums of
// groups as `integer_tile` has, folded in the same order.
//
// The groups of a panel pass three stages, each a group behind the one before it, so that none waits for the memory
// that another one has just written: codes are unpacked, all rows are multiplied with them, and the products are folded
// into the float sums.
#pragma once
#include "integer.h"
#include "simd/tile_registers.h"

namespace AQ_NAMESPACE {

constexpr int kWideRows = 2 * kTileRegisterRows;  // of a tile: unpacked codes serve two registers of rows

// Registers 0 and 1 hold inputs, 2 and 3 the codes of two blocks, 4 to 7 the products of block 2 and 3 with 0 and 1.
template <class F> class WideTile {
  using Step = typename F::Step;
  static constexpr int kFours = F::kGroupInputs / 4;

 public:
  AQ_MEMBER WideTile(int rows, const Step* w, int num_blocks, int steps, const Codes* x, size_t stride, size_t next)
      : rows_(rows),
        first_rows_(rows > kTileRegisterRows ? (rows + 1) / 2 : rows),
        num_blocks_(num_blocks),
        steps_(steps),
        stride_(stride),
        next_(next),
        w_(w),
        x_(x),
        registers_(shapes(first_rows_, rows - first_rows_)) {}

  AQ_MEMBER void run(float* sums) {
    const int num_groups = steps_ * F::kGroups;
    memset(sums, 0, rows_ * kPanelWidth * sizeof(float));
    unpack(0);
    for (int group = 0; group < num_groups; group++) {
      if (group + 1 < num_groups) unpack(group + 1);
      multiply(group);
      if (group > 0) fold(group - 1, sums);
    }
    fold(num_groups - 1, sums);
  }

 private:
  static TileShapes shapes(int first_rows, int last_rows) {
    TileShapes shapes;
    for (int pair = 0; pair < 8; pair += 2) {
      const bool is_input = pair == 0, is_codes = pair == 2;
      shapes.set(pair, is_codes ? kFours : first_rows, is_input ? F::kGroupInputs : kTileBytes);
      shapes.set(pair + 1, is_codes ? kFours : last_rows, is_input ? F::kGroupInputs : kTileBytes);
    }
    return shapes;
  }

  AQ_MEMBER const Codes* inputs(int group, int row) const { return x_ + row * stride_ + group * F::kGroupInputs / 32; }
  AQ_MEMBER static int half_of(int group) { return group * F::kGroupInputs % 32 / 16; }

  AQ_MEMBER void unpack(int group) {
    const int i = group / F::kGroups, g = group % F::kGroups;
    prefetch_group<F, kPanel>(w_, i, g, steps_, next_);
    for (int b = 0; b < num_blocks_; b++)
#pragma GCC unroll 8
      for (int q = 0; q < kFours; q++) istore(codes_[group % 2][b][q], F::codes(w_[(size_t)b * steps_ + i], g, q));
  }

  AQ_MEMBER void multiply(int group) {
    const size_t row_bytes = stride_ * sizeof(Codes);
    registers_.template load<0>(inputs(group, 0)->words + half_of(group) * 4, row_bytes);
    if (first_rows_ < rows_)
      registers_.template load<1>(inputs(group, first_rows_)->words + half_of(group) * 4, row_bytes);
    for (int b = 0; b < num_blocks_; b += 2) {
      multiply_block<0>(group, b);
      if (b + 1 < num_blocks_) multiply_block<1>(group, b + 1);
    }
  }

  template <int B> AQ_MEMBER void multiply_block(int group, int b) {
    registers_.template load<2 + B>(codes_[group % 2][b], kTileBytes);
    multiply_rows<4 + 2 * B, 0, 2 + B>(products_[group % 2][b][0]);
    if (first_rows_ < rows_) multiply_rows<5 + 2 * B, 1, 2 + B>(products_[group % 2][b][first_rows_]);
  }

  template <int C, int A, int B> AQ_MEMBER void multiply_rows(uint32_t* products) {
    registers_.template clear<C>();
    registers_.template add_products<C, A, B, kCodes>();
    registers_.template store<C>(products, kTileBytes);
  }

  AQ_MEMBER void fold(int group, float* sums) const {
    const int i = group / F::kGroups, g = group % F::kGroups;
    for (int b = 0; b < num_blocks_; b++) {
      const Factors<F> factors(w_[(size_t)b * steps_ + i], g);
      for (int r = 0; r < rows_; r++) {
        const Codes& row = *inputs(group, r);
        const IVec start = times<F::kOffset>(iset1((uint32_t)minus_of<F>(row, half_of(group))));
        factors.fold(iadd(start, iload(products_[group % 2][b][r])), row, sums + r * kPanelWidth + b * 16);
      }
    }
  }

  const int rows_, first_rows_, num_blocks_, steps_;
  const size_t stride_, next_;
  const Step* const w_;
  const Codes* const x_;
  TileRegisters registers_;
  alignas(64) uint32_t codes_[2][kPanel][kFours][16];
  uint32_t products_[2][kPanel][kWideRows][16];
};

template <class F>
static void wide_tile(int rows, const void* w, int num_blocks, int steps, const void* x, size_t stride, size_t next,
                      float* sums) {
  if (rows <= kIntegerRows) return any_integer_tile<F>(rows, w, num_blocks, steps, x, stride, next, sums);
  WideTile<F>(rows, (const typename F::Step*)w, num_blocks, steps, (const Codes*)x, stride, next).run(sums);
}

}  // namespace AQ_NAMESPACE
