// The fourth arithmetic over bfloat16 weights: AMX's products of pairs. Inputs are rounded to bfloat16, to nearest
// even, as in the second arithmetic, whose layout it has. 32 channels at a time, in order, from a sum of 0:
//   sum = sum + (e + o)
// where e is a chain of fused multiply-adds over the even ones of these channels in order, from 0, and o one over the
// odd ones. What is subnormal is taken for 0, and a result that would be is 0. The last group may be of 16 channels.
// Keys in bfloat16 are multiplied likewise (kernels/attention_pairs.h). Where there are no such registers their twin
// computes the same, slowly.
#pragma once
#include "bfloat16_dot.h"

namespace AQ_NAMESPACE {

struct Bfloat16Tiles : Bfloat16Dot {
  static constexpr const char* kName = "bfloat16_tiles";
  static constexpr int kRows = 32;
  static constexpr bool kIsApart = false, kIsTiled = true;
  static int check_cpu(const char*) { return 0; }
};
AQ_FORMAT(28, Bfloat16Tiles)

}  // namespace AQ_NAMESPACE
