// The third arithmetic: inputs are rounded to integers, 32 at a time (kernels/round.h), and multiplied with the codes
// of the weights. The integer sum of a group is exact, so its order is free. Over the groups in order, from 0:
//   y = fma(float(sum of code * input code), input scale * weight scale, y)
// and where weights have a minimum, after that
//   y = fma(minimum, input scale * float(sum of input codes), y)
// int8 has one weight scale per output: y = fma(float(sum), input scale, y), times the weight scale at the end.
#pragma once
#include "gguf256.h"
#include "int4.h"
#include "mxfp4.h"

namespace AQ_NAMESPACE {

using aq::Codes;

template <class Stored> struct OnCodes : Stored {
  using Input = Codes;
};

#define AQ_ON_CODES(code, type, name)          \
  struct type##Dot : OnCodes<type> {           \
    static constexpr const char* kName = name; \
  };                                           \
  AQ_FORMAT(code, type##Dot)
AQ_ON_CODES(15, Q8_0, "q8_0_dot")
AQ_ON_CODES(16, Q4_0, "q4_0_dot")
AQ_ON_CODES(17, Q4_1, "q4_1_dot")
AQ_ON_CODES(18, Q5_0, "q5_0_dot")
AQ_ON_CODES(19, Q5_1, "q5_1_dot")
AQ_ON_CODES(20, Q4_K, "q4_k_dot")
AQ_ON_CODES(21, Q5_K, "q5_k_dot")
AQ_ON_CODES(22, Q6_K, "q6_k_dot")
AQ_ON_CODES(23, IQ4_NL, "iq4_nl_dot")
AQ_ON_CODES(27, Mxfp4, "mxfp4_dot")
#undef AQ_ON_CODES

// The codes and scales of int8.h and int4.h, in fours.
struct Int8Dot : OnCodes<Blocks> {
  static constexpr bool kIsUnpacked = false;
  static constexpr const char* kName = "int8_dot";
  static constexpr int kChannels = 32, kOffset = 128;
  static constexpr bool kIsWide = true, kHasScale = false;
  static constexpr int kScaleBytes = sizeof(float);
  struct Step {
    Bytes<32> codes;
  };
  AQ_INLINE IVec codes(const Step& step, int, int q) { return step.codes.fours(q); }
  AQ_INLINE const float* output_scale(const AqLinear& linear) {
    return (const float*)((const int8_t*)linear.weight + ((size_t)linear.n + 15) / 16 * 16 * linear.k);
  }
  static int check_source(const Source& from) { return aq::check_pointer("scales", from.scales, sizeof(float)); }
  static void pack(const Source& from, void* packed) {
    const int8_t* codes = (const int8_t*)from.weight;
    Step* to = (Step*)packed + (size_t)from.first / 16 * (from.k / kChannels);
    for (int block = from.first; block < from.last; block += 16)
      for (int k = 0; k < from.k; k += kChannels) {
        Step step{};
        for (int lane = 0; lane < 16; lane++)
          for (int q = 0; q < kChannels / 4; q++) {
            const bool exists = block + lane < from.n;
            const uint32_t fours = exists ? four_at(codes + ((size_t)block + lane) * from.k + k + 4 * q) : 0;
            step.codes.put(lane, q, fours ^ 0x80808080u);
          }
        *to++ = step;
      }
    pack_scales(from, output_scale(AqLinear{packed, nullptr, from.n, from.k, 0, nullptr}));
  }
};
AQ_FORMAT(24, Int8Dot)

struct Int4Dot : OnCodes<Blocks> {
  static constexpr bool kIsUnpacked = false;
  static constexpr const char* kName = "int4_dot";
  static constexpr int kChannels = AQ_GROUP, kOffset = 8;
  struct Step {
    Rounded scale[16];
    Nibbles<AQ_GROUP> codes;
  };
  AQ_INLINE Vec scale(const Step& step, int) { return load(step.scale); }
  AQ_INLINE IVec codes(const Step& step, int, int q) { return step.codes.fours(q); }
  static int check_source(const Source& from) { return Int4::check_source(from); }
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
          for (int q = 0; q < AQ_GROUP / 4; q++)  // a code of four bits plus 8 is the code with its sign bit turned
            step.codes.put(lane, q, (four_at(codes + at * AQ_GROUP + 4 * q) ^ 0x08080808u) & 0x0f0f0f0fu);
        }
        *to++ = step;
      }
  }
};
AQ_FORMAT(25, Int4Dot)

}  // namespace AQ_NAMESPACE
