// Weights in groups of inputs with a scale each: w = scale * (code - kOffset), plus a minimum where kHasMinimum, each
// step rounded to float32 as written. A step holds kGroups groups of kGroupInputs inputs of 16 outputs. Codes are
// unsigned and lie in fours: word w of a lane holds inputs 4 w .. 4 w + 3 from its lowest byte on, because integer dot
// products add four products at once (kernels/integer.h).
//
// Such a format defines
//   Step, kGroupInputs, kGroups, kOffset, kIsWide, kHasMinimum
//   scale(step, g), minimum(step, g)     of group g, as Vecs
//   codes(step, g, q)                    four codes a lane, from input 4 q of group g on
//   kBlockBytes, place(block, lane, step)     one output's share of a step as a file has it, and where it goes
#pragma once
#include "format.h"

namespace AQ_NAMESPACE {

struct Blocks : Format {
  static constexpr int kGroupInputs = 32, kGroups = 1;
  static constexpr int kOffset = 0;
  static constexpr bool kIsWide = false;  // codes need all eight bits; kOffset is then 128
  static constexpr bool kHasMinimum = false, kHasScale = true;
  static constexpr int kSourceBytes = 1, kAlignment = 4;
  static constexpr bool kIsUnpacked = true;
};

// A code of 4, 1, 2 or 8 bits for each of 16 * `inputs` weights. fours(q): codes 4 q .. 4 q + 3 of every lane, a byte
// each. put: those of one lane, into words that were zero.
template <int inputs> struct Nibbles {
  uint32_t words[inputs / 8][16];
  AQ_MEMBER IVec fours(int q) const { return iand(ishr(iload(words[q / 2]), q % 2 * 4), iset1(0x0f0f0f0f)); }
  void put(int lane, int q, uint32_t fours) { words[q / 2][lane] |= fours << q % 2 * 4; }
};
template <int inputs> struct Bits {
  uint32_t words[inputs / 32][16];
  AQ_MEMBER IVec fours(int q) const { return iand(ishr(iload(words[q / 8]), q % 8), iset1(0x01010101)); }
  void put(int lane, int q, uint32_t fours) { words[q / 8][lane] |= fours << q % 8; }
};
template <int inputs> struct BitPairs {
  uint32_t words[inputs / 16][16];
  AQ_MEMBER IVec fours(int q) const { return iand(ishr(iload(words[q / 4]), q % 4 * 2), iset1(0x03030303)); }
  void put(int lane, int q, uint32_t fours) { words[q / 4][lane] |= fours << q % 4 * 2; }
};
template <int inputs> struct Bytes {
  uint32_t words[inputs / 4][16];
  AQ_MEMBER IVec fours(int q) const { return iload(words[q]); }
  void put(int lane, int q, uint32_t fours) { words[q][lane] = fours; }
};

AQ_INLINE uint16_t half_at(const uint8_t* p) {
  uint16_t bits;
  memcpy(&bits, p, sizeof bits);
  return bits;
}

AQ_INLINE uint32_t four_at(const void* p) {
  uint32_t bytes;
  memcpy(&bytes, p, sizeof bytes);
  return bytes;
}
// The low (shift 0) or high (4) nibbles of four bytes.
AQ_INLINE uint32_t nibbles_at(const uint8_t* p, int shift) { return four_at(p) >> shift & 0x0f0f0f0fu; }

// Packs rows of a file's blocks [n, k / kChannels][kBlockBytes] as [ceil(n / 16)][k / kChannels] steps; outputs that do
// not exist have no scale.
template <class F> static void pack_blocks(const Source& from, void* packed) {
  using Step = typename F::Step;
  const int steps = from.k / F::kChannels;
  Step* to = (Step*)packed + (size_t)from.first / 16 * steps;
  for (int block = from.first; block < from.last; block += 16)
    for (int i = 0; i < steps; i++) {
      Step step{};
      for (int lane = 0; lane < 16 && block + lane < from.n; lane++)
        F::place((const uint8_t*)from.weight + (((size_t)block + lane) * steps + i) * F::kBlockBytes, lane, step);
      *to++ = step;
    }
}

}  // namespace AQ_NAMESPACE
