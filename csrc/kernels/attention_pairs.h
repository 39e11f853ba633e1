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

// Gives positions that are not seen -inf, and each query the maximum of its scores by lane.
AQ_INLINE void mask_scores(float* p, int queries, int from, int to, float* rows) {
  for (int m = 0; m < queries; m++) {
    Vec top = set1(-kInfinity);
    for (int g = 0; g < kGroups; g++) {
      float* at = p + m * AQ_BLOCK + g * 16;
      const Vec own = visible(g, from, to, load(at), set1(-kInfinity));
      store(at, own);
      top = max(top, own);
    }
    store(rows + m * 16, top);
  }
}

// a = a * old_weight + sum * new_weight, for 16 channels of one query.
AQ_INLINE void add_own(Vec sum, float old_weight, float new_weight, float* a) {
  store(a, fma(load(a), set1(old_weight), mul(sum, set1(new_weight))));
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
    for (int d = 0; d < dim_; d += piece_) {
      registers_.load<0>(q_ + d / 2, dim_ * sizeof(Rounded));
      add_scores<0>(d), add_scores<1>(d), add_scores<2>(d), add_scores<3>(d);
    }
    store_sums(p_, AQ_BLOCK);
    mask_scores(p_, count_, block_.from, block_.to, rows_);
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
      for (int d = 0; d < parts * 16; d += 16)
        add_own(load(sums + m * 64 + d), old_[m], new_[m], accumulator + (size_t)m * dim_ + first_dim + d);
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

// The same for few queries, which wait for keys and values: registers of 16 floats read them as they lie. Chains of a
// sum as in pair_tiles.h.
template <int QUERIES, int COUNT> struct PairSums {
  Vec sum[QUERIES][COUNT], even[QUERIES][COUNT], odd[QUERIES][COUNT];

  AQ_MEMBER PairSums() { clear(sum), clear(even), clear(odd); }
  // Adds the products of each query's pair, `stride` pairs apart, with two vectors for each of the COUNT sums.
  template <class Load> AQ_MEMBER void add_pair(const Pair* pairs, int stride, const Load& vectors) {
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) {
      const Vec low = vectors(0, i), high = vectors(1, i);
#pragma GCC unroll 4
      for (int m = 0; m < QUERIES; m++) {
        uint32_t both;
        memcpy(&both, pairs + m * stride, sizeof both);
        even[m][i] = fma(as_float(shl<16>(iset1(both))), low, even[m][i]);
        odd[m][i] = fma(as_float(iand(iset1(both), iset1(0xffff0000))), high, odd[m][i]);
      }
    }
  }
  AQ_MEMBER void close_group() {
#pragma GCC unroll 4
    for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; i++) sum[m][i] = add(sum[m][i], add(even[m][i], odd[m][i]));
    clear(even), clear(odd);
  }
};

template <int QUERIES, int GROUPS>
AQ_INLINE void few_scores(const Pair* q, int dim, const Keys<Rounded>& keys, int first, float* p) {
  PairSums<QUERIES, GROUPS> sums;
  const int piece = dim % 32 == 0 ? 32 : 16;
  for (int d = 0; d < dim; d += 2) {
    sums.add_pair(q + d / 2, dim / 2, [&](int odd, int g) { return load(keys.k[first + g] + (d + odd) * 16); });
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) prefetch(keys.next_k[first + g] + d * 16);
    if ((d + 2) % piece == 0) sums.close_group();
  }
#pragma GCC unroll 4
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) store(p + m * AQ_BLOCK + (first + g) * 16, sums.sum[m][g]);
}

template <int QUERIES, int DIMS>
AQ_INLINE void few_values(const Pair* weights, int first_dim, int dim, const Keys<Rounded>& keys, float* to) {
  static const Rounded kUnseenValues[aq::kMaxHeadDim] = {};
  PairSums<QUERIES, DIMS> sums;
  for (int j = keys.from & ~1; j < keys.to; j += 2) {
    const Rounded* v[2];
    for (int odd = 0; odd < 2; odd++)
      v[odd] = j + odd >= keys.from && j + odd < keys.to ? keys.v[j + odd] : kUnseenValues;
    sums.add_pair(weights + j / 2, kHalf, [&](int odd, int d) { return load(v[odd] + first_dim + d * 16); });
#pragma GCC unroll 4
    for (int d = 0; d < DIMS; d++) prefetch(keys.next_v[j / 16] + j % 16 * dim + 2 * (first_dim + d * 16));
    if ((j + 2) % kHalf == 0 || j + 2 >= keys.to) sums.close_group();
  }
#pragma GCC unroll 4
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 4
    for (int d = 0; d < DIMS; d++) store(to + m * dim + first_dim + d * 16, sums.sum[m][d]);
}

template <int QUERIES>
static __attribute__((noinline)) void few_queries(const Pair* q, int dim, const Keys<Rounded>& keys, float scale,
                                                  const State& s) {
  constexpr int kAtOnce = QUERIES <= 2 ? 4 : 2;
  alignas(64) float p[QUERIES * AQ_BLOCK], rows[16 * 16], sums[QUERIES * aq::kMaxHeadDim];
  float old_weight[16], new_weight[16];
  {
    const Flushing flushing;
    const int end = (keys.to + 15) / 16;
    for (int g = keys.from / 16; g < end;) {
      if (end - g >= kAtOnce) few_scores<QUERIES, kAtOnce>(q, dim, keys, g, p), g += kAtOnce;
      else few_scores<QUERIES, 1>(q, dim, keys, g, p), g += 1;
    }
  }
  mask_scores(p, QUERIES, keys.from, keys.to, rows);
  weigh_block<Pair>(Scores{scale, p, rows}, QUERIES, s, old_weight, new_weight);
  {
    const Flushing flushing;
    for (int d = 0; d < dim;) {
      if (dim - d >= kAtOnce * 16) few_values<QUERIES, kAtOnce>((const Pair*)p, d, dim, keys, sums), d += kAtOnce * 16;
      else few_values<QUERIES, 1>((const Pair*)p, d, dim, keys, sums), d += 16;
    }
  }
  for (int m = 0; m < QUERIES; m++)
    for (int d = 0; d < dim; d += 16)
      add_own(load(sums + m * dim + d), old_weight[m], new_weight[m], s.accumulator + (size_t)m * dim + d);
}

constexpr int kFewQueries = 4;

static void pair_update(const Pair* q, int queries, int dim, const Keys<Rounded>& keys, float scale, Pair* memory,
                        float* maximum, float* sum, float* accumulator) {
  const State state{maximum, sum, accumulator};
  if (kHasTileRegisters && queries <= kFewQueries)
    return with_queries(queries, [&](auto n) {
      if constexpr (n.value <= kFewQueries) few_queries<n.value>(q, dim, keys, scale, state);
    });
  const PairedBlock block = pair_up(keys, dim, memory);
  const int num_tiles = (queries + kTileRegisterRows - 1) / kTileRegisterRows;
  for (int t = 0; t < num_tiles; t++) {
    const int first = queries * t / num_tiles, last = queries * (t + 1) / num_tiles;
    PairQueries(q + (size_t)first * dim / 2, last - first, dim, block, scale).run(offset(state, first, dim));
  }
}

}  // namespace AQ_NAMESPACE
