// Version and struct sizes. A caller compares its mirror of aquiline.h, stages.h and lookup.h with them before any
// other call.
#include <string.h>

#include "aquiline.h"
#include "formats/formats.h"
#include "lookup/lookup.h"
#include "stages/stages.h"

int64_t aq_abi(const char* name) {
  if (name == nullptr) return AQ_ABI;
#define AQ_SIZE(type)   \
  {                     \
    #type, sizeof(type) \
  }
  static const struct {
    const char* name;
    size_t size;
  } structs[] = {
      AQ_SIZE(AqLinear),      AQ_SIZE(AqAttention), AQ_SIZE(AqExperts), AQ_SIZE(AqMlp),      AQ_SIZE(AqLayer),
      AQ_SIZE(AqModel),       AQ_SIZE(AqKV),        AQ_SIZE(AqRows),    AQ_SIZE(AqSampling), AQ_SIZE(AqFusion),
      AQ_SIZE(AqBatchConfig), AQ_SIZE(AqAdmit),     AQ_SIZE(AqShape),   AQ_SIZE(AqCut),      AQ_SIZE(AqConfidence),
      AQ_SIZE(AqMatchEvents), AQ_SIZE(AqCopy),
  };
#undef AQ_SIZE
  for (const auto& entry : structs)
    if (strcmp(entry.name, name) == 0) return (int64_t)entry.size;
  return -1;
}

const char* aq_format_name(int32_t code) {
  const char* name = nullptr;
  host::with_format(code, [&](auto format) { name = format.kName; });
  return name;
}
