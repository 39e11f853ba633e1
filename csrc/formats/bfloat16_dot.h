// The second arithmetic over bfloat16 weights: the CPU's dot product adds two products at once to a sum, pairs in
// order. What the weights multiply (inputs, and in attention queries and softmax weights) is rounded to bfloat16, to
// nearest even. As in float32 arithmetic, a row's bits do not depend on other rows, threads or chunks. The layout is
// that of bfloat16.h.
#pragma once
#include "bfloat16.h"

namespace AQ_NAMESPACE {

struct Bfloat16Dot : Format {
  static constexpr const char* kName = "bfloat16_dot";
  using Input = Pair;
  static constexpr int kSourceBytes = 2, kAlignment = 4;
  static constexpr int kRows = 8;  // the dot product is so fast that weights should serve more rows
  static constexpr bool kIsApart = true;

  struct Step {
    Pair pairs[4][16];
  };
  static constexpr int kChannels = 8, kUnits = 4, kRun = 1;
  AQ_INLINE const Pair* unit(const Step& step, int i) { return step.pairs[i]; }
  // A template, since only simd/avx512_bf16.h loads pairs.
  template <class P> AQ_INLINE auto weight(const P* pairs, int) { return load(pairs); }

  static void pack(const Source& from, void* packed) { Bfloat16::pack(from, packed); }
  static int check_cpu(const char* name) {
    AQ_REQUIRE(aq::has_dot(), "%s: arithmetic bfloat16 needs a CPU with AVX512_BF16, use float32", name);
    return 0;
  }
};
AQ_FORMAT(2, Bfloat16Dot)

using DotFormat = Bfloat16Dot;  // what dot.cpp compiles

}  // namespace AQ_NAMESPACE
