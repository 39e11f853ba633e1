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

// Elements of two runs of 16, in turn.
inline __m512i interleave(__m512i runs) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), runs);
}

void pair_channels(const uint16_t* k, int dim, Pair* to) {
  for (int d = 0; d < dim; d += 2) _mm512_storeu_si512(to + d * 8, interleave(_mm512_loadu_si512(k + d * 16)));
}

// NULL for a position that is not seen.
void pair_positions(const uint16_t* first, const uint16_t* second, int dim, Pair* to) {
  const auto run = [](const uint16_t* v, int d) {
    return v == nullptr ? _mm256_setzero_si256() : _mm256_loadu_si256((const __m256i*)(v + d));
  };
  for (int d = 0; d < dim; d += 16) {
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(run(first, d)), run(second, d), 1);
    _mm512_storeu_si512(to + d, interleave(both));
  }
}

}  // namespace

void dot_block(const Pair* q, int queries, int dim, const Keys<uint16_t>& keys, float scale, Pair* paired, float* maximum,
               float* sum, float* accumulator) {
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
    const auto seen = [&](int at) { return at >= keys.from && at < keys.to ? keys.v[at] : nullptr; };
    Pair* to = values + (size_t)j * dim;
    pair_positions(seen(2 * j), seen(2 * j + 1), dim, to);
    pairs.v[j] = to;
  }
  dot::block_update(q, queries, dim, pairs, scale, dot::State{maximum, sum, accumulator});
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
