// Weights into the layouts of formats/.
#include "aquiline.h"
#include "check.h"
#include "formats/formats.h"
#include "pool.h"

using namespace aq;

namespace {

struct PackJob {
  host::Source from;
  void* packed;
};

// A worker's share of the outputs, in blocks of 16.
template <class F> void pack_share(const Worker& worker, const void* argument) {
  const PackJob& job = *(const PackJob*)argument;
  host::Source own = job.from;
  const int64_t blocks = ((int64_t)own.n + 15) / 16;
  own.first = (int)(blocks * worker.index / worker.count * 16);
  own.last = (int)(blocks * (worker.index + 1) / worker.count * 16);
  if (own.last > own.n) own.last = own.n;
  F::pack(own, job.packed);
}

}  // namespace

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
    using F = decltype(format);
    const PackJob job{{weight, scales, n, k, 0, n}, packed};
    result = check_pointer("weight", weight, F::kSourceBytes);
    if (result == 0) result = F::check_source(job.from);
    if (result == 0) run_alone(pack_share<F>, &job);
  });
  return result;
}
