// int8: w[n, k] = code * scale[n]. A sum runs over x * code in k order and is multiplied by the float32 scale[n] once
// at its end, before the bias. The scales, float32 [16 * ceil(n / 16)], lie behind the codes.
#pragma once
#include "format.h"

namespace AQ_NAMESPACE {

struct Int8 : Format {
  static constexpr const char* kName = "int8";
  using Key = aq::Code;
  static constexpr int kSourceBytes = 1, kAlignment = 4;
  static constexpr int kScaleBytes = sizeof(float);

  struct Step {
    int8_t codes[4][16];
  };
  static constexpr int kChannels = 4, kUnits = 4, kRun = 1;
  AQ_INLINE const int8_t* unit(const Step& step, int i) { return step.codes[i]; }
  AQ_INLINE Vec weight(const int8_t* codes, int) { return load(codes); }
  AQ_INLINE const float* output_scale(const AqLinear& linear) {
    return (const float*)((const int8_t*)linear.weight + ((size_t)linear.n + 15) / 16 * 16 * linear.k);
  }

  static int check_source(const Source& from) { return aq::check_pointer("scales", from.scales, sizeof(float)); }
  static void pack(const Source& from, void* packed) {
    pack_runs((const int8_t*)from.weight, from, 1, (int8_t*)packed);
    pack_scales(from, output_scale(AqLinear{packed, nullptr, from.n, from.k, 0, nullptr}));
  }
};
AQ_FORMAT(3, Int8)

}  // namespace AQ_NAMESPACE
