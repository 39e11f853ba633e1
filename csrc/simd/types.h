// Numbers in memory that the dot product of simd/avx512_bf16.h multiplies. Plain data, since both the dispatching side
// and the kernels use them.
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

// A rounded number as keys and values are stored: the other number of its pair is not its neighbour in memory.
struct Unpaired {
  uint16_t bits;
};

}  // namespace aq
