// Vec, 16 floats, and IVec, 16 uint32, for the instruction set this file is compiled for.
//
// Every operation is exact or correctly rounded, so the three versions give the same bits. Nothing here comes from
// std::, and all of it lives in the namespace of one instruction set: an inline function with a shared name would be
// merged by the linker, which may keep the copy that an older CPU cannot run.
#pragma once
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#if defined(AQ_AVX512) || defined(AQ_AVX2)
#include <immintrin.h>
#endif

#define AQ_INLINE static inline __attribute__((always_inline))

namespace AQ_NAMESPACE {

#if defined(AQ_AVX512)

constexpr int kAccumulators = 24;  // registers' worth of Vec that an inner loop may keep as sums
typedef __m512 Vec;
typedef __m512i IVec;
typedef __mmask16 Mask;

AQ_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
AQ_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
AQ_INLINE Vec load(const uint16_t* p) {  // bfloat16
  const __m256i raw = _mm256_loadu_si256((const __m256i*)p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
AQ_INLINE Vec first(const aq::Pair* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
AQ_INLINE Vec second(const aq::Pair* p) { return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(0xaaaaaaaa, p)); }
AQ_INLINE Vec load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
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
AQ_INLINE IVec iadd(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
AQ_INLINE IVec isub(IVec a, IVec b) { return _mm512_sub_epi32(a, b); }
AQ_INLINE IVec imul(IVec a, IVec b) { return _mm512_mullo_epi32(a, b); }
AQ_INLINE IVec iand(IVec a, IVec b) { return _mm512_and_si512(a, b); }
AQ_INLINE IVec ixor(IVec a, IVec b) { return _mm512_xor_si512(a, b); }
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
AQ_INLINE void store_low(uint16_t* p, IVec a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a)); }

#if defined(AQ_DOT)
AQ_INLINE __m512bh load(const aq::Pair* p) { return (__m512bh)_mm512_loadu_si512(p); }
AQ_INLINE __m512bh set1(aq::Pair x) {
  int32_t both;
  memcpy(&both, &x, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}
AQ_INLINE Vec fma(__m512bh a, __m512bh b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }
#endif

#elif defined(AQ_AVX2)

constexpr int kAccumulators = 5;  // with 6 in two blocks, GCC keeps one of them in memory
struct Vec { __m256 lo, hi; };
struct IVec { __m256i lo, hi; };
struct Mask { __m256 lo, hi; };

#define AQ_BOTH(type, op, ...) return type{op((a).lo, ##__VA_ARGS__), op((a).hi, ##__VA_ARGS__)}
#define AQ_PAIR(type, op) return type{op(a.lo, b.lo), op(a.hi, b.hi)}
AQ_INLINE Vec set1(float x) { const __m256 v = _mm256_set1_ps(x); return Vec{v, v}; }
AQ_INLINE Vec load(const float* p) { return Vec{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
AQ_INLINE __m256 widen(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
AQ_INLINE __m256 widen(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
AQ_INLINE Vec load(const uint16_t* p) { return Vec{widen(p), widen(p + 8)}; }  // bfloat16
AQ_INLINE Vec load(const int8_t* p) { return Vec{widen(p), widen(p + 8)}; }
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

AQ_INLINE IVec iset1(uint32_t x) { const __m256i v = _mm256_set1_epi32((int)x); return IVec{v, v}; }
AQ_INLINE IVec iload(const uint32_t* p) {
  return IVec{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
AQ_INLINE void istore(uint32_t* p, IVec a) {
  _mm256_storeu_si256((__m256i*)p, a.lo), _mm256_storeu_si256((__m256i*)(p + 8), a.hi);
}
AQ_INLINE IVec iadd(IVec a, IVec b) { AQ_PAIR(IVec, _mm256_add_epi32); }
AQ_INLINE IVec isub(IVec a, IVec b) { AQ_PAIR(IVec, _mm256_sub_epi32); }
AQ_INLINE IVec imul(IVec a, IVec b) { AQ_PAIR(IVec, _mm256_mullo_epi32); }
AQ_INLINE IVec iand(IVec a, IVec b) { AQ_PAIR(IVec, _mm256_and_si256); }
AQ_INLINE IVec ixor(IVec a, IVec b) { AQ_PAIR(IVec, _mm256_xor_si256); }
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
#undef AQ_BOTH
#undef AQ_PAIR

#else  // GCC's and Clang's vector types, lowered to whatever the machine has

constexpr int kAccumulators = 4;
typedef float Vec __attribute__((vector_size(64)));
typedef uint32_t IVec __attribute__((vector_size(64)));
typedef int32_t Mask __attribute__((vector_size(64)));

AQ_INLINE Vec set1(float x) { return Vec{} + x; }
AQ_INLINE Vec load(const float* p) { Vec a; memcpy(&a, p, sizeof a); return a; }
AQ_INLINE Vec load(const uint16_t* p) {  // bfloat16
  IVec a;
  for (int i = 0; i < 16; i++) a[i] = (uint32_t)p[i] << 16;
  return (Vec)a;
}
AQ_INLINE Vec load(const int8_t* p) {
  Vec a;
  for (int i = 0; i < 16; i++) a[i] = p[i];
  return a;
}
AQ_INLINE void store(float* p, Vec a) { memcpy(p, &a, sizeof a); }
AQ_INLINE Vec add(Vec a, Vec b) { return a + b; }
AQ_INLINE Vec sub(Vec a, Vec b) { return a - b; }
AQ_INLINE Vec mul(Vec a, Vec b) { return a * b; }
AQ_INLINE Vec div(Vec a, Vec b) { return a / b; }
AQ_INLINE Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < 16; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);  // correctly rounded, in software if need be
  return c;
}
AQ_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
AQ_INLINE Mask less(Vec a, Vec b) { return a < b; }
AQ_INLINE Mask is_nan(Vec a) { return a != a; }
AQ_INLINE Mask both(Mask a, Mask b) { return a & b; }
AQ_INLINE bool any(Mask a) {
  int32_t bits = 0;
  for (int i = 0; i < 16; i++) bits |= a[i];
  return bits != 0;
}
AQ_INLINE Vec select(Mask m, Vec yes, Vec no) { return m ? yes : no; }

AQ_INLINE IVec iset1(uint32_t x) { return IVec{} + x; }
AQ_INLINE IVec iload(const uint32_t* p) { IVec a; memcpy(&a, p, sizeof a); return a; }
AQ_INLINE void istore(uint32_t* p, IVec a) { memcpy(p, &a, sizeof a); }
AQ_INLINE IVec iadd(IVec a, IVec b) { return a + b; }
AQ_INLINE IVec isub(IVec a, IVec b) { return a - b; }
AQ_INLINE IVec imul(IVec a, IVec b) { return a * b; }
AQ_INLINE IVec iand(IVec a, IVec b) { return a & b; }
AQ_INLINE IVec ixor(IVec a, IVec b) { return a ^ b; }
template <int N> AQ_INLINE IVec shl(IVec a) { return a << N; }
template <int N> AQ_INLINE IVec shr(IVec a) { return a >> N; }
AQ_INLINE IVec iselect(Mask m, IVec yes, IVec no) { return m ? yes : no; }
AQ_INLINE Mask sign_bit(IVec a) { return (Mask)a < 0; }
AQ_INLINE Vec to_float(IVec a) { return __builtin_convertvector((Mask)a, Vec); }
AQ_INLINE Vec as_float(IVec a) { return (Vec)a; }
AQ_INLINE IVec as_int(Vec a) { return (IVec)a; }
AQ_INLINE Vec nibble(IVec a, int i) { return to_float((IVec)((Mask)(a << (28 - 4 * i)) >> 28)); }

#endif

// Into L2: a core has few slots for lines on their way to L1 (about 10 GB/s' worth at the latency of memory), but many
// for L2. Measured on Zen 4: attention at 2K keys reads 24 GB/s a core so, 10 with a prefetch into L1.
AQ_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
AQ_INLINE Vec zero() { return set1(0.0f); }
#if !defined(AQ_AVX512)
// The bfloat16 weights of 16 pairs.
AQ_INLINE Vec first(const aq::Pair* p) { return as_float(shl<16>(iload((const uint32_t*)p))); }
AQ_INLINE Vec second(const aq::Pair* p) { return as_float(iand(iload((const uint32_t*)p), iset1(0xffff0000))); }
AQ_INLINE void store_low(uint16_t* p, IVec a) {
  uint32_t lane[16];
  istore(lane, a);
  for (int i = 0; i < 16; i++) p[i] = (uint16_t)lane[i];
}
#endif
// Rounds to bfloat16, to nearest even; a NaN stays one.
AQ_INLINE void store(uint16_t* p, Vec a) {
  const IVec bits = as_int(a);
  const IVec rounded = shr<16>(iadd(bits, iadd(iset1(0x7fff), iand(shr<16>(bits), iset1(1)))));
  store_low(p, iselect(is_nan(a), iset1(0x7fc0), rounded));
}
AQ_INLINE IVec iota() {
  static const uint32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return iload(lanes);
}

// Reductions of 16 lanes have one merge tree: halves with halves.
#if defined(AQ_AVX512) || defined(AQ_AVX2)
#if defined(AQ_AVX512)
AQ_INLINE __m256 low_half(Vec a) { return _mm512_castps512_ps256(a); }
AQ_INLINE __m256 high_half(Vec a) { return _mm512_extractf32x8_ps(a, 1); }
#else
AQ_INLINE __m256 low_half(Vec a) { return a.lo; }
AQ_INLINE __m256 high_half(Vec a) { return a.hi; }
#endif
AQ_INLINE float sum_lanes(Vec a) {
  const __m256 b = _mm256_add_ps(low_half(a), high_half(a));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
AQ_INLINE float max_lanes(Vec a) {
  const __m256 b = _mm256_max_ps(low_half(a), high_half(a));
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
#else
AQ_INLINE float sum_lanes(Vec a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a[i] += a[i + half];
  return a[0];
}
AQ_INLINE float max_lanes(Vec a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
  return a[0];
}
#endif

}  // namespace AQ_NAMESPACE
