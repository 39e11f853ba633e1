// Rounding of inputs to integers for the third arithmetic: 32 at a time, code = rint(x * (127 / amax)), ties to even,
// scale = amax / 127, in float32. With amax below 2^-120 all codes and the scale are zero. With a NaN or an infinity
// among them the scale is NaN, so that it reaches every output.
#pragma once
#include "formats/formats.h"

namespace AQ_NAMESPACE {

AQ_INLINE Vec size_of(Vec x) { return as_float(iand(as_int(x), iset1(0x7fffffff))); }

// Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
AQ_INLINE IVec nearest(Vec x) { return isub(as_int(add(x, set1(0x1.8p23f))), iset1(0x4b400000)); }

AQ_INLINE void store_codes(Codes* to, Vec first, Vec last) {
  const float amax = max_lanes(max(size_of(first), size_of(last)));
  const bool is_odd = any(is_nan(add(sub(first, first), sub(last, last)))), is_zero = !(amax >= 0x1p-120f);
  if (is_odd || is_zero) {
    memset(to, 0, sizeof *to);
    if (is_odd) to->scale = to->total = __builtin_nanf("");
    return;
  }
  const Vec factor = set1(127.0f / amax);
  const IVec low = nearest(mul(first, factor)), high = nearest(mul(last, factor));
  bstore(to->words, low), bstore(to->words + 4, high);
  to->scale = amax / 127.0f;
  to->minus_first = -(int32_t)sum_lanes(to_float(low));
  to->minus = to->minus_first - (int32_t)sum_lanes(to_float(high));
  to->total = to->scale * (float)-to->minus;
}

// Inputs `from`, a multiple of 32 of them.
AQ_INLINE void store_codes(Codes* to, const float* from, int count) {
  for (int i = 0; i < count; i += 32) store_codes(to + i / 32, load(from + i), load(from + i + 16));
}

// One head of a query, key or value as integers by the same rule, with one scale. Returns the scale.
AQ_INLINE float head_codes(const float* from, int dim, int8_t* codes) {
  Vec most = zero(), differences = zero();
  for (int d = 0; d < dim; d += 16) {
    const Vec x = load(from + d);
    most = max(most, size_of(x)), differences = add(differences, sub(x, x));
  }
  const float amax = max_lanes(most);
  const bool is_odd = any(is_nan(differences));
  if (is_odd || !(amax >= 0x1p-120f)) {
    memset(codes, 0, dim);
    return is_odd ? __builtin_nanf("") : 0.0f;
  }
  const Vec factor = set1(127.0f / amax);
  for (int d = 0; d < dim; d += 16) bstore(codes + d, nearest(mul(load(from + d), factor)));
  return amax / 127.0f;
}

}  // namespace AQ_NAMESPACE
