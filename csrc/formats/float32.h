// float32: weights as they are, four channels to a step.
#pragma once
#include "format.h"

namespace AQ_NAMESPACE {

struct Float32 : Format {
  static constexpr const char* kName = "float32";
  using Element = float;
  using Key = float;
  static constexpr int kSourceBytes = 4, kAlignment = 4;

  struct Step {
    float weights[4][16];
  };
  static constexpr int kChannels = 4, kUnits = 4, kRun = 1;
  AQ_INLINE const float* unit(const Step& step, int i) { return step.weights[i]; }
  AQ_INLINE Vec weight(const float* unit, int) { return load(unit); }

  static void pack(const Source& from, void* packed) { pack_runs((const float*)from.weight, from, 1, (float*)packed); }
};
AQ_FORMAT(0, Float32)

AQ_INLINE void narrow(float x, float* y) { *y = x; }

}  // namespace AQ_NAMESPACE
