// GGUF's blocks of 32 inputs with a float16 scale, as the file has them: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL.
// Source: ggml-org/llama.cpp@00ad355, ggml/src/ggml-common.h, and gguf-py 0.19, quants.py, whose values these are.
#pragma once
#include "blocks.h"

namespace AQ_NAMESPACE {

struct Q8_0 : Blocks {
  static constexpr const char* kName = "q8_0";
  static constexpr int kChannels = 32, kBlockBytes = 34, kOffset = 128;
  static constexpr bool kIsWide = true;
  struct Step {
    uint16_t scale[16];
    Bytes<32> codes;
  };
  AQ_INLINE Vec scale(const Step& step, int) { return load_half(step.scale); }
  AQ_INLINE IVec codes(const Step& step, int, int q) { return step.codes.fours(q); }
  static void place(const uint8_t* block, int lane, Step& step) {
    step.scale[lane] = half_at(block);
    for (int q = 0; q < 8; q++) step.codes.put(lane, q, four_at(block + 2 + 4 * q) ^ 0x80808080u);
  }
  static void pack(const Source& from, void* packed) { pack_blocks<Q8_0>(from, packed); }
};
AQ_FORMAT(6, Q8_0)

// Inputs i and i + 16 share a byte of a block.
template <class Step> static void place_nibbles(const uint8_t* bytes, int lane, Step& step) {
  for (int q = 0; q < 8; q++) step.codes.put(lane, q, nibbles_at(bytes + q % 4 * 4, q / 4 * 4));
}

struct Q4_0 : Blocks {
  static constexpr const char* kName = "q4_0";
  static constexpr int kChannels = 32, kBlockBytes = 18, kOffset = 8;
  struct Step {
    uint16_t scale[16];
    Nibbles<32> codes;
  };
  AQ_INLINE Vec scale(const Step& step, int) { return load_half(step.scale); }
  AQ_INLINE IVec codes(const Step& step, int, int q) { return step.codes.fours(q); }
  static void place(const uint8_t* block, int lane, Step& step) {
    step.scale[lane] = half_at(block);
    place_nibbles(block + 2, lane, step);
  }
  static void pack(const Source& from, void* packed) { pack_blocks<Q4_0>(from, packed); }
};
AQ_FORMAT(7, Q4_0)

struct Q4_1 : Blocks {
  static constexpr const char* kName = "q4_1";
  static constexpr int kChannels = 32, kBlockBytes = 20;
  static constexpr bool kHasMinimum = true;
  struct Step {
    uint16_t scale[16], minimum[16];
    Nibbles<32> codes;
  };
  AQ_INLINE Vec scale(const Step& step, int) { return load_half(step.scale); }
  AQ_INLINE Vec minimum(const Step& step, int) { return load_half(step.minimum); }
  AQ_INLINE IVec codes(const Step& step, int, int q) { return step.codes.fours(q); }
  static void place(const uint8_t* block, int lane, Step& step) {
    step.scale[lane] = half_at(block), step.minimum[lane] = half_at(block + 2);
    place_nibbles(block + 4, lane, step);
  }
  static void pack(const Source& from, void* packed) { pack_blocks<Q4_1>(from, packed); }
};
AQ_FORMAT(8, Q4_1)

// Codes of five bits: the fifth ones of a block are bits of one word.
template <class Step> static void place_fifths(const uint8_t* bytes, int lane, Step& step) {
  for (int q = 0; q < 8; q++) {
    const uint32_t bits = bytes[q / 2] >> q % 2 * 4 & 15u;
    step.fifths.put(lane, q, (bits | bits << 7 | bits << 14 | bits << 21) & 0x01010101u);
  }
}
template <class Step> AQ_INLINE IVec five_bits(const Step& step, int q) {
  return ior(step.codes.fours(q), shl<4>(step.fifths.fours(q)));
}

struct Q5_0 : Blocks {
  static constexpr const char* kName = "q5_0";
  static constexpr int kChannels = 32, kBlockBytes = 22, kOffset = 16;
  struct Step {
    uint16_t scale[16];
    Bits<32> fifths;
    Nibbles<32> codes;
  };
  AQ_INLINE Vec scale(const Step& step, int) { return load_half(step.scale); }
  AQ_INLINE IVec codes(const Step& step, int, int q) { return five_bits(step, q); }
  static void place(const uint8_t* block, int lane, Step& step) {
    step.scale[lane] = half_at(block);
    place_fifths(block + 2, lane, step);
    place_nibbles(block + 6, lane, step);
  }
  static void pack(const Source& from, void* packed) { pack_blocks<Q5_0>(from, packed); }
};
AQ_FORMAT(9, Q5_0)

struct Q5_1 : Blocks {
  static constexpr const char* kName = "q5_1";
  static constexpr int kChannels = 32, kBlockBytes = 24;
  static constexpr bool kHasMinimum = true;
  struct Step {
    uint16_t scale[16], minimum[16];
    Bits<32> fifths;
    Nibbles<32> codes;
  };
  AQ_INLINE Vec scale(const Step& step, int) { return load_half(step.scale); }
  AQ_INLINE Vec minimum(const Step& step, int) { return load_half(step.minimum); }
  AQ_INLINE IVec codes(const Step& step, int, int q) { return five_bits(step, q); }
  static void place(const uint8_t* block, int lane, Step& step) {
    step.scale[lane] = half_at(block), step.minimum[lane] = half_at(block + 2);
    place_fifths(block + 4, lane, step);
    place_nibbles(block + 8, lane, step);
  }
  static void pack(const Source& from, void* packed) { pack_blocks<Q5_1>(from, packed); }
};
AQ_FORMAT(10, Q5_1)

// Codes name one of 16 values, which lie closer together around zero.
struct IQ4_NL : Blocks {
  static constexpr const char* kName = "iq4_nl";
  static constexpr int kChannels = 32, kBlockBytes = 18, kOffset = 128;
  static constexpr bool kIsWide = true;
  using Step = Q4_0::Step;
  AQ_INLINE Vec scale(const Step& step, int) { return load_half(step.scale); }
  AQ_INLINE IVec codes(const Step& step, int, int q) {
    static const uint8_t values[16] = {1,   24,  45,  63,  79,  93,  106, 118,  // 128 more than the values
                                       129, 141, 153, 166, 181, 197, 217, 241};
    return lookup(step.codes.fours(q), values);
  }
  static void place(const uint8_t* block, int lane, Step& step) { Q4_0::place(block, lane, step); }
  static void pack(const Source& from, void* packed) { pack_blocks<IQ4_NL>(from, packed); }
};
AQ_FORMAT(14, IQ4_NL)

}  // namespace AQ_NAMESPACE
