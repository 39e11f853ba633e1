// Weights into the layouts of formats/.
#include "aquiline.h"
#include "check.h"
#include "formats/formats.h"

using namespace aq;

int64_t aq_packed_bytes(int32_t n, int32_t k, int32_t dtype) {
  const int64_t blocks = ((int64_t)n + 15) / 16;
  AQ_REQUIRE(n > 0 && k > 0, "n=%d, k=%d: must be positive", n, k);
  int64_t bytes = fail("dtype=%d: there is no such format", dtype);
  host::with_format(dtype, [&](auto format) {
    using F = decltype(format);
    bytes = blocks * (k / F::kChannels * (int64_t)sizeof(typename F::Step) + 16 * F::kScaleBytes);
  });
  return bytes;
}

int aq_pack(const void* weight, const void* scales, int32_t n, int32_t k, int32_t dtype, void* packed) {
  AQ_TRY(check_linear("packed", AqLinear{packed, nullptr, n, k, dtype, nullptr}, 0, 0));
  int result = -1;
  host::with_format(dtype, [&](auto format) {
    result = check_pointer("weight", weight, format.kSourceBytes);
    if (result == 0) result = format.pack(host::Source{weight, scales, n, k}, packed);
  });
  return result;
}
