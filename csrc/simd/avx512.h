// The vocabulary of simd.h in AVX-512 (F, BW, VL, DQ): a Vec is one register.
#pragma once
#include "avx.h"

namespace AQ_NAMESPACE {

constexpr int kAccumulators = 24;  // registers' worth of Vec that an inner loop may keep as sums
constexpr int kIntegerRows = 6, kIntegerSums = 12;
typedef __m512 Vec;
typedef __m512i IVec;
typedef __mmask16 Mask;

AQ_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
AQ_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
AQ_INLINE Vec load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
AQ_INLINE Vec load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
AQ_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
AQ_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
AQ_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
AQ_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
AQ_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
AQ_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
AQ_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
AQ_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
AQ_INLINE Mask is_nan(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
AQ_INLINE Mask both(Mask a, Mask b) { return a & b; }
AQ_INLINE bool any(Mask a) { return a != 0; }
AQ_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }

AQ_INLINE IVec iset1(uint32_t x) { return _mm512_set1_epi32((int)x); }
AQ_INLINE IVec iload(const uint32_t* p) { return _mm512_loadu_si512(p); }
AQ_INLINE void istore(uint32_t* p, IVec a) { _mm512_storeu_si512(p, a); }
AQ_INLINE IVec iload(const uint16_t* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
AQ_INLINE IVec iload(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
AQ_INLINE void istore(uint16_t* p, IVec a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a)); }
AQ_INLINE IVec iadd(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
AQ_INLINE IVec isub(IVec a, IVec b) { return _mm512_sub_epi32(a, b); }
AQ_INLINE IVec imul(IVec a, IVec b) { return _mm512_mullo_epi32(a, b); }
AQ_INLINE IVec iand(IVec a, IVec b) { return _mm512_and_si512(a, b); }
AQ_INLINE IVec ixor(IVec a, IVec b) { return _mm512_xor_si512(a, b); }
AQ_INLINE IVec ior(IVec a, IVec b) { return _mm512_or_si512(a, b); }
AQ_INLINE IVec ishr(IVec a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
AQ_INLINE void bstore(void* p, IVec a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
AQ_INLINE IVec lookup(IVec a, const uint8_t* table) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), a);
}
#if defined(__AVX512VNNI__)
constexpr int kByteBias = 128;
AQ_INLINE IVec dot(IVec sum, IVec codes, uint32_t x) {
  return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32((int)x));
}
AQ_INLINE IVec dot_bytes(IVec sum, IVec codes, uint32_t x) { return dot(sum, codes, x); }
AQ_INLINE IVec dot_signed(IVec sum, IVec codes, uint32_t x) {
  return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32((int)x), codes);
}
#endif
template <int N> AQ_INLINE IVec shl(IVec a) { return _mm512_slli_epi32(a, N); }
template <int N> AQ_INLINE IVec shr(IVec a) { return _mm512_srli_epi32(a, N); }
AQ_INLINE IVec iselect(Mask m, IVec yes, IVec no) { return _mm512_mask_blend_epi32(m, no, yes); }
AQ_INLINE Mask sign_bit(IVec a) { return _mm512_cmplt_epi32_mask(a, _mm512_setzero_si512()); }
AQ_INLINE Vec to_float(IVec a) { return _mm512_cvtepi32_ps(a); }
AQ_INLINE Vec as_float(IVec a) { return _mm512_castsi512_ps(a); }
AQ_INLINE IVec as_int(Vec a) { return _mm512_castps_si512(a); }
// The i-th four bits of each lane, two's complement; a permutation looks at the low four bits of its index.
AQ_INLINE Vec nibble(IVec a, int i) {
  const Vec values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(a, (unsigned)(4 * i)), values);
}

AQ_INLINE Vec low_halves(const uint32_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
AQ_INLINE Vec high_halves(const uint32_t* p) { return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(0xaaaaaaaa, p)); }

AQ_INLINE float sum_lanes(Vec a) { return sum_lanes(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
AQ_INLINE float max_lanes(Vec a) { return max_lanes(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }

// Merges x with y by halves, quarters, and so on, as sum_lanes and max_lanes merge the lanes of one.
template <class Op> AQ_INLINE Vec halves(Vec x, Vec y, Op op) {
  return op(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
}
template <class Op> AQ_INLINE Vec quarters(Vec x, Vec y, Op op) {
  return op(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}
template <class Op> AQ_INLINE Vec pairs(Vec x, Vec y, Op op) {
  const __m512d a = _mm512_castps_pd(x), b = _mm512_castps_pd(y);
  return op(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}
template <class Op> AQ_INLINE Vec singles(Vec x, Vec y, Op op) {
  return op(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
}
template <class Op> AQ_INLINE Vec merge_rows(const float* rows, int count, Op op) {
  Vec x[8];
  if (count <= 4) {
    const Vec all = quarters(halves(load(rows), load(rows + 16), op), halves(load(rows + 32), load(rows + 48), op), op),
              two = pairs(all, all, op);
    return _mm512_permutexvar_ps(
        _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), 2), singles(two, two, op));
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) x[i] = halves(load(rows + i * 16), load(rows + i * 16 + 128), op);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) x[i] = quarters(x[i], x[i + 4], op);
  const Vec merged = singles(pairs(x[0], x[2], op), pairs(x[1], x[3], op), op);
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_permutexvar_ps(order, merged);
}
AQ_INLINE Vec sum_rows(const float* rows, int count) {
  return merge_rows(rows, count, [](Vec a, Vec b) { return add(a, b); });
}
AQ_INLINE Vec max_rows(const float* rows, int count) {
  return merge_rows(rows, count, [](Vec a, Vec b) { return max(a, b); });
}

}  // namespace AQ_NAMESPACE
