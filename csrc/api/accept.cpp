// Sample and match: one pass over each slot's rows, since parents stand before their children (spec/accept.py).
#include "aquiline.h"
#include "check.h"

namespace {

using namespace aq;

int check_tree(const int32_t* parents, const int32_t* offsets, int num_slots) {
  AQ_REQUIRE(offsets[0] == 0, "offsets[0]=%d: must be 0", offsets[0]);
  for (int b = 0; b < num_slots; b++) {
    const int first = offsets[b], end = offsets[b + 1];
    AQ_REQUIRE(end > first, "offsets[%d]=%d: must exceed %d, every slot has a root", b + 1, end, first);
    for (int i = first + 1; i < end; i++)
      AQ_REQUIRE(parents[i] >= 0 && parents[i] < i - first, "parents[%d]=%d: must be in [0, %d)", i, parents[i],
                 i - first);
  }
  return 0;
}

}  // namespace

int aq_accept(const int32_t* tokens, const int32_t* drawn, const int32_t* parents, const int32_t* offsets,
              int32_t num_slots, int32_t max_depth, int32_t* num_accepted, int32_t* path, int32_t* kept) {
  AQ_REQUIRE(num_slots >= 0, "num_slots=%d: must be at least 0", num_slots);
  AQ_REQUIRE(max_depth >= 0, "max_depth=%d: must be at least 0", max_depth);
  const struct {
    const char* name;
    const int32_t* pointer;
  } arrays[] = {
      {"tokens", tokens}, {"drawn", drawn}, {"parents", parents}, {"offsets", offsets}, {"num_accepted", num_accepted},
      {"path", path},     {"kept", kept},
  };
  for (const auto& array : arrays) AQ_TRY(check_pointer(array.name, array.pointer, sizeof(int32_t)));
  AQ_TRY(check_tree(parents, offsets, num_slots));
  for (int b = 0; b < num_slots; b++) {
    const int first = offsets[b], num_rows = offsets[b + 1] - first, width = max_depth + 1;
    int32_t *slot_path = path + (size_t)b * width, *slot_kept = kept + (size_t)b * width;
    for (int level = 0; level < width; level++) slot_path[level] = 0, slot_kept[level] = -1;
    int node = 0, depth = 0;
    for (int i = 1; i < num_rows && depth < max_depth; i++)
      if (parents[first + i] == node && tokens[first + i] == drawn[first + node]) {
        slot_kept[depth++] = tokens[first + i];
        slot_path[depth] = node = i;
      }
    slot_kept[depth] = drawn[first + node];
    num_accepted[b] = depth;
  }
  return 0;
}
