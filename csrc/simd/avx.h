// What the AVX2 and AVX-512 headers share: reductions of two registers of eight floats.
#pragma once
#include <immintrin.h>

#include "inline.h"

namespace AQ_NAMESPACE {

AQ_INLINE float sum_lanes(__m256 low, __m256 high) {
  const __m256 b = _mm256_add_ps(low, high);
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

AQ_INLINE float max_lanes(__m256 low, __m256 high) {
  const __m256 b = _mm256_max_ps(low, high);
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

}  // namespace AQ_NAMESPACE
