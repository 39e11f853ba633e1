// A block of attention over keys in eight bits (attention_codes.h) in tile registers, for many queries: scores and
// values are integer products of up to 16 queries, and what stands between them is what fewer queries have.
#pragma once
#include "attention_codes.h"
#include "simd/tile_registers.h"

namespace AQ_NAMESPACE {

// Registers: 0 holds queries, 1 keys, 2 weights, 3 values, 4 the sums of 16 keys or channels.
class WideQueries {
 public:
  AQ_MEMBER WideQueries(const CodedQueries& q, int query, int count, int dim, const Keys<Code>& keys)
      : q_(q),
        query_(query),
        count_(count),
        dim_(dim),
        piece_(dim % 64 == 0   ? 64
               : dim % 32 == 0 ? 32
                               : 16),
        first_group_(keys.from / 16),
        last_group_((keys.to + 15) / 16),
        keys_(keys),
        registers_(shapes(count, piece_)) {}

  AQ_MEMBER void run(const State& s) {
    score();
    const int num_parts = (count_ + kCodedQueries - 1) / kCodedQueries;
    for (int part = 0; part < num_parts; part++) {
      const int first = count_ * part / num_parts, last = count_ * (part + 1) / num_parts;
      any_coded_weights(last - first, q_, query_ + first, keys_, scores_ + first * AQ_BLOCK,
                        weights_ + first * (AQ_BLOCK / 4), {factor_ + first, old_ + first, new_ + first},
                        offset(s, first, dim_));
    }
    for (int d = 0; d < dim_; d += AQ_BLOCK) add_values(d, dim_ - d < AQ_BLOCK ? dim_ - d : AQ_BLOCK, s.accumulator);
  }

 private:
  static TileShapes shapes(int count, int piece) {
    TileShapes shapes;
    shapes.set(0, count, piece), shapes.set(1, piece / 4, kTileBytes);
    shapes.set(2, count, 16), shapes.set(3, 4, kTileBytes);
    shapes.set(4, count, kTileBytes);
    return shapes;
  }

  AQ_MEMBER void score() {
    for (int g = first_group_; g < last_group_; g++) {
      registers_.clear<4>();
      for (int d = 0; d < dim_; d += piece_) {
        registers_.load<0>(q_.words + ((size_t)query_ * dim_ + d) / 4, dim_);
        registers_.load<1>(keys_.k[g] + d * 16, kTileBytes);
        for (int i = 0; i < piece_; i += 4) prefetch(keys_.next_k[g] + (d + i) * 16);
        registers_.add_products<4, 0, 1, kCodes>();
      }
      registers_.store<4>(sums_[g], kTileBytes);
    }
    for (int g = first_group_; g < last_group_; g++) {
      const Vec scale = load(keys_.k_scales[g]);
      for (int m = 0; m < count_; m++) {
        const IVec start = times<128>(iset1((uint32_t)q_.minus[query_ + m]));
        store_score(iadd(start, iload(sums_[g][m])), set1(q_.scales[query_ + m]), scale,
                    scores_ + m * AQ_BLOCK + g * 16);
      }
    }
  }

  // `width` channels from first_dim on.
  AQ_MEMBER void add_values(int first_dim, int width, float* accumulator) {
    for (int d = 0; d < width; d += 16) {
      registers_.clear<4>();
      for (int g = first_group_; g < last_group_; g++) {
        const size_t at = (size_t)(first_dim + d) * 4;
        registers_.load<2>(weights_ + g * 4, AQ_BLOCK);
        registers_.load<3>(keys_.v[g] + at, (size_t)dim_ * 4);
        for (int i = 0; i < 4; i++) prefetch(keys_.next_v[g] + at + (size_t)i * dim_ * 4);
        registers_.add_products<4, 2, 3, kWeighted>();
      }
      registers_.store<4>(sums_[d / 16], kTileBytes);
    }
    for (int m = 0; m < count_; m++)
      for (int d = 0; d < width; d += 16)
        add_own(iload(sums_[d / 16][m]), factor_[m], old_[m], new_[m], accumulator + (size_t)m * dim_ + first_dim + d);
  }

  const CodedQueries& q_;
  const int query_, count_, dim_, piece_, first_group_, last_group_;
  const Keys<Code>& keys_;
  TileRegisters registers_;
  // A lane per query; behind those of the last part lie lanes that nobody reads.
  float factor_[2 * kTileRegisterRows], old_[2 * kTileRegisterRows], new_[2 * kTileRegisterRows];
  alignas(64) float scores_[kTileRegisterRows * AQ_BLOCK];
  alignas(64) uint32_t weights_[kTileRegisterRows * AQ_BLOCK / 4];
  uint32_t sums_[kGroups][kTileRegisterRows][16];
};

static void wide_update(const CodedQueries& q, int queries, int dim, const Keys<Code>& keys, float* maximum, float* sum,
                        float* accumulator) {
  if (queries < aq::kWideFrom) return coded_update(q, queries, dim, keys, maximum, sum, accumulator);
  const State state{maximum, sum, accumulator};
  const int num_tiles = (queries + kTileRegisterRows - 1) / kTileRegisterRows;
  for (int t = 0; t < num_tiles; t++) {
    const int first = queries * t / num_tiles, last = queries * (t + 1) / num_tiles;
    WideQueries(q, first, last - first, dim, keys).run(offset(state, first, dim));
  }
}

}  // namespace AQ_NAMESPACE
