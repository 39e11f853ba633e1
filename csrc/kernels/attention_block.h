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

// Softmax state of some queries: maximum and sum [queries], accumulator [queries][dim].
struct State {
  float *maximum, *sum, *accumulator;
};

AQ_INLINE State offset(const State& s, int query, int dim) {
  return State{s.maximum + query, s.sum + query, s.accumulator + (size_t)query * dim};
}

template <class S, int QUERIES, int GROUPS>
AQ_INLINE void score_groups(const FactorOf<S>* q, int steps, const S* const* k, const S* const* next_k, float* scores) {
  const S *keys[GROUPS], *next[GROUPS];
  Vec sum[QUERIES][GROUPS];
#pragma GCC unroll 8
  for (int g = 0; g < GROUPS; g++) keys[g] = k[g], next[g] = next_k[g];
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) sum[m][g] = zero();
  for (int d = 0; d < steps; d++) {
    const int at = d * 16 * Factor<S>::kElements;
    decltype(load(keys[0])) key[GROUPS];
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) key[g] = load(keys[g] + at), prefetch(next[g] + at);
#pragma GCC unroll 8
    for (int m = 0; m < QUERIES; m++) {
      const auto value = set1(q[m * steps + d]);
#pragma GCC unroll 8
      for (int g = 0; g < GROUPS; g++) sum[m][g] = fma(value, key[g], sum[m][g]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) store(scores + m * AQ_BLOCK + g * 16, sum[m][g]);
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

// Scales the raw scores of one query and returns their maximum; lanes outside [from, to) become -inf whatever they
// held. In the second arithmetic only the maximum is scaled.
template <class S>
static float mask_scores(float* p, int from, int to, float scale) {
  constexpr bool kScales = Factor<S>::kCount == 1;
  const bool is_whole = from == 0 && to == AQ_BLOCK;
  Vec s[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g++) {
    s[g] = load(p + g * 16);
    if (kScales) s[g] = mul(s[g], set1(scale));
    if (!is_whole) {
      const Vec position = add(to_float(iota()), set1(16.0f * g));
      const auto visible = both(less(position, set1((float)to)), less(set1((float)from - 1.0f), position));
      s[g] = select(visible, s[g], set1(-kInfinity));
    }
    if (kScales || !is_whole) store(p + g * 16, s[g]);
  }
  return max_lanes(max(max(s[0], s[1]), max(s[2], s[3]))) * (kScales ? 1.0f : scale);
}

// Turns scores into weights exp(score - maximum) and returns their sum.
AQ_INLINE float weigh_scores(float* p, float maximum, float, float* weights) {
  Vec s[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g++) {
    s[g] = exp(sub(load(p + g * 16), set1(maximum)));
    store(weights + g * 16, s[g]);
  }
  return sum_lanes(add(add(s[0], s[1]), add(s[2], s[3])));
}

// Folds one block into the state of QUERIES queries q [QUERIES][dim] that see the same keys.
template <class S, int QUERIES>
static __attribute__((noinline)) void block_tile(const FactorOf<S>* q, int dim, const Keys<S>& keys, float scale,
                                                 const State& s) {
  constexpr int kWide = blocks_for(QUERIES);
  alignas(64) float p[QUERIES * AQ_BLOCK];
  const int steps = dim / Factor<S>::kCount;
  const int last_group = (keys.to + 15) / 16;
  for (int g = keys.from / 16; g < last_group;) {
    const int left = last_group - g;
    if (kWide >= 4 && left >= 4)
      score_groups<S, QUERIES, kWide >= 4 ? 4 : 1>(q, steps, keys.k + g, keys.next_k + g, p + g * 16), g += 4;
    else if (kWide >= 2 && left >= 2)
      score_groups<S, QUERIES, kWide >= 2 ? 2 : 1>(q, steps, keys.k + g, keys.next_k + g, p + g * 16), g += 2;
    else score_groups<S, QUERIES, 1>(q, steps, keys.k + g, keys.next_k + g, p + g * 16), g += 1;
  }
  // One lane per query; lanes from QUERIES on hold values that nobody reads.
  float maximum[16] = {}, top[16], old_weight[16], new_weight[16];
  for (int m = 0; m < QUERIES; m++) maximum[m] = mask_scores<S>(p + m * AQ_BLOCK, keys.from, keys.to, scale);
  const Vec old_top = load(s.maximum), new_top = max(old_top, load(maximum));
  store(top, new_top);
  store(old_weight, exp(sub(old_top, new_top)));
  store(new_weight, exp(sub(load(maximum), new_top)));
  FactorOf<S>* weights = (FactorOf<S>*)p;
  for (int m = 0; m < QUERIES; m++) {
    FactorOf<S>* own = weights + m * (AQ_BLOCK / Factor<S>::kCount);
    s.sum[m] = s.sum[m] * old_weight[m] + weigh_scores(p + m * AQ_BLOCK, maximum[m], scale, own) * new_weight[m];
    s.maximum[m] = top[m];
  }
  for (int d = 0; d < dim;) {
    const int left = (dim - d) / 16;
    if (kWide >= 4 && left >= 4)
      weigh_values<S, QUERIES, kWide >= 4 ? 4 : 1>(weights, keys, d, dim, old_weight, new_weight, s.accumulator),
          d += 64;
    else if (kWide >= 2 && left >= 2)
      weigh_values<S, QUERIES, kWide >= 2 ? 2 : 1>(weights, keys, d, dim, old_weight, new_weight, s.accumulator),
          d += 32;
    else weigh_values<S, QUERIES, 1>(weights, keys, d, dim, old_weight, new_weight, s.accumulator), d += 16;
  }
}

template <class S>
static void block_update(const FactorOf<S>* q, int queries, int dim, const Keys<S>& keys, float scale, const State& s) {
  const int num_tiles = (queries + kTileRows - 1) / kTileRows;
  for (int t = 0; t < num_tiles; t++) {
    const int first = queries * t / num_tiles, last = queries * (t + 1) / num_tiles;
    const FactorOf<S>* from = q + (size_t)first * (dim / Factor<S>::kCount);
    const State state = offset(s, first, dim);
    switch (last - first) {
      case 1: block_tile<S, 1>(from, dim, keys, scale, state); break;
      case 2: block_tile<S, 2>(from, dim, keys, scale, state); break;
      case 3: block_tile<S, 3>(from, dim, keys, scale, state); break;
      case 4: block_tile<S, 4>(from, dim, keys, scale, state); break;
      case 5: block_tile<S, 5>(from, dim, keys, scale, state); break;
      default: block_tile<S, 6>(from, dim, keys, scale, state); break;
    }
  }
}

}  // namespace AQ_NAMESPACE
