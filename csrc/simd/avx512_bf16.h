// AVX-512 with AVX512_BF16: the vocabulary of simd.h and the dot product, which adds two products at once to a sum.
//
// Pairs is 16 aq::Pair. Only dot.cpp is compiled with this header.
#pragma once
#include "avx512.h"
#include "types.h"

namespace AQ_NAMESPACE {

typedef __m512bh Pairs;

AQ_INLINE Pairs load(const aq::Pair* p) { return (Pairs)_mm512_loadu_si512(p); }
AQ_INLINE void store(aq::Pair* p, Pairs a) { _mm512_storeu_si512(p, (__m512i)a); }
AQ_INLINE Pairs set1(aq::Pair x) {
  int32_t both;
  memcpy(&both, &x, sizeof both);
  return (Pairs)_mm512_set1_epi32(both);
}
AQ_INLINE Vec fma(Pairs a, Pairs b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }

// Elements of two runs of 16, in turn.
AQ_INLINE Pairs interleave(__m512i runs) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (Pairs)_mm512_permutexvar_epi16(_mm512_load_si512(order), runs);
}
AQ_INLINE Pairs interleave(const aq::Unpaired* first, const aq::Unpaired* second) {
  const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first));
  return interleave(_mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)second), 1));
}
AQ_INLINE Pairs load(const aq::Unpaired* p) { return interleave(_mm512_loadu_si512(p)); }

// Rounds 16 floats to nearest even into eight pairs, on a boundary of 32 bytes.
AQ_INLINE void store_rounded(aq::Pair* p, Vec a) { _mm256_store_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a)); }

AQ_INLINE Vec fraction(Vec x) { return _mm512_reduce_ps(x, 1); }                       // from the integer below
AQ_INLINE Vec scale_exponent(Vec p, Vec x) { return _mm512_scalef_ps(p, x); }  // p * 2^floor(x)

}  // namespace AQ_NAMESPACE
