// A block of attention in the fourth arithmetic (formats/bfloat16_tiles.h), over keys in bfloat16 and tile registers.
// Queries and, relative to the block's maximum, softmax weights are rounded to bfloat16. Scores add up channels 32 at a
// time, 16 if the head's dimension is no multiple of 32; values add up positions 32 at a time, of which those that are
// not seen count as 0.
//
// Included before attention_block.h, whose templates look for weigh_scores where they are defined.
#pragma once
#include "formats/bfloat16.h"
#include "kernels.h"
#include "math.h"
#include "simd/tile_registers.h"

namespace AQ_NAMESPACE {

// weigh_scores of attention_block.h: the weights are rounded, in the memory of the scores.
AQ_INLINE Vec weigh_scores(float* p, float maximum, float scale, aq::Pair* weights) {
  Vec s[aq::kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < aq::kGroups; g++) s[g] = sub(mul(load(p + g * 16), set1(scale)), set1(maximum));
  exp_below<aq::kGroups>(s);
#pragma GCC unroll 4
  for (int g = 0; g < aq::kGroups; g++) store((aq::Rounded*)weights + g * 16, s[g]);
  return add(add(s[0], s[1]), add(s[2], s[3]));
}

}  // namespace AQ_NAMESPACE

#include "attention_block.h"

namespace AQ_NAMESPACE {

constexpr int kHalf = AQ_BLOCK / 2;  // positions of a block, which a register of values holds

// Keys and values of one block as registers hold them: k [kGroups][dim / 2][16] pairs of channels, v [kHalf][dim] pairs
// of positions, of what a query sees and what lies in the same half.
struct PairedBlock {
  Pair *k, *v;
  int from, to;
  AQ_MEMBER bool sees_half(int half) const { return from < (half + 1) * kHalf && to > half * kHalf; }
};

AQ_INLINE IVec paired(IVec first, IVec second) { return ior(first, shl<16>(second)); }

static PairedBlock pair_up(const Keys<Rounded>& keys, int dim, Pair* memory) {
  const PairedBlock block{memory, memory + (size_t)kHalf * dim, keys.from, keys.to};
  for (int g = keys.from / 16; g * 16 < keys.to; g++)
    for (int d = 0; d < dim; d += 2) {
      const Rounded* from = keys.k[g] + d * 16;
      prefetch(keys.next_k[g] + d * 16);
      istore((uint32_t*)(block.k + ((size_t)g * dim + d) * 8), paired(iload(&from->bits), iload(&from[16].bits)));
    }
  for (int j = 0; j < AQ_BLOCK; j += 2) {
    if (!block.sees_half(j / kHalf)) continue;
    const bool has_first = j >= keys.from && j < keys.to, has_second = j + 1 >= keys.from && j + 1 < keys.to;
    for (int d = 0; d < dim; d += 16) {
      const IVec first = has_first ? iload(&keys.v[j][d].bits) : iset1(0);
      const IVec second = has_second ? iload(&keys.v[j + 1][d].bits) : iset1(0);
      if (has_first || has_second) prefetch(keys.next_v[j / 16] + j % 16 * dim + 2 * d);
      istore((uint32_t*)(block.v + (size_t)j / 2 * dim + d), paired(first, second));
    }
  }
  return block;
}

// Up to 16 queries. Registers: 0 holds queries, 1 keys, 2 weights, 3 values, 4 to 7 the sums of four groups of keys or
// of channels.
class PairQueries {
 public:
  AQ_MEMBER PairQueries(const Pair* q, int count, int dim, const PairedBlock& block, float scale)
      : q_(q),
        count_(count),
        dim_(dim),
        piece_(dim % 32 == 0 ? 32 : 16),
        block_(block),
        scale_(scale),
        registers_(shapes(count, piece_)) {}

  AQ_MEMBER void run(const State& s) {
    score();
    weigh_block<Pair>(Scores{scale_, p_, rows_}, count_, s, old_, new_);
    for (int d = 0; d < dim_; d += 64) add_values(d, dim_ - d < 64 ? (dim_ - d) / 16 : 4, s.accumulator);
  }

 private:
  static TileShapes shapes(int count, int piece) {
    TileShapes shapes;
    shapes.set(0, count, piece * 2), shapes.set(1, piece / 2, kTileBytes);
    shapes.set(2, count, kTileBytes), shapes.set(3, kHalf / 2, kTileBytes);
    for (int sums = 4; sums < 8; sums++) shapes.set(sums, count, kTileBytes);
    return shapes;
  }

  AQ_MEMBER void score() {
    clear_sums();
    for (int d = 0; d < dim_; d += piece_) {
      registers_.load<0>(q_ + d / 2, dim_ * sizeof(Rounded));
      add_scores<0>(d), add_scores<1>(d), add_scores<2>(d), add_scores<3>(d);
    }
    store_sums(p_, AQ_BLOCK);
    for (int m = 0; m < count_; m++) {
      Vec top = set1(-kInfinity);
      for (int g = 0; g < kGroups; g++) {
        float* at = p_ + m * AQ_BLOCK + g * 16;
        const Vec own = visible(g, block_.from, block_.to, load(at), set1(-kInfinity));
        store(at, own);
        top = max(top, own);
      }
      store(rows_ + m * 16, top);
    }
  }

  template <int G> AQ_MEMBER void add_scores(int d) {
    if (G * 16 >= block_.to || G * 16 + 16 <= block_.from) return;
    registers_.load<1>(block_.k + ((size_t)G * dim_ + d) * 8, kTileBytes);
    registers_.add_pairs<4 + G, 0, 1>();
  }

  // Of `parts` * 16 channels from first_dim on.
  AQ_MEMBER void add_values(int first_dim, int parts, float* accumulator) {
    clear_sums();
    for (int half = 0; half < 2; half++) {
      if (!block_.sees_half(half)) continue;
      const Pair* v = block_.v + (size_t)half * (kHalf / 2) * dim_ + first_dim;
      registers_.load<2>((const Pair*)p_ + half * (kHalf / 2), AQ_BLOCK * sizeof(Rounded));
      add_weighed<0>(v, parts), add_weighed<1>(v, parts), add_weighed<2>(v, parts), add_weighed<3>(v, parts);
    }
    alignas(64) float sums[kTileRegisterRows * 64];
    store_sums(sums, 64);
    for (int m = 0; m < count_; m++)
      for (int d = 0; d < parts * 16; d += 16) {
        float* a = accumulator + (size_t)m * dim_ + first_dim + d;
        store(a, fma(load(a), set1(old_[m]), mul(load(sums + m * 64 + d), set1(new_[m]))));
      }
  }

  template <int D> AQ_MEMBER void add_weighed(const Pair* v, int parts) {
    if (D >= parts) return;
    registers_.load<3>(v + D * 16, dim_ * sizeof(Pair));
    registers_.add_pairs<4 + D, 2, 3>();
  }

  AQ_MEMBER void clear_sums() {
    registers_.clear<4>(), registers_.clear<5>(), registers_.clear<6>(), registers_.clear<7>();
  }
  AQ_MEMBER void store_sums(float* to, int stride) {
    registers_.store<4>(to, stride * sizeof(float)), registers_.store<5>(to + 16, stride * sizeof(float));
    registers_.store<6>(to + 32, stride * sizeof(float)), registers_.store<7>(to + 48, stride * sizeof(float));
  }

  const Pair* const q_;
  const int count_, dim_, piece_;
  const PairedBlock& block_;
  const float scale_;
  TileRegisters registers_;
  float old_[kTileRegisterRows], new_[kTileRegisterRows];
  alignas(64) float p_[kTileRegisterRows * AQ_BLOCK];  // scores, then weights
  alignas(64) float rows_[kTileRegisterRows * 16];
};

static void pair_update(const Pair* q, int queries, int dim, const Keys<Rounded>& keys, float scale, Pair* memory,
                        float* maximum, float* sum, float* accumulator) {
  const PairedBlock block = pair_up(keys, dim, memory);
  const State state{maximum, sum, accumulator};
  const int num_tiles = (queries + kTileRegisterRows - 1) / kTileRegisterRows;
  for (int t = 0; t < num_tiles; t++) {
    const int first = queries * t / num_tiles, last = queries * (t + 1) / num_tiles;
    PairQueries(q + (size_t)first * dim / 2, last - first, dim, block, scale).run(offset(state, first, dim));
  }
}

}  // namespace AQ_NAMESPACE
