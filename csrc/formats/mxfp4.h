// mxfp4: blocks of 32 inputs that share a scale of 8 bits, a power of two; a code of 4 bits is a sign and one of eight
// magnitudes. Stored as GGUF has them, with twice the magnitudes and half the scale, so that the codes are integers.
// Source: OCP Microscaling Formats 1.0, section 5; ggml-org/llama.cpp@00ad355, ggml/src/ggml-common.h.
#pragma once
#include "gguf32.h"

namespace AQ_NAMESPACE {

struct Mxfp4 : Blocks {
  static constexpr const char* kName = "mxfp4";
  static constexpr int kChannels = 32, kBlockBytes = 17, kOffset = 12;
  struct Step {
    uint8_t exponent[16];
    Nibbles<32> codes;
  };
  // 2^(exponent - 128) by its bits: the two smallest are subnormal.
  AQ_INLINE Vec scale(const Step& step, int) {
    const IVec exponent = iload(step.exponent), smallest = imul(iadd(exponent, iset1(1)), iset1(0x200000));
    const IVec normal = shl<23>(isub(exponent, iset1(1)));
    return as_float(iselect(sign_bit(isub(exponent, iset1(2))), smallest, normal));
  }
  AQ_INLINE IVec codes(const Step& step, int, int q) {
    static const uint8_t values[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                       12, 11, 10, 9,  8,  6,  4,  0};  // 12 more than 0 1 2 ...
    return lookup(step.codes.fours(q), values);
  }
  static void place(const uint8_t* block, int lane, Step& step) {
    step.exponent[lane] = block[0];
    place_nibbles(block + 1, lane, step);
  }
  static void pack(const Source& from, void* packed) { pack_blocks<Mxfp4>(from, packed); }
};
AQ_FORMAT(26, Mxfp4)

}  // namespace AQ_NAMESPACE
