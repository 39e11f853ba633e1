// The bfloat16 dot product over a tile of rows: linear.h's row tile, compiled for CPUs with AVX512_BF16 (setup.py). A
// compiler or a processor without it leaves it out.
#if defined(__AVX512BF16__)
#define AQ_AVX512
#define AQ_DOT
#define AQ_NAMESPACE dot
#include "linear.h"

namespace aq {
const bool kHasDot = true;
void dot_tile(int rows, const Pair* w, int num_blocks, int num_pairs, const Pair* x, size_t next, float* sums) {
  dot::any_tile(rows, w, num_blocks, num_pairs, x, next, sums);
}
}  // namespace aq
#else
#include "kernels.h"

namespace aq {
const bool kHasDot = false;
void dot_tile(int, const Pair*, int, int, const Pair*, size_t, float*) {}
}  // namespace aq
#endif
