// One block of attention over keys and values in eight bits (kv_dtype int8).
//
// Keys, values and queries are codes in [-127, 127] with a float32 scale for each head: code = rint(x * (127 / amax)),
// ties to even; amax below 2^-120 gives zeros (head_codes in round.h). For each query and block of 64 absolute
// positions, of which it sees V:
//   score = float(sum of query code * key code) * (sq * sk), where sq has the scale of the softmax in it
//   e = exp(score - m), m the maximum over V of this block
//   w = rint(e * sv * (127 / L)), L the maximum over V of e * sv
// The block adds the sum of e, not rounded, to the denominator, and float(sum of w * value code) * (L / 127) to the
// accumulator. Weights have seven bits, since AVX2 adds two products in 16 bits. With L below 2^-100 the block adds
// nothing to the accumulator; a NaN in V makes all of it NaN. Outside V nothing that memory holds counts: lanes are
// selected to zero before any product with a scale. m and L belong to one query, so rows do not depend on each other,
// and integer sums are exact in any order: masks alone decide, and all queries of a tile are computed together.
#pragma once
#include "attention_block.h"
#include "integer.h"
#include "round.h"

namespace AQ_NAMESPACE {

using aq::Code;
using aq::CodedQueries;

constexpr int kCodedQueries = kIntegerRows;  // of a tile

AQ_INLINE IVec fours(const Code* p) { return iload((const uint32_t*)p); }

// The scores of 16 keys, from the sums of products and the scales of the query and of the keys.
AQ_INLINE void store_score(IVec sum, Vec query, Vec keys, float* to) {
  store(to, mul(to_float(sum), mul(query, keys)));
}

// a = a * old_weight + (sum * factor) * new_weight, for 16 channels of one query.
AQ_INLINE void add_own(IVec sum, float factor, float old_weight, float new_weight, float* a) {
  const Vec own = mul(to_float(sum), set1(factor));
  store(a, fma(load(a), set1(old_weight), mul(own, set1(new_weight))));
}

// What the sums over a block's values are multiplied with, and old and new sums when they meet: a lane per query, 16
// lanes that may be written.
struct Merging {
  float *factor, *old_weight, *new_weight;
};

// Scores of QUERIES queries from `query` on over GROUPS groups from `first` on.
template <int QUERIES, int GROUPS>
AQ_INLINE void coded_scores(const CodedQueries& q, int query, int dim, const Keys<Code>& keys, int first,
                            float* scores) {
  const int steps = dim / 4;
  const uint32_t* words = q.words + (size_t)query * steps;
  IVec sum[QUERIES][GROUPS];
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++) {
    const IVec start = iset1((uint32_t)(kByteBias * q.minus[query + m]));
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) sum[m][g] = start;
  }
  const Code *k[GROUPS], *next[GROUPS];
#pragma GCC unroll 8
  for (int g = 0; g < GROUPS; g++) k[g] = keys.k[first + g], next[g] = keys.next_k[first + g];
  for (int i = 0; i < steps; i++) {
    IVec codes[GROUPS];
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) codes[g] = fours(k[g] + i * 64), prefetch(next[g] + i * 64);
#pragma GCC unroll 8
    for (int m = 0; m < QUERIES; m++) {
#pragma GCC unroll 8
      for (int g = 0; g < GROUPS; g++) sum[m][g] = dot_bytes(sum[m][g], codes[g], words[m * steps + i]);
    }
  }
  Vec scale[GROUPS];
#pragma GCC unroll 8
  for (int g = 0; g < GROUPS; g++) scale[g] = load(keys.k_scales[first + g]);
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++) {
    const Vec own = set1(q.scales[query + m]);
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) store_score(sum[m][g], own, scale[g], scores + m * AQ_BLOCK + (first + g) * 16);
  }
}

// The maximum of those of one query's 64 scores that it sees.
template <bool kIsWhole> AQ_INLINE float coded_maximum(const float* p, int from, int to) {
  Vec s[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g++) {
    s[g] = load(p + g * 16);
    if (!kIsWhole) s[g] = visible(g, from, to, s[g], set1(-kInfinity));
  }
  return max_lanes(max(max(s[0], s[1]), max(s[2], s[3])));
}

// The sum of one query's e, and the maximum of e * sv, which take the place of its scores. Returns whether one is NaN.
template <bool kIsWhole>
AQ_INLINE bool coded_products(float* p, const Keys<Code>& keys, int from, int to, float maximum, float* sum,
                              float* most) {
  Vec e[kGroups], product[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g++) e[g] = sub(load(p + g * 16), set1(maximum));
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g += kExps) exp_below<kExps>(e + g);
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g++) {
    if (kIsWhole) {
      product[g] = mul(e[g], load(keys.v_scales[g]));
    } else {
      const bool is_seen = g * 16 < to && from < g * 16 + 16;
      e[g] = visible(g, from, to, e[g], zero());
      product[g] = is_seen ? mul(e[g], visible(g, from, to, load(keys.v_scales[g]), zero())) : zero();
    }
    store(p + g * 16, product[g]);
  }
  *sum = sum_lanes(add(add(e[0], e[1]), add(e[2], e[3])));
  *most = max_lanes(max(max(product[0], product[1]), max(product[2], product[3])));
  return any(is_nan(add(add(product[0], product[1]), add(product[2], product[3]))));
}

// accumulator = accumulator * old_weight + (sum of w * code * factor) * new_weight for DIMS * 16 channels.
template <int QUERIES, int DIMS>
AQ_INLINE void coded_values(const uint32_t* weights, const Keys<Code>& keys, int first_dim, int dim,
                            const Merging& merging, float* accumulator) {
  IVec sum[QUERIES][DIMS];
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
    for (int d = 0; d < DIMS; d++) sum[m][d] = iset1(0);
  for (int j = keys.from / 4; j < (keys.to + 3) / 4; j++) {
    const size_t at = ((size_t)(j % 4) * dim + first_dim) * 4;
    const Code *v = keys.v[j / 4] + at, *next = keys.next_v[j / 4] + at;
    IVec codes[DIMS];
#pragma GCC unroll 8
    for (int d = 0; d < DIMS; d++) codes[d] = fours(v + d * 64), prefetch(next + d * 64);
#pragma GCC unroll 8
    for (int m = 0; m < QUERIES; m++) {
      const uint32_t four = weights[m * (AQ_BLOCK / 4) + j];
#pragma GCC unroll 8
      for (int d = 0; d < DIMS; d++) sum[m][d] = dot_signed(sum[m][d], codes[d], four);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
    for (int d = 0; d < DIMS; d++)
      add_own(sum[m][d], merging.factor[m], merging.old_weight[m], merging.new_weight[m],
              accumulator + m * dim + first_dim + d * 16);
}

// From the scores of QUERIES queries to their weights in seven bits. Each step runs over all queries, since its own
// latency is long.
template <int QUERIES>
AQ_INLINE void coded_weights(const CodedQueries& q, int query, const Keys<Code>& keys, float* scores, uint32_t* weights,
                             const Merging& merging, const State& s) {
  // One lane per query; lanes from QUERIES on hold values that nobody reads.
  float maximum[16] = {}, most[16] = {}, sum[QUERIES], scale[16], top[16];
  bool is_nan[QUERIES], is_whole[QUERIES];
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++) {
    const int from = q.from[query + m], to = q.to[query + m];
    float* p = scores + m * AQ_BLOCK;
    is_whole[m] = from == 0 && to == AQ_BLOCK;
    maximum[m] = is_whole[m] ? coded_maximum<true>(p, from, to) : coded_maximum<false>(p, from, to);
  }
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++) {
    const int from = q.from[query + m], to = q.to[query + m];
    float* p = scores + m * AQ_BLOCK;
    is_nan[m] = is_whole[m] ? coded_products<true>(p, keys, from, to, maximum[m], sum + m, most + m)
                            : coded_products<false>(p, keys, from, to, maximum[m], sum + m, most + m);
  }
  const Vec limit = load(most);
  const auto is_nothing = less(limit, set1(0x1p-100f));
  store(scale, select(is_nothing, zero(), div(set1(127.0f), limit)));
  store(merging.factor, select(is_nothing, zero(), div(limit, set1(127.0f))));
  const Vec old_top = load(s.maximum), new_top = max(old_top, load(maximum));
  store(top, new_top);
  store(merging.old_weight, exp(sub(old_top, new_top)));
  store(merging.new_weight, exp(sub(load(maximum), new_top)));
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++) {
    uint8_t* own = (uint8_t*)weights + m * AQ_BLOCK;
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g++)
      bstore(own + g * 16, nearest(mul(load(scores + m * AQ_BLOCK + g * 16), set1(scale[m]))));
    if (is_nan[m]) memset(own, 0, AQ_BLOCK), merging.factor[m] = __builtin_nanf("");
    s.sum[m] = s.sum[m] * merging.old_weight[m] + sum[m] * merging.new_weight[m];
    s.maximum[m] = top[m];
  }
}

template <int QUERIES = kCodedQueries>
static void any_coded_weights(int queries, const CodedQueries& q, int query, const Keys<Code>& keys, float* scores,
                              uint32_t* weights, const Merging& merging, const State& s) {
  if (queries == QUERIES) {
    coded_weights<QUERIES>(q, query, keys, scores, weights, merging, s);
  } else if constexpr (QUERIES > 1) {
    any_coded_weights<QUERIES - 1>(queries, q, query, keys, scores, weights, merging, s);
  }
}

// Folds one block into the state of QUERIES queries from `query` on.
template <int QUERIES>
static __attribute__((noinline)) void coded_tile(const CodedQueries& q, int query, int dim, const Keys<Code>& keys,
                                                 const State& s) {
  constexpr int kWide = integer_blocks_for(QUERIES);
  alignas(64) float scores[QUERIES * AQ_BLOCK];
  alignas(64) uint32_t weights[QUERIES * AQ_BLOCK / 4];
  float factor[16], old_weight[16], new_weight[16];
  const Merging merging{factor, old_weight, new_weight};
  const int last_group = (keys.to + 15) / 16;
  for (int g = keys.from / 16; g < last_group;) {
    const int left = last_group - g;
    if (kWide >= 4 && left >= 4) coded_scores<QUERIES, kWide >= 4 ? 4 : 1>(q, query, dim, keys, g, scores), g += 4;
    else if (kWide >= 2 && left >= 2) coded_scores<QUERIES, kWide >= 2 ? 2 : 1>(q, query, dim, keys, g, scores), g += 2;
    else coded_scores<QUERIES, 1>(q, query, dim, keys, g, scores), g += 1;
  }
  coded_weights<QUERIES>(q, query, keys, scores, weights, merging, s);
  for (int d = 0; d < dim;) {
    const int left = (dim - d) / 16;
    if (kWide >= 4 && left >= 4)
      coded_values<QUERIES, kWide >= 4 ? 4 : 1>(weights, keys, d, dim, merging, s.accumulator), d += 64;
    else if (kWide >= 2 && left >= 2)
      coded_values<QUERIES, kWide >= 2 ? 2 : 1>(weights, keys, d, dim, merging, s.accumulator), d += 32;
    else coded_values<QUERIES, 1>(weights, keys, d, dim, merging, s.accumulator), d += 16;
  }
}

template <int QUERIES = kCodedQueries>
static void any_coded_tile(int queries, const CodedQueries& q, int query, int dim, const Keys<Code>& keys,
                           const State& s) {
  if (queries == QUERIES) {
    coded_tile<QUERIES>(q, query, dim, keys, s);
  } else if constexpr (QUERIES > 1) {
    any_coded_tile<QUERIES - 1>(queries, q, query, dim, keys, s);
  }
}

static void coded_update(const CodedQueries& q, int queries, int dim, const Keys<Code>& keys, float* maximum,
                         float* sum, float* accumulator) {
  const State state{maximum, sum, accumulator};
  const int num_tiles = (queries + kCodedQueries - 1) / kCodedQueries;
  for (int t = 0; t < num_tiles; t++) {
    const int first = queries * t / num_tiles, last = queries * (t + 1) / num_tiles;
    any_coded_tile(last - first, q, first, dim, keys, offset(state, first, dim));
  }
}

}  // namespace AQ_NAMESPACE
