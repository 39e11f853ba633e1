// Numbers in memory that dot products multiply. Plain data, since both the dispatching side and the kernels use them.
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

// 32 inputs as integers: input = code * scale, code in [-127, 127]. Four codes are a word, in order from its lowest
// byte. total: scale times the sum of all codes. minus: minus that sum; minus_first: of the first 16 alone.
struct Codes {
  uint32_t words[8];
  float scale, total;
  int32_t minus, minus_first;
};

// A rounded number as keys and values are stored: the other number of its pair is not its neighbour in memory.
struct Unpaired {
  uint16_t bits;
};

// A channel of a key or a value in eight bits: of a key the code plus 128, of a value the code in two's complement.
struct Code {
  uint8_t bits;
};

}  // namespace aq
