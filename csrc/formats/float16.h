// float16: IEEE half precision, eleven bits of mantissa, up to 65504. Weights are multiplied in float32.
#pragma once
#include "format.h"

namespace AQ_NAMESPACE {

struct Half {
  uint16_t bits;
};

AQ_INLINE Vec load(const Half* p) { return load_half(&p->bits); }

struct Float16 : Format {
  static constexpr const char* kName = "float16";
  using Element = Half;
  static constexpr int kSourceBytes = 2, kAlignment = 2;

  struct Step {
    Half weights[4][16];
  };
  static constexpr int kChannels = 4, kUnits = 4, kRun = 1;
  AQ_INLINE const Half* unit(const Step& step, int i) { return step.weights[i]; }
  AQ_INLINE Vec weight(const Half* weights, int) { return load(weights); }

  static void pack(const Source& from, void* packed) { pack_runs((const Half*)from.weight, from, 1, (Half*)packed); }
};
AQ_FORMAT(5, Float16)

}  // namespace AQ_NAMESPACE
