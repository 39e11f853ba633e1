// The second arithmetic, compiled for CPUs with AVX512_BF16 (setup.py): the tiles of linears and the blocks of
// attention that multiply pairs. A compiler or a processor without it leaves them out.
#if defined(__AVX512BF16__)
#include "kernels.h"
#include "math.h"
#include "simd/types.h"

namespace AQ_NAMESPACE {

using aq::Pair;
using aq::Unpaired;

// 2^x within 4e-6, exactly 1 at 0: a weight keeps eight bits. The polynomial is 1 and 2 at the ends of [0, 1].
AQ_INLINE Vec exp2_coarse(Vec x) {
  const Vec r = fraction(x);
  Vec p = set1(0.01355575f);
  p = fma(p, r, set1(0.05203237f));
  p = fma(p, r, set1(0.24137976f));
  p = fma(p, r, set1(0.69303212f));
  p = fma(p, r, set1(1.0f));
  return scale_exponent(p, x);
}

// weigh_scores of attention_block.h: the weights are rounded, in the memory of the scores.
AQ_INLINE Vec weigh_scores(float* p, float maximum, float scale, Pair* weights) {
  constexpr float kLog2E = 1.44269504f;
  const Vec factor = set1(scale * kLog2E), top = set1(-maximum * kLog2E);
  Vec s[aq::kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < aq::kGroups; g++) {
    s[g] = exp2_coarse(fma(load(p + g * 16), factor, top));
    store_rounded(weights + g * 8, s[g]);
  }
  return add(add(s[0], s[1]), add(s[2], s[3]));
}

// values_at of attention_block.h: two positions at once.
AQ_INLINE Pairs values_at(const aq::Keys<Unpaired>& keys, int step, int dim) {
  return interleave(keys.v[2 * step] + dim, keys.v[2 * step + 1] + dim);
}

}  // namespace AQ_NAMESPACE

#include "attention_block.h"

namespace aq {

const bool kHasDot = true;

void dot_tile(int rows, const void* w, int num_blocks, int steps, const void* x, size_t stride, size_t next,
              float* sums) {
  using Format = dot::DotFormat;
  dot::any_tile<Format>(rows, (const Format::Step*)w, num_blocks, steps, (const Pair*)x, stride, next, sums);
}

namespace {

constexpr int kPairsFrom = 48;  // from so many queries on, pairs are stored once and read by all tiles of queries

const Unpaired kUnseen[kMaxHeadDim] = {};

void pair_channels(const Unpaired* k, int dim, Pair* to) {
  for (int d = 0; d < dim; d += 2) dot::store(to + d * 8, dot::load(k + d * 16));
}

void pair_positions(const Unpaired* first, const Unpaired* second, int dim, Pair* to) {
  for (int d = 0; d < dim; d += 16) dot::store(to + d, dot::interleave(first + d, second + d));
}

}  // namespace

void dot_block(const Pair* q, int queries, int dim, const Keys<Rounded>& stored, float scale, Pair* paired,
               float* maximum, float* sum, float* accumulator) {
  const dot::State state{maximum, sum, accumulator};
  Keys<Unpaired> keys;
  keys.from = stored.from, keys.to = stored.to;
  for (int g = 0; g < kGroups; g++)
    keys.next_k[g] = (const Unpaired*)stored.next_k[g], keys.next_v[g] = (const Unpaired*)stored.next_v[g];
  for (int g = keys.from / 16; g * 16 < keys.to; g++) keys.k[g] = (const Unpaired*)stored.k[g];
  for (int j = keys.from & ~1; j < ((keys.to + 1) & ~1); j++)
    keys.v[j] = j >= keys.from && j < keys.to ? (const Unpaired*)stored.v[j] : kUnseen;
  if (queries < kPairsFrom) return dot::block_update(q, queries, dim, keys, scale, state);

  Keys<Pair> pairs;
  pairs.from = keys.from, pairs.to = keys.to;
  for (int g = 0; g < kGroups; g++)
    pairs.next_k[g] = (const Pair*)keys.next_k[g], pairs.next_v[g] = (const Pair*)keys.next_v[g];
  for (int g = keys.from / 16; g * 16 < keys.to; g++) {
    Pair* to = paired + (size_t)g * 8 * dim;
    pair_channels(keys.k[g], dim, to);
    pairs.k[g] = to;
  }
  Pair* values = paired + (size_t)AQ_BLOCK / 2 * dim;
  for (int j = keys.from / 2; 2 * j < keys.to; j++) {
    Pair* to = values + (size_t)j * dim;
    pair_positions(keys.v[2 * j], keys.v[2 * j + 1], dim, to);
    pairs.v[j] = to;
  }
  dot::block_update(q, queries, dim, pairs, scale, state);
}

}  // namespace aq
#else
#include "kernels.h"

namespace aq {
const bool kHasDot = false;
void dot_tile(int, const void*, int, int, const void*, size_t, size_t, float*) {}
void dot_block(const Pair*, int, int, const Keys<Rounded>&, float, Pair*, float*, float*, float*) {}
}  // namespace aq
#endif
