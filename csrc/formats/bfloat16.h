// bfloat16: the upper half of a float32, rounded to nearest even. Weights lie in pairs of channels, so that one word of
// 32 bits becomes two weights by one operation each, and so that the dot product (bfloat16_dot.h) can read the same
// layout.
#pragma once
#include "format.h"
#include "simd/types.h"

namespace AQ_NAMESPACE {

using aq::Pair;
using aq::Rounded;

AQ_INLINE Vec load(const Rounded* p) { return as_float(shl<16>(iload(&p->bits))); }

// A NaN stays one.
AQ_INLINE void store(Rounded* p, Vec a) {
  const IVec bits = as_int(a);
  const IVec rounded = shr<16>(iadd(bits, iadd(iset1(0x7fff), iand(shr<16>(bits), iset1(1)))));
  istore(&p->bits, iselect(is_nan(a), iset1(0x7fc0), rounded));
}

// The same of one number.
AQ_INLINE void narrow(float x, Rounded* y) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  y->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct Bfloat16 : Format {
  static constexpr const char* kName = "bfloat16";
  using Element = Rounded;
  using Key = Rounded;
  static constexpr int kSourceBytes = 2, kAlignment = 2;

  struct Step {
    Pair pairs[2][16];
  };
  static constexpr int kChannels = 4, kUnits = 2, kRun = 2;
  AQ_INLINE const uint32_t* unit(const Step& step, int i) { return (const uint32_t*)step.pairs[i]; }
  AQ_INLINE Vec weight(const uint32_t* pairs, int i) { return i == 0 ? low_halves(pairs) : high_halves(pairs); }

  static void pack(const Source& from, void* packed) {
    pack_runs((const Rounded*)from.weight, from, 2, (Rounded*)packed);
  }
};
AQ_FORMAT(1, Bfloat16)

}  // namespace AQ_NAMESPACE
