// The bfloat16 dot product: linear.h's row tile and attention.h's blocks, compiled for CPUs with AVX512_BF16 (setup.py). A
// compiler or a processor without it leaves them out.
#if defined(__AVX512BF16__)
#define AQ_AVX512
#define AQ_DOT
#define AQ_NAMESPACE dot
#include "attention.h"

namespace aq {
const bool kHasDot = true;

void dot_tile(int rows, const Pair* w, int num_blocks, int num_pairs, const Pair* x, size_t next, float* sums) {
  dot::any_tile(rows, w, num_blocks, num_pairs, x, next, sums);
}

namespace {

constexpr int kPairsFrom = 48;  // queries from which pairs are worth being written down for all tiles of them

const Unpaired kUnseen[kMaxHeadDim] = {};

void pair_channels(const Unpaired* k, int dim, Pair* to) {
  for (int d = 0; d < dim; d += 2) _mm512_storeu_si512(to + d * 8, dot::interleave(_mm512_loadu_si512(k + d * 16)));
}

void pair_positions(const Unpaired* first, const Unpaired* second, int dim, Pair* to) {
  for (int d = 0; d < dim; d += 16) _mm512_storeu_si512(to + d, dot::interleave(first + d, second + d));
}

}  // namespace

void dot_block(const Pair* q, int queries, int dim, const Keys<uint16_t>& stored, float scale, Pair* paired, float* maximum,
               float* sum, float* accumulator) {
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
  for (int g = 0; g < kGroups; g++) pairs.next_k[g] = (const Pair*)keys.next_k[g], pairs.next_v[g] = (const Pair*)keys.next_v[g];
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
void dot_tile(int, const Pair*, int, int, const Pair*, size_t, float*) {}
void dot_block(const Pair*, int, int, const Keys<uint16_t>&, float, Pair*, float*, float*, float*) {}
}  // namespace aq
#endif
