// Numbers in memory that the dot product of simd/avx512_bf16.h multiplies. Plain data: both sides of the library know
// them.
#pragma once
#include <stdint.h>

namespace aq {

// A float rounded to its upper 16 bits.
struct Rounded {
  uint16_t bits;
};

// Two consecutive channels, the unit of the dot product.
struct Pair {
  Rounded first, second;
};

// A number whose partner in a dot product lies elsewhere.
struct Unpaired {
  uint16_t bits;
};

}  // namespace aq
