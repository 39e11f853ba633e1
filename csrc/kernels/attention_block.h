// One block of attention: the softmax state of some queries, and how 64 positions of keys and values join it.
//
// S is the type that keys are stored as and decides how they are multiplied. In the second arithmetic queries and
// weights come in pairs: pairs of channels for the scores, pairs of positions for the values. A position that is not
// seen counts as 0 (dot.cpp).
#pragma once
#include "kernels.h"
#include "math.h"
#include "tile.h"

namespace AQ_NAMESPACE {

using aq::Keys;
using aq::kGroups;
using aq::Unpaired;

// The type that keys stored as S are multiplied with, how many channels or positions one of its values covers (kCount),
// and how many S these are (kElements).
template <class S> struct Factor {
  using type = float;
  static constexpr int kCount = 1, kElements = 1;
};
template <> struct Factor<Pair> {
  using type = Pair;
  static constexpr int kCount = 2, kElements = 1;
};
template <> struct Factor<Unpaired> {
  using type = Pair;
  static constexpr int kCount = 2, kElements = 2;
};
template <class S> using FactorOf = typename Factor<S>::type;

// 16 channels of the positions of one step.
template <class S> AQ_INLINE auto values_at(const Keys<S>& keys, int step, int dim) { return load(keys.v[step] + dim); }

constexpr int kQueries = 48;                          // whose weights are computed together
constexpr int kExps = kAccumulators >= 16 ? 4 : 2;  // side by side, in the registers that there are

template <int N> struct Number {
  static constexpr int value = N;
};

// Softmax state of some queries: maximum and sum [queries], accumulator [queries][dim].
struct State {
  float *maximum, *sum, *accumulator;
};

AQ_INLINE State offset(const State& s, int query, int dim) {
  return State{s.maximum + query, s.sum + query, s.accumulator + (size_t)query * dim};
}

// The scores of some queries over one block, from their products to their weights.
struct Scores {
  float scale;
  float* p;     // [queries][AQ_BLOCK]: scores, then weights
  float* rows;  // [queries][16]: by lane, the maximum over the groups, then the sum
};

// `yes` in the lanes of group g that are positions [from, to) of the block, `no` in the others.
AQ_INLINE Vec visible(int g, int from, int to, Vec yes, Vec no) {
  const Vec position = add(to_float(iota()), set1(16.0f * g));
  return select(both(less(position, set1((float)to)), less(set1((float)from - 1.0f), position)), yes, no);
}

// Scales the products of query m with GROUPS groups from `first` on, and stores them and their maximum. Positions that
// are not seen become -inf whatever they held. In the second arithmetic only the maximum is scaled (weigh_block).
template <class S, int GROUPS>
AQ_INLINE void finish_scores(Vec (&x)[GROUPS], const Keys<S>& keys, int first, int m, const Scores& scores) {
  const bool is_whole = keys.from == 0 && keys.to == AQ_BLOCK;
  float *p = scores.p + m * AQ_BLOCK, *row = scores.rows + m * 16;
  Vec top = set1(-kInfinity);
#pragma GCC unroll 4
  for (int g = 0; g < GROUPS; g++) {
    if (Factor<S>::kCount == 1) x[g] = mul(x[g], set1(scores.scale));
    if (!is_whole) x[g] = visible(first + g, keys.from, keys.to, x[g], set1(-kInfinity));
    store(p + (first + g) * 16, x[g]);
    top = g == 0 ? x[g] : max(top, x[g]);
  }
  store(row, first == keys.from / 16 ? top : max(load(row), top));
}

// Scores of QUERIES queries with GROUPS groups from `first` on.
template <class S, int QUERIES, int GROUPS>
AQ_INLINE void score_groups(const FactorOf<S>* q, int steps, const Keys<S>& keys, int first, const Scores& scores) {
  const S *key_at[GROUPS], *next[GROUPS];
  Vec sum[QUERIES][GROUPS];
#pragma GCC unroll 8
  for (int g = 0; g < GROUPS; g++) key_at[g] = keys.k[first + g], next[g] = keys.next_k[first + g];
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) sum[m][g] = zero();
  for (int d = 0; d < steps; d++) {
    const int at = d * 16 * Factor<S>::kElements;
    decltype(load(key_at[0])) key[GROUPS];
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) key[g] = load(key_at[g] + at), prefetch(next[g] + at);
#pragma GCC unroll 8
    for (int m = 0; m < QUERIES; m++) {
      const auto value = set1(q[m * steps + d]);
#pragma GCC unroll 8
      for (int g = 0; g < GROUPS; g++) sum[m][g] = fma(value, key[g], sum[m][g]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++) finish_scores(sum[m], keys, first, m, scores);
}

// s.accumulator = s.accumulator * old_weight + (sum of p v) * new_weight for DIMS * 16 channels.
template <class S, int QUERIES, int DIMS>
AQ_INLINE void weigh_values(const FactorOf<S>* p, const Keys<S>& keys, int first_dim, int dim, const float* old_weight,
                            const float* new_weight, float* accumulator) {
  Vec sum[QUERIES][DIMS];
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
    for (int d = 0; d < DIMS; d++) sum[m][d] = zero();
  constexpr int kCount = Factor<S>::kCount, kSteps = AQ_BLOCK / kCount, kGroupSteps = 16 / kCount;
  for (int j = keys.from / kCount; j < (keys.to + kCount - 1) / kCount; j++) {
    constexpr int kElements = Factor<S>::kElements;
    const S* next = keys.next_v[j / kGroupSteps] + (j % kGroupSteps * dim + first_dim) * kElements;
    decltype(values_at(keys, j, 0)) value[DIMS];
#pragma GCC unroll 8
    for (int d = 0; d < DIMS; d++)
      value[d] = values_at(keys, j, first_dim + d * 16), prefetch(next + d * 16 * kElements);
#pragma GCC unroll 8
    for (int m = 0; m < QUERIES; m++) {
      const auto weight = set1(p[m * kSteps + j]);
#pragma GCC unroll 8
      for (int d = 0; d < DIMS; d++) sum[m][d] = fma(weight, value[d], sum[m][d]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
    for (int d = 0; d < DIMS; d++) {
      float* a = accumulator + m * dim + first_dim + d * 16;
      store(a, fma(load(a), set1(old_weight[m]), mul(sum[m][d], set1(new_weight[m]))));
    }
}

// Turns the scores of one query into weights exp(score - maximum) and returns their sum by lane.
AQ_INLINE Vec weigh_scores(float* p, float maximum, float, float* weights) {
  Vec s[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g++) s[g] = sub(load(p + g * 16), set1(maximum));
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g += kExps) exp_below<kExps>(s + g);
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g++) store(weights + g * 16, s[g]);
  return add(add(s[0], s[1]), add(s[2], s[3]));
}

// The weights of all queries, and maximum and sum of their states. One lane per query; lanes past the last query hold
// values that nobody reads. Each step runs over all queries, since its own latency is long.
template <class S>
AQ_INLINE void weigh_block(const Scores& scores, int queries, const State& s, float* old_weight, float* new_weight) {
  alignas(64) float maximum[kQueries];
  for (int first = 0; first < queries; first += 16) {
    Vec own = max_rows(scores.rows + first * 16, queries - first);
    if (Factor<S>::kCount > 1) own = mul(own, set1(scores.scale));
    const Vec old_top = load(s.maximum + first), new_top = max(old_top, own);
    Vec weights[2] = {sub(old_top, new_top), sub(own, new_top)};
    exp_below<2>(weights);
    store(maximum + first, own), store(old_weight + first, weights[0]), store(new_weight + first, weights[1]);
    float top[16];
    store(top, new_top);
    for (int i = 0; i < 16 && first + i < queries; i++) s.maximum[first + i] = top[i];
  }
  FactorOf<S>* weights = (FactorOf<S>*)scores.p;
  for (int first = 0; first < queries; first += 16) {
    for (int m = first; m < queries && m < first + 16; m++) {
      FactorOf<S>* own = weights + m * (AQ_BLOCK / Factor<S>::kCount);
      store(scores.rows + m * 16, weigh_scores(scores.p + m * AQ_BLOCK, maximum[m], scores.scale, own));
    }
    const Vec own = mul(sum_rows(scores.rows + first * 16, queries - first), load(new_weight + first));
    float sum[16];
    store(sum, add(mul(load(s.sum + first), load(old_weight + first)), own));
    for (int i = 0; i < 16 && first + i < queries; i++) s.sum[first + i] = sum[i];
  }
}

// Scores of QUERIES queries q [QUERIES][dim] that see the same keys.
template <class S, int QUERIES>
AQ_INLINE void score_block(const FactorOf<S>* q, int dim, const Keys<S>& keys, const Scores& scores) {
  constexpr int kWide = blocks_for(QUERIES);
  const int steps = dim / Factor<S>::kCount, first_group = keys.from / 16, last_group = (keys.to + 15) / 16;
  for (int i = 0; i < QUERIES * kGroups && last_group - first_group < kGroups; i++)
    store(scores.p + i * 16, set1(-kInfinity));
  for (int g = first_group; g < last_group;) {
    const int left = last_group - g;
    if (kWide >= 4 && left >= 4) score_groups<S, QUERIES, kWide >= 4 ? 4 : 1>(q, steps, keys, g, scores), g += 4;
    else if (kWide >= 2 && left >= 2) score_groups<S, QUERIES, kWide >= 2 ? 2 : 1>(q, steps, keys, g, scores), g += 2;
    else score_groups<S, QUERIES, 1>(q, steps, keys, g, scores), g += 1;
  }
}

// The values of QUERIES queries by their weights p, into their accumulators.
template <class S, int QUERIES>
AQ_INLINE void value_block(const FactorOf<S>* p, int dim, const Keys<S>& keys, const float* old_weight,
                           const float* new_weight, float* accumulator) {
  constexpr int kWide = blocks_for(QUERIES);
  for (int d = 0; d < dim;) {
    const int left = (dim - d) / 16;
    if (kWide >= 4 && left >= 4)
      weigh_values<S, QUERIES, kWide >= 4 ? 4 : 1>(p, keys, d, dim, old_weight, new_weight, accumulator), d += 64;
    else if (kWide >= 2 && left >= 2)
      weigh_values<S, QUERIES, kWide >= 2 ? 2 : 1>(p, keys, d, dim, old_weight, new_weight, accumulator), d += 32;
    else weigh_values<S, QUERIES, 1>(p, keys, d, dim, old_weight, new_weight, accumulator), d += 16;
  }
}

// Calls f with the number of queries of a tile as a type.
template <class F> AQ_INLINE void with_queries(int queries, const F& f) {
  switch (queries) {
    case 1: f(Number<1>()); break;
    case 2: f(Number<2>()); break;
    case 3: f(Number<3>()); break;
    case 4: f(Number<4>()); break;
    case 5: f(Number<5>()); break;
    default: f(Number<6>()); break;
  }
}

// Folds one block into the state of queries q [queries][dim] that see the same keys: up to kQueries of them, a tile of
// up to kTileRows at a time, between whose products the weights of all are computed.
template <class S>
static void block_update(const FactorOf<S>* q, int queries, int dim, const Keys<S>& keys, float scale, const State& s) {
  alignas(64) float p[kQueries * AQ_BLOCK], rows[kQueries * 16], old_weight[kQueries], new_weight[kQueries];
  const int num_tiles = (queries + kTileRows - 1) / kTileRows;
  for (int tile = 0; tile < num_tiles; tile += kQueries / kTileRows) {
    const int end = tile + kQueries / kTileRows < num_tiles ? tile + kQueries / kTileRows : num_tiles;
    const auto first_of = [&](int t) { return queries * t / num_tiles; };
    const int first = first_of(tile);
    for (int t = tile; t < end; t++) {
      const int at = first_of(t) - first;
      const Scores scores{scale, p + at * AQ_BLOCK, rows + at * 16};
      with_queries(first_of(t + 1) - first_of(t), [&](auto n) {
        score_block<S, n.value>(q + (size_t)first_of(t) * (dim / Factor<S>::kCount), dim, keys, scores);
      });
    }
    const State state = offset(s, first, dim);
    weigh_block<S>(Scores{scale, p, rows}, first_of(end) - first, state, old_weight, new_weight);
    for (int t = tile; t < end; t++) {
      const int at = first_of(t) - first;
      const FactorOf<S>* weights = (const FactorOf<S>*)p + at * (AQ_BLOCK / Factor<S>::kCount);
      with_queries(first_of(t + 1) - first_of(t), [&](auto n) {
        value_block<S, n.value>(weights, dim, keys, old_weight + at, new_weight + at,
                                state.accumulator + (size_t)at * dim);
      });
    }
  }
}

}  // namespace AQ_NAMESPACE
