// The vocabulary of simd.h in AVX2, FMA and F16C: a Vec is two registers.
#pragma once
#include "avx.h"

namespace AQ_NAMESPACE {

constexpr int kAccumulators = 5;  // with 6 in two blocks, GCC keeps one of them in memory
constexpr int kIntegerRows = 4, kIntegerSums = 4;
struct Vec {
  __m256 lo, hi;
};
struct IVec {
  __m256i lo, hi;
};
struct Mask {
  __m256 lo, hi;
};

#define AQ_BOTH(type, op, ...) \
  return type { op((a).lo, ##__VA_ARGS__), op((a).hi, ##__VA_ARGS__) }
#define AQ_PAIR(type, op) \
  return type { op(a.lo, b.lo), op(a.hi, b.hi) }
AQ_INLINE Vec set1(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return Vec{v, v};
}
AQ_INLINE Vec load(const float* p) { return Vec{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
AQ_INLINE __m256 widen(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
AQ_INLINE Vec load(const int8_t* p) { return Vec{widen(p), widen(p + 8)}; }
AQ_INLINE Vec load_half(const uint16_t* p) {
  return Vec{_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
             _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
AQ_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
AQ_INLINE Vec add(Vec a, Vec b) { AQ_PAIR(Vec, _mm256_add_ps); }
AQ_INLINE Vec sub(Vec a, Vec b) { AQ_PAIR(Vec, _mm256_sub_ps); }
AQ_INLINE Vec mul(Vec a, Vec b) { AQ_PAIR(Vec, _mm256_mul_ps); }
AQ_INLINE Vec div(Vec a, Vec b) { AQ_PAIR(Vec, _mm256_div_ps); }
AQ_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return Vec{_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
AQ_INLINE Vec max(Vec a, Vec b) { AQ_PAIR(Vec, _mm256_max_ps); }
AQ_INLINE Mask less(Vec a, Vec b) {
  return Mask{_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
AQ_INLINE Mask is_nan(Vec a) {
  return Mask{_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}
AQ_INLINE Mask both(Mask a, Mask b) { AQ_PAIR(Mask, _mm256_and_ps); }
AQ_INLINE bool any(Mask a) { return _mm256_movemask_ps(_mm256_or_ps(a.lo, a.hi)) != 0; }
AQ_INLINE Vec select(Mask m, Vec yes, Vec no) {
  return Vec{_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}

AQ_INLINE IVec iset1(uint32_t x) {
  const __m256i v = _mm256_set1_epi32((int)x);
  return IVec{v, v};
}
AQ_INLINE IVec iload(const uint32_t* p) {
  return IVec{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
AQ_INLINE void istore(uint32_t* p, IVec a) {
  _mm256_storeu_si256((__m256i*)p, a.lo), _mm256_storeu_si256((__m256i*)(p + 8), a.hi);
}
AQ_INLINE IVec iload(const uint16_t* p) {
  return IVec{_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)),
              _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
AQ_INLINE IVec iload(const uint8_t* p) {
  return IVec{_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
              _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
AQ_INLINE void istore(uint16_t* p, IVec a) {
  uint32_t lane[16];
  istore(lane, a);
  for (int i = 0; i < 16; i++) p[i] = (uint16_t)lane[i];
}
AQ_INLINE IVec iadd(IVec a, IVec b) { AQ_PAIR(IVec, _mm256_add_epi32); }
AQ_INLINE IVec isub(IVec a, IVec b) { AQ_PAIR(IVec, _mm256_sub_epi32); }
AQ_INLINE IVec imul(IVec a, IVec b) { AQ_PAIR(IVec, _mm256_mullo_epi32); }
AQ_INLINE IVec iand(IVec a, IVec b) { AQ_PAIR(IVec, _mm256_and_si256); }
AQ_INLINE IVec ixor(IVec a, IVec b) { AQ_PAIR(IVec, _mm256_xor_si256); }
AQ_INLINE IVec ior(IVec a, IVec b) { AQ_PAIR(IVec, _mm256_or_si256); }
AQ_INLINE IVec ishr(IVec a, int n) { AQ_BOTH(IVec, _mm256_srli_epi32, n); }
AQ_INLINE __m128i low_bytes(__m256i a) {
  const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                         0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8(a, order);
  return _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
}
AQ_INLINE void bstore(void* p, IVec a) {
  _mm_storeu_si128((__m128i*)p, _mm_unpacklo_epi64(low_bytes(a.lo), low_bytes(a.hi)));
}
AQ_INLINE IVec lookup(IVec a, const uint8_t* table) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return IVec{_mm256_shuffle_epi8(both, a.lo), _mm256_shuffle_epi8(both, a.hi)};
}
#if defined(__AVXVNNI__)
constexpr int kByteBias = 128;
AQ_INLINE IVec dot(IVec sum, IVec codes, uint32_t x) {
  const __m256i v = _mm256_set1_epi32((int)x);
  return IVec{_mm256_dpbusd_avx_epi32(sum.lo, codes.lo, v), _mm256_dpbusd_avx_epi32(sum.hi, codes.hi, v)};
}
AQ_INLINE IVec dot_bytes(IVec sum, IVec codes, uint32_t x) { return dot(sum, codes, x); }
AQ_INLINE IVec dot_signed(IVec sum, IVec codes, uint32_t x) {
  const __m256i v = _mm256_set1_epi32((int)x);
  return IVec{_mm256_dpbusd_avx_epi32(sum.lo, v, codes.lo), _mm256_dpbusd_avx_epi32(sum.hi, v, codes.hi)};
}
#else
constexpr int kByteBias = 0;
AQ_INLINE __m256i dot(__m256i sum, __m256i codes, __m256i x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}
AQ_INLINE IVec dot(IVec sum, IVec codes, uint32_t x) {
  const __m256i v = _mm256_set1_epi32((int)x);
  return IVec{dot(sum.lo, codes.lo, v), dot(sum.hi, codes.hi, v)};
}
// Sums of two products fit 16 bits only below 128: the weight's size times the input with the weight's sign. A weight
// of -128 has the size 128 here.
AQ_INLINE __m256i dot_bytes(__m256i sum, __m256i codes, __m256i x) {
  const __m256i weights = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
  return dot(sum, _mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
}
AQ_INLINE IVec dot_bytes(IVec sum, IVec codes, uint32_t x) {
  const __m256i v = _mm256_set1_epi32((int)x);
  return IVec{dot_bytes(sum.lo, codes.lo, v), dot_bytes(sum.hi, codes.hi, v)};
}
AQ_INLINE IVec dot_signed(IVec sum, IVec codes, uint32_t x) {
  const __m256i v = _mm256_set1_epi32((int)x);
  return IVec{dot(sum.lo, v, codes.lo), dot(sum.hi, v, codes.hi)};
}
#endif
template <int N> AQ_INLINE IVec shl(IVec a) { AQ_BOTH(IVec, _mm256_slli_epi32, N); }
template <int N> AQ_INLINE IVec shr(IVec a) { AQ_BOTH(IVec, _mm256_srli_epi32, N); }
AQ_INLINE Vec to_float(IVec a) { AQ_BOTH(Vec, _mm256_cvtepi32_ps); }
AQ_INLINE Vec as_float(IVec a) { AQ_BOTH(Vec, _mm256_castsi256_ps); }
AQ_INLINE IVec as_int(Vec a) { AQ_BOTH(IVec, _mm256_castps_si256); }
AQ_INLINE IVec iselect(Mask m, IVec yes, IVec no) { return as_int(select(m, as_float(yes), as_float(no))); }
AQ_INLINE __m256 nibble(__m256i a, int i) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a, 28 - 4 * i), 28));
}
AQ_INLINE Vec nibble(IVec a, int i) { return Vec{nibble(a.lo, i), nibble(a.hi, i)}; }
AQ_INLINE Mask sign_bit(IVec a) { AQ_BOTH(Mask, _mm256_castsi256_ps); }  // blends and movemask look at the sign only
AQ_INLINE Vec low_halves(const uint32_t* p) { return as_float(shl<16>(iload(p))); }
AQ_INLINE Vec high_halves(const uint32_t* p) { return as_float(iand(iload(p), iset1(0xffff0000))); }

AQ_INLINE float sum_lanes(Vec a) { return sum_lanes(a.lo, a.hi); }
AQ_INLINE float max_lanes(Vec a) { return max_lanes(a.lo, a.hi); }
#undef AQ_BOTH
#undef AQ_PAIR

}  // namespace AQ_NAMESPACE

#include "one_by_one.h"
