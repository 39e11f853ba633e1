// The vocabulary of simd.h in NEON, the base instruction set of 64-bit Arm: a Vec is four registers.
#pragma once
#include <arm_neon.h>

#include "inline.h"

namespace AQ_NAMESPACE {

constexpr int kAccumulators = 6;  // 24 of 32 registers; a weight takes four more
constexpr int kIntegerRows = 4, kIntegerSums = 4;
struct Vec {
  float32x4_t p0, p1, p2, p3;
};
struct IVec {
  uint32x4_t p0, p1, p2, p3;
};
typedef IVec Mask;  // all bits of a lane or none

#define AQ_ONE(type, op) \
  return type { op(a.p0), op(a.p1), op(a.p2), op(a.p3) }
#define AQ_TWO(type, op) \
  return type { op(a.p0, b.p0), op(a.p1, b.p1), op(a.p2, b.p2), op(a.p3, b.p3) }
#define AQ_THREE(type, op) \
  return type { op(a.p0, b.p0, c.p0), op(a.p1, b.p1, c.p1), op(a.p2, b.p2, c.p2), op(a.p3, b.p3, c.p3) }
AQ_INLINE Vec set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return Vec{v, v, v, v};
}
AQ_INLINE Vec load(const float* p) { return Vec{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
AQ_INLINE void store(float* p, Vec a) {
  vst1q_f32(p, a.p0), vst1q_f32(p + 4, a.p1), vst1q_f32(p + 8, a.p2), vst1q_f32(p + 12, a.p3);
}
AQ_INLINE Vec add(Vec a, Vec b) { AQ_TWO(Vec, vaddq_f32); }
AQ_INLINE Vec sub(Vec a, Vec b) { AQ_TWO(Vec, vsubq_f32); }
AQ_INLINE Vec mul(Vec a, Vec b) { AQ_TWO(Vec, vmulq_f32); }
AQ_INLINE Vec div(Vec a, Vec b) { AQ_TWO(Vec, vdivq_f32); }
// The instruction takes the summand first.
AQ_INLINE Vec fma(Vec b, Vec c, Vec a) { AQ_THREE(Vec, vfmaq_f32); }
// b where one is NaN or both are zeros, unlike fmax.
AQ_INLINE float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
AQ_INLINE Vec max(Vec a, Vec b) { AQ_TWO(Vec, max); }
AQ_INLINE Mask less(Vec a, Vec b) { AQ_TWO(Mask, vcltq_f32); }
AQ_INLINE uint32x4_t is_nan(float32x4_t a) { return vmvnq_u32(vceqq_f32(a, a)); }
AQ_INLINE Mask is_nan(Vec a) { AQ_ONE(Mask, is_nan); }
AQ_INLINE Mask both(Mask a, Mask b) { AQ_TWO(Mask, vandq_u32); }
AQ_INLINE bool any(Mask a) { return vmaxvq_u32(vorrq_u32(vorrq_u32(a.p0, a.p1), vorrq_u32(a.p2, a.p3))) != 0; }
AQ_INLINE Vec select(Mask a, Vec b, Vec c) { AQ_THREE(Vec, vbslq_f32); }

AQ_INLINE IVec iset1(uint32_t x) {
  const uint32x4_t v = vdupq_n_u32(x);
  return IVec{v, v, v, v};
}
AQ_INLINE IVec iload(const uint32_t* p) {
  return IVec{vld1q_u32(p), vld1q_u32(p + 4), vld1q_u32(p + 8), vld1q_u32(p + 12)};
}
AQ_INLINE void istore(uint32_t* p, IVec a) {
  vst1q_u32(p, a.p0), vst1q_u32(p + 4, a.p1), vst1q_u32(p + 8, a.p2), vst1q_u32(p + 12, a.p3);
}
AQ_INLINE IVec iload(const uint16_t* p) {
  const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
  return IVec{vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)};
}
AQ_INLINE IVec iload(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  return IVec{vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)};
}
AQ_INLINE uint16x8_t low_words(uint32x4_t a, uint32x4_t b) { return vmovn_high_u32(vmovn_u32(a), b); }
AQ_INLINE void istore(uint16_t* p, IVec a) {
  vst1q_u16(p, low_words(a.p0, a.p1)), vst1q_u16(p + 8, low_words(a.p2, a.p3));
}
AQ_INLINE IVec iadd(IVec a, IVec b) { AQ_TWO(IVec, vaddq_u32); }
AQ_INLINE IVec isub(IVec a, IVec b) { AQ_TWO(IVec, vsubq_u32); }
AQ_INLINE IVec imul(IVec a, IVec b) { AQ_TWO(IVec, vmulq_u32); }
AQ_INLINE IVec iand(IVec a, IVec b) { AQ_TWO(IVec, vandq_u32); }
AQ_INLINE IVec ixor(IVec a, IVec b) { AQ_TWO(IVec, veorq_u32); }
AQ_INLINE IVec ior(IVec a, IVec b) { AQ_TWO(IVec, vorrq_u32); }
// Shifts by operators: those of arm_neon.h take literals only, or their amount from a register.
AQ_INLINE IVec ishr(IVec a, int n) {
  const uint32x4_t by = vdupq_n_u32((uint32_t)n);
  return IVec{a.p0 >> by, a.p1 >> by, a.p2 >> by, a.p3 >> by};
}
AQ_INLINE IVec ishl(IVec a, int n) {
  const uint32x4_t by = vdupq_n_u32((uint32_t)n);
  return IVec{a.p0 << by, a.p1 << by, a.p2 << by, a.p3 << by};
}
template <int N> AQ_INLINE IVec shl(IVec a) { return ishl(a, N); }
template <int N> AQ_INLINE IVec shr(IVec a) { return ishr(a, N); }
AQ_INLINE void bstore(void* p, IVec a) {
  vst1q_u8((uint8_t*)p, vmovn_high_u16(vmovn_u16(low_words(a.p0, a.p1)), low_words(a.p2, a.p3)));
}
AQ_INLINE uint32x4_t lookup(uint32x4_t a, uint8x16_t table) {
  return vreinterpretq_u32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(a)));
}
AQ_INLINE IVec lookup(IVec a, const uint8_t* table) {
  const uint8x16_t t = vld1q_u8(table);
  return IVec{lookup(a.p0, t), lookup(a.p1, t), lookup(a.p2, t), lookup(a.p3, t)};
}
constexpr int kByteBias = 0;
AQ_INLINE uint32x4_t dot(uint32x4_t sum, uint32x4_t codes, int8x16_t x) {
  const int8x16_t c = vreinterpretq_s8_u32(codes);
#if defined(__ARM_FEATURE_DOTPROD)
  return vreinterpretq_u32_s32(vdotq_s32(vreinterpretq_s32_u32(sum), c, x));
#else
  // Sums of two products fit 16 bits, since inputs are above -128 (simd/types.h, Codes).
  const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(c), vget_low_s8(x)), vmull_high_s8(c, x));
  return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(sum), pairs));
#endif
}
AQ_INLINE IVec dot(IVec sum, IVec codes, uint32_t x) {
  const int8x16_t v = vreinterpretq_s8_u32(vdupq_n_u32(x));
  return IVec{dot(sum.p0, codes.p0, v), dot(sum.p1, codes.p1, v), dot(sum.p2, codes.p2, v), dot(sum.p3, codes.p3, v)};
}
AQ_INLINE IVec dot_bytes(IVec sum, IVec codes, uint32_t x) { return dot(sum, ixor(codes, iset1(0x80808080)), x); }
AQ_INLINE IVec dot_signed(IVec sum, IVec codes, uint32_t x) { return dot(sum, codes, x); }
AQ_INLINE Mask sign_bit(IVec a) {
  const IVec b = iset1(0x80000000);
  AQ_TWO(Mask, vcgeq_u32);
}
AQ_INLINE IVec iselect(Mask a, IVec b, IVec c) { AQ_THREE(IVec, vbslq_u32); }
AQ_INLINE float32x4_t to_float(uint32x4_t a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }
AQ_INLINE Vec to_float(IVec a) { AQ_ONE(Vec, to_float); }
AQ_INLINE Vec as_float(IVec a) { AQ_ONE(Vec, vreinterpretq_f32_u32); }
AQ_INLINE IVec as_int(Vec a) { AQ_ONE(IVec, vreinterpretq_u32_f32); }
AQ_INLINE float32x4_t top_nibble(uint32x4_t a) { return vcvtq_f32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a), 28)); }
AQ_INLINE Vec top_nibbles(IVec a) { AQ_ONE(Vec, top_nibble); }
AQ_INLINE Vec nibble(IVec a, int i) { return top_nibbles(ishl(a, 28 - 4 * i)); }
AQ_INLINE Vec load(const int8_t* p) {
  const int8x16_t a = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(a)), high = vmovl_high_s8(a);
  return Vec{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}
// As F16C does it: a NaN becomes quiet and keeps its payload.
AQ_INLINE Vec load_half(const uint16_t* p) {
  const float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(p)), high = vreinterpretq_f16_u16(vld1q_u16(p + 8));
  return Vec{vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
             vcvt_high_f32_f16(high)};
}
AQ_INLINE Vec low_halves(const uint32_t* p) { return as_float(shl<16>(iload(p))); }
AQ_INLINE Vec high_halves(const uint32_t* p) { return as_float(iand(iload(p), iset1(0xffff0000))); }

AQ_INLINE float sum_lanes(Vec a) {
  const float32x4_t b = vaddq_f32(vaddq_f32(a.p0, a.p2), vaddq_f32(a.p1, a.p3));
  return vpadds_f32(vadd_f32(vget_low_f32(b), vget_high_f32(b)));
}
AQ_INLINE float max_lanes(Vec a) {
  const float32x4_t b = max(max(a.p0, a.p2), max(a.p1, a.p3));
  const float32x4_t c = max(b, vextq_f32(b, b, 2));
  return vgetq_lane_f32(max(c, vextq_f32(c, c, 1)), 0);
}
#undef AQ_ONE
#undef AQ_TWO
#undef AQ_THREE

}  // namespace AQ_NAMESPACE

#include "one_by_one.h"
