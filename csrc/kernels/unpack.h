// Linears over blocks of codes (formats/blocks.h) in float32 arithmetic: the weights are unpacked to float32, a piece
// at a time, and multiplied as float32.h's are. So the result is that of the unpacked weights, to the bit.
#pragma once
#include "tile.h"

namespace AQ_NAMESPACE {

// The step's weights, [kChannels][16].
template <class F> static void unpack_step(const typename F::Step& step, float* weights) {
  for (int g = 0; g < F::kGroups; g++) {
    const Vec scale = F::scale(step, g);
    for (int i = 0; i < F::kGroupInputs; i += 4) {
      const IVec codes = F::codes(step, g, i / 4);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const Vec code = to_float(isub(iand(ishr(codes, 8 * j), iset1(255)), iset1(F::kOffset)));
        Vec weight = mul(scale, code);
        if constexpr (F::kHasMinimum) weight = add(weight, F::minimum(step, g));
        store(weights + (g * F::kGroupInputs + i + j) * 16, weight);
      }
    }
  }
}

struct Unpacked : Float32 {
  using Sum = OnTop;
};

constexpr int kUnpackedInputs = 256;

// any_tile over the weights of F.
template <class F>
static void unpacked_tile(int rows, const void* weight, int num_blocks, int steps, const void* input, size_t stride,
                          size_t, float* sums) {
  const auto* w = (const typename F::Step*)weight;
  constexpr int kSteps = kUnpackedInputs / F::kChannels;
  alignas(64) float weights[kPanel * kUnpackedInputs * 16];
  for (int r = 0; r < rows; r++) memset(sums + r * kPanelWidth, 0, kPanelWidth * sizeof(float));
  for (int i = 0; i < steps; i += kSteps) {
    const int count = steps - i < kSteps ? steps - i : kSteps, inputs = count * F::kChannels;
    for (int b = 0; b < num_blocks; b++)
      for (int s = 0; s < count; s++)
        unpack_step<F>(w[(size_t)b * steps + i + s], weights + ((size_t)b * inputs + s * F::kChannels) * 16);
    any_tile<Unpacked>(rows, (const Unpacked::Step*)weights, num_blocks, inputs / Unpacked::kChannels,
                       (const float*)input + i * F::kChannels, stride, 0, sums);
  }
}

// Row `row` of a packed weight [*, k], as floats.
template <class F> static void unpack_row(const void* weight, int k, int row, float* to) {
  const int steps = k / F::kChannels;
  const auto* step = (const typename F::Step*)weight + (size_t)(row / 16) * steps;
  alignas(64) float weights[F::kChannels * 16];
  for (int i = 0; i < steps; i++) {
    unpack_step<F>(step[i], weights);
    for (int j = 0; j < F::kChannels; j++) *to++ = weights[j * 16 + row % 16];
  }
}

}  // namespace AQ_NAMESPACE
