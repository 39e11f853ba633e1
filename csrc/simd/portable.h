// The vocabulary of simd.h in GCC's and Clang's vector types, lowered to whatever the machine has.
#pragma once
#include <stdint.h>
#include <string.h>

#include "inline.h"

namespace AQ_NAMESPACE {

constexpr int kAccumulators = 4;
constexpr int kIntegerRows = 1, kIntegerSums = 1;
typedef float Vec __attribute__((vector_size(64)));
typedef uint32_t IVec __attribute__((vector_size(64)));
typedef int32_t Mask __attribute__((vector_size(64)));

AQ_INLINE Vec set1(float x) { return Vec{} + x; }
AQ_INLINE Vec load(const float* p) {
  Vec a;
  memcpy(&a, p, sizeof a);
  return a;
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
AQ_INLINE IVec iload(const uint32_t* p) {
  IVec a;
  memcpy(&a, p, sizeof a);
  return a;
}
AQ_INLINE void istore(uint32_t* p, IVec a) { memcpy(p, &a, sizeof a); }
AQ_INLINE IVec iload(const uint16_t* p) {
  IVec a;
  for (int i = 0; i < 16; i++) a[i] = p[i];
  return a;
}
AQ_INLINE IVec iload(const uint8_t* p) {
  IVec a;
  for (int i = 0; i < 16; i++) a[i] = p[i];
  return a;
}
AQ_INLINE void istore(uint16_t* p, IVec a) {
  for (int i = 0; i < 16; i++) p[i] = (uint16_t)a[i];
}
AQ_INLINE IVec iadd(IVec a, IVec b) { return a + b; }
AQ_INLINE IVec isub(IVec a, IVec b) { return a - b; }
AQ_INLINE IVec imul(IVec a, IVec b) { return a * b; }
AQ_INLINE IVec iand(IVec a, IVec b) { return a & b; }
AQ_INLINE IVec ixor(IVec a, IVec b) { return a ^ b; }
template <int N> AQ_INLINE IVec shl(IVec a) { return a << N; }
template <int N> AQ_INLINE IVec shr(IVec a) { return a >> N; }
AQ_INLINE IVec ior(IVec a, IVec b) { return a | b; }
AQ_INLINE IVec ishr(IVec a, int n) { return a >> (uint32_t)n; }
AQ_INLINE void bstore(void* p, IVec a) {
  for (int i = 0; i < 16; i++) ((uint8_t*)p)[i] = (uint8_t)a[i];
}
AQ_INLINE IVec lookup(IVec a, const uint8_t* table) {
  uint8_t bytes[64];
  memcpy(bytes, &a, sizeof a);
  for (int i = 0; i < 64; i++) bytes[i] = table[bytes[i]];
  memcpy(&a, bytes, sizeof a);
  return a;
}
constexpr int kByteBias = 0;
AQ_INLINE IVec dot(IVec sum, IVec codes, uint32_t x) {
  for (int j = 0; j < 4; j++) sum += ((codes >> (8 * j)) & 255) * (uint32_t)(int32_t)(int8_t)(x >> (8 * j));
  return sum;
}
AQ_INLINE IVec dot_bytes(IVec sum, IVec codes, uint32_t x) {
  for (int j = 0; j < 4; j++) sum += (((codes >> (8 * j)) & 255) - 128) * (uint32_t)(int32_t)(int8_t)(x >> (8 * j));
  return sum;
}
AQ_INLINE IVec dot_signed(IVec sum, IVec codes, uint32_t x) {
  for (int j = 0; j < 4; j++) sum += (IVec)((Mask)(codes << (24 - 8 * j)) >> 24) * ((x >> (8 * j)) & 255);
  return sum;
}
AQ_INLINE IVec iselect(Mask m, IVec yes, IVec no) { return m ? yes : no; }
AQ_INLINE Mask sign_bit(IVec a) { return (Mask)a < 0; }
AQ_INLINE Vec to_float(IVec a) { return __builtin_convertvector((Mask)a, Vec); }
AQ_INLINE Vec as_float(IVec a) { return (Vec)a; }
AQ_INLINE IVec as_int(Vec a) { return (IVec)a; }
AQ_INLINE Vec nibble(IVec a, int i) { return to_float((IVec)((Mask)(a << (28 - 4 * i)) >> 28)); }
AQ_INLINE Vec low_halves(const uint32_t* p) { return as_float(shl<16>(iload(p))); }
AQ_INLINE Vec high_halves(const uint32_t* p) { return as_float(iand(iload(p), iset1(0xffff0000))); }

// By the bits, as F16C does: a NaN becomes quiet and keeps its payload, and subnormal numbers are made of whole ones,
// so that no setting of the processor can flush them.
AQ_INLINE Vec load_half(const uint16_t* p) {
  const IVec bits = iload(p), size = bits & 0x7fff;
  const uint32_t bias = (127 - 15) << 23;
  IVec wide = (size << 13) + bias;
  wide = (Mask)size >= 0x7c00 ? wide + bias : wide;
  wide = (Mask)size > 0x7c00 ? wide | 0x400000 : wide;
  wide = (Mask)size < 0x400 ? as_int(mul(to_float(size), set1(0x1p-24f))) : wide;
  return as_float(wide | (bits & 0x8000) << 16);
}

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

}  // namespace AQ_NAMESPACE

#include "one_by_one.h"
