// Weights into the layouts that aquiline.h describes.
#include "aquiline.h"
#include "check.h"
#include "kernels.h"

namespace {

using namespace aq;

// [ceil(n / 16)][k / run][16][run]
template <class T>
void pack(const T* weight, int n, int k, int run, T* packed) {
  for (int block = 0; block < n; block += 16)
    for (int i = 0; i < k; i += run)
      for (int lane = 0; lane < 16; lane++)
        for (int j = i; j < i + run; j++) *packed++ = block + lane < n ? weight[((size_t)block + lane) * k + j] : T(0);
}

void pack_groups(const int8_t* codes, const uint16_t* scales, int n, int k, Group* packed) {
  for (int block = 0; block < n; block += 16)
    for (int g = 0; g < k / AQ_GROUP; g++) {
      Group group{};
      for (int lane = 0; lane < 16 && block + lane < n; lane++) {
        const size_t at = ((size_t)block + lane) * k / AQ_GROUP + g;
        group.scale[lane] = scales[at];
        for (int i = 0; i < AQ_GROUP; i++) group.codes[i / 8][lane] |= (codes[at * AQ_GROUP + i] & 15u) << i % 8 * 4;
      }
      *packed++ = group;
    }
}

int pack_quantised(const int8_t* codes, const void* scales, const AqLinear& linear, void* packed) {
  AQ_TRY(check_pointer("scales", scales, linear.dtype == AQ_INT8 ? sizeof(float) : sizeof(uint16_t)));
  if (linear.dtype == AQ_INT8) {
    pack(codes, linear.n, linear.k, 1, (int8_t*)packed);
    pack((const float*)scales, linear.n, 1, 1, (float*)output_scale(linear));
    return 0;
  }
  for (size_t i = 0; i < (size_t)linear.n * linear.k; i++)
    AQ_REQUIRE(codes[i] >= -8 && codes[i] <= 7, "weight[%zu]=%d: must be in [-8, 7]", i, codes[i]);
  pack_groups(codes, (const uint16_t*)scales, linear.n, linear.k, (Group*)packed);
  return 0;
}

}  // namespace

int64_t aq_packed_bytes(int32_t n, int32_t k, int32_t dtype) {
  const int64_t lanes = ((int64_t)n + 15) / 16 * 16;
  if (dtype == AQ_INT8) return lanes * (k + (int64_t)sizeof(float));
  if (dtype == AQ_INT4) return lanes / 16 * (k / AQ_GROUP) * (int64_t)sizeof(Group);
  return lanes * k * (dtype == AQ_FLOAT32 ? 4 : 2);
}

int aq_pack(const void* weight, const void* scales, int32_t n, int32_t k, int32_t dtype, void* packed) {
  const AqLinear linear{packed, nullptr, n, k, dtype};
  AQ_TRY(check_linear("packed", linear, 0, 0));
  AQ_TRY(check_pointer("weight", weight, is_quantised(dtype) ? 1 : dtype == AQ_FLOAT32 ? 4 : 2));
  if (is_quantised(dtype)) return pack_quantised((const int8_t*)weight, scales, linear, packed);
  if (dtype == AQ_FLOAT32) pack((const float*)weight, n, k, 1, (float*)packed);
  else pack((const uint16_t*)weight, n, k, 2, (uint16_t*)packed);
  return 0;
}
