// int4: w[n, k] = code * scale[n, k / 32], codes -8 .. 7, scales as bfloat16.h stores them. Each group of 32 channels
// is a sum over x * code in k order from 0, and y = fma(group sum, scale, y) over the groups in order from 0. k is a
// multiple of 32.
#pragma once
#include "bfloat16.h"

namespace AQ_NAMESPACE {

static int check_int4(const int8_t* codes, size_t count) {
  for (size_t i = 0; i < count; i++)
    AQ_REQUIRE(codes[i] >= -8 && codes[i] <= 7, "weight[%zu]=%d: must be in [-8, 7]", i, codes[i]);
  return 0;
}

struct Int4 : Format {
  static constexpr const char* kName = "int4";
  using Sum = InGroups;
  static constexpr int kSourceBytes = 1, kAlignment = 4;

  // A group: channel i of lane l is nibble i % 8 of codes[i / 8][l].
  struct Step {
    Rounded scale[16];
    uint32_t codes[AQ_GROUP / 8][16];
  };
  static constexpr size_t kUnitsFrom = sizeof(Step::scale);
  static constexpr int kChannels = AQ_GROUP, kParts = AQ_GROUP / 8, kUnits = 1, kRun = 8;
  AQ_INLINE IVec unit(const Step& step, int i) { return iload(step.codes[i]); }
  AQ_INLINE Vec weight(IVec codes, int i) { return nibble(codes, i); }

  static int check_source(const Source& from) {
    AQ_TRY(aq::check_pointer("scales", from.scales, sizeof(Rounded)));
    return check_int4((const int8_t*)from.weight, (size_t)from.n * from.k);
  }
  static void pack(const Source& from, void* packed) {
    const int8_t* codes = (const int8_t*)from.weight;
    const Rounded* scales = (const Rounded*)from.scales;
    Step* to = (Step*)packed + (size_t)from.first / 16 * (from.k / AQ_GROUP);
    for (int block = from.first; block < from.last; block += 16)
      for (int g = 0; g < from.k / AQ_GROUP; g++) {
        Step step{};
        for (int lane = 0; lane < 16 && block + lane < from.n; lane++) {
          const size_t at = ((size_t)block + lane) * from.k / AQ_GROUP + g;
          step.scale[lane] = scales[at];
          for (int i = 0; i < AQ_GROUP; i++) step.codes[i / 8][lane] |= (codes[at * AQ_GROUP + i] & 15u) << i % 8 * 4;
        }
        *to++ = step;
      }
  }
};
AQ_FORMAT(4, Int4)

AQ_INLINE Vec scale_of(const Int4::Step& step) { return load(step.scale); }

}  // namespace AQ_NAMESPACE
