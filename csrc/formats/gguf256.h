// GGUF's blocks of 256 inputs, whose groups have scales of their own in units of the block's float16 scale: Q4_K, Q5_K,
// Q6_K. A file has six bits for a scale or minimum of Q4_K and Q5_K, a step has eight. A group's scale, a product of 11
// by at most 8 bits, is exact in float32.
// Source: ggml-org/llama.cpp@00ad355, ggml/src/ggml-common.h, and gguf-py 0.19, quants.py, whose values these are.
#pragma once
#include "gguf32.h"

namespace AQ_NAMESPACE {

// The scale and the minimum of group g, from the 12 bytes of a block that hold eight of each.
AQ_INLINE void six_bits(const uint8_t* bytes, int g, uint8_t* scale, uint8_t* minimum) {
  if (g < 4) {
    *scale = bytes[g] & 63, *minimum = bytes[4 + g] & 63;
  } else {
    *scale = (bytes[4 + g] & 15) | (bytes[g - 4] >> 6 << 4);
    *minimum = (bytes[4 + g] >> 4) | (bytes[g] >> 6 << 4);
  }
}

struct KBlocks : Blocks {
  static constexpr int kChannels = 256, kGroups = 8;
  static constexpr bool kHasMinimum = true;
  struct Scales {
    uint16_t scale[16], minimum[16];
    int8_t scales[8][16], minima[8][16];
  };
  AQ_INLINE Vec scale_of(const Scales& s, int g) { return mul(load_half(s.scale), load(s.scales[g])); }
  AQ_INLINE Vec minimum_of(const Scales& s, int g) {
    const Vec size = mul(load_half(s.minimum), load(s.minima[g]));
    return as_float(ixor(as_int(size), iset1(0x80000000)));
  }
  static void place_scales(const uint8_t* block, int lane, Scales& s) {
    s.scale[lane] = half_at(block), s.minimum[lane] = half_at(block + 2);
    for (int g = 0; g < 8; g++) six_bits(block + 4, g, (uint8_t*)&s.scales[g][lane], (uint8_t*)&s.minima[g][lane]);
  }
  // Codes 4 q .. 4 q + 3. Groups 2 p and 2 p + 1 share the 32 bytes of pair p: the low and the high nibbles.
  static uint32_t codes_at(const uint8_t* bytes, int q) {
    return nibbles_at(bytes + q / 16 * 32 + q % 8 * 4, q / 8 % 2 * 4);
  }
};

struct Q4_K : KBlocks {
  static constexpr const char* kName = "q4_k";
  static constexpr int kBlockBytes = 144;
  struct Step {
    Scales scales;
    Nibbles<256> codes;
  };
  AQ_INLINE Vec scale(const Step& step, int g) { return scale_of(step.scales, g); }
  AQ_INLINE Vec minimum(const Step& step, int g) { return minimum_of(step.scales, g); }
  AQ_INLINE IVec codes(const Step& step, int g, int q) { return step.codes.fours(8 * g + q); }
  static void place(const uint8_t* block, int lane, Step& step) {
    place_scales(block, lane, step.scales);
    for (int q = 0; q < 64; q++) step.codes.put(lane, q, codes_at(block + 16, q));
  }
  static void pack(const Source& from, void* packed) { pack_blocks<Q4_K>(from, packed); }
};
AQ_FORMAT(11, Q4_K)

struct Q5_K : KBlocks {
  static constexpr const char* kName = "q5_k";
  static constexpr int kBlockBytes = 176;
  struct Step {
    Scales scales;
    Bits<256> fifths;
    Nibbles<256> codes;
  };
  AQ_INLINE Vec scale(const Step& step, int g) { return scale_of(step.scales, g); }
  AQ_INLINE Vec minimum(const Step& step, int g) { return minimum_of(step.scales, g); }
  AQ_INLINE IVec codes(const Step& step, int g, int q) { return five_bits(step, 8 * g + q); }
  static void place(const uint8_t* block, int lane, Step& step) {
    place_scales(block, lane, step.scales);
    for (int q = 0; q < 64; q++) {
      step.codes.put(lane, q, codes_at(block + 48, q));
      step.fifths.put(lane, q, four_at(block + 16 + q % 8 * 4) >> q / 8 & 0x01010101u);
    }
  }
  static void pack(const Source& from, void* packed) { pack_blocks<Q5_K>(from, packed); }
};
AQ_FORMAT(12, Q5_K)

struct Q6_K : Blocks {
  static constexpr const char* kName = "q6_k";
  static constexpr int kChannels = 256, kGroupInputs = 16, kGroups = 16, kBlockBytes = 210, kOffset = 32;
  struct Step {
    uint16_t scale[16];
    int8_t scales[16][16];
    BitPairs<256> highs;
    Nibbles<256> codes;
  };
  AQ_INLINE Vec scale(const Step& step, int g) { return mul(load_half(step.scale), load(step.scales[g])); }
  AQ_INLINE IVec codes(const Step& step, int g, int q) {
    return ior(step.codes.fours(4 * g + q), shl<4>(step.highs.fours(4 * g + q)));
  }
  // Half h of a block: 64 bytes hold its low nibbles, inputs i and i + 64 in one byte, and 32 bytes its high pairs.
  static void place(const uint8_t* block, int lane, Step& step) {
    for (int q = 0; q < 64; q++) {
      const int half = q / 32, at = q % 32;
      step.codes.put(lane, q, nibbles_at(block + half * 64 + at % 16 * 4, at / 16 * 4));
      step.highs.put(lane, q, four_at(block + 128 + half * 32 + at % 8 * 4) >> at / 8 * 2 & 0x03030303u);
    }
    for (int g = 0; g < 16; g++) step.scales[g][lane] = (int8_t)block[192 + g];
    step.scale[lane] = half_at(block + 208);
  }
  static void pack(const Source& from, void* packed) { pack_blocks<Q6_K>(from, packed); }
};
AQ_FORMAT(13, Q6_K)

}  // namespace AQ_NAMESPACE
