// Drafting a chain: one row per slot and level, each over the best token of the row above it. Nothing here that the
// single passes would not do; it spares the caller a round trip per level, which for a small draft costs as much as the
// pass itself.
#include <string.h>

#include <vector>

#include "aquiline.h"
#include "check.h"

namespace {

using namespace aq;

// What the next pass reads of the last one: its rows, normed where the draft feeds back normed states.
int take_states(const AqModel& model, const float* hidden, const int32_t* source, int n, bool norm, float* g) {
  const int width = model.hidden;
  for (int i = 0; i < n; i++) memcpy(g + (size_t)i * width, hidden + (size_t)source[i] * width, width * sizeof(float));
  return norm ? aq_rms_norm(g, model.final_norm, n, width, model.eps, g) : 0;
}

}  // namespace

int aq_draft_chain(const AqModel* model, const AqKV* kv, const AqRows* rows, const int32_t* source, int32_t depth,
                   const int32_t* d2t, int32_t norm_feedback, float* hidden, int32_t* tokens) {
  AQ_TRY(check_pointer("rows", rows, alignof(AqRows)));
  const int n = rows->num_rows;
  AQ_REQUIRE(n >= 0, "rows.num_rows=%d: must be at least 0", n);
  AQ_REQUIRE(depth >= 1, "depth=%d: must be at least 1", depth);
  AQ_TRY(check_pointer("d2t", d2t, sizeof(int32_t)));
  AQ_TRY(check_pointer("tokens", tokens, sizeof(int32_t)));
  const int32_t* advanced[] = {rows->tokens, rows->positions, rows->write, rows->context_len};
  for (const int32_t* column : advanced) AQ_TRY(check_pointer("rows", column, sizeof(int32_t)));
  const std::vector<AqSampling> greedy(n);
  std::vector<int32_t> best(n), own(n);
  for (int i = 0; i < n; i++) own[i] = i;
  std::vector<float> g;
  for (int level = 0; level < depth; level++) {
    AQ_TRY(aq_head_draw(model, hidden, level == 0 ? source : own.data(), n, greedy.data(), best.data()));
    for (int i = 0; i < n; i++) {
      const int32_t id = best[i] < 0 ? 0 : best[i];  // of a row that holds no numbers: any token is as good
      tokens[(size_t)i * depth + level] = id + d2t[id];
    }
    if (level + 1 == depth) break;
    for (int i = 0; i < n; i++) {
      const_cast<int32_t*>(rows->tokens)[i] = tokens[(size_t)i * depth + level];
      for (int column = 1; column < 4; column++) const_cast<int32_t*>(advanced[column])[i] += level > 0;
    }
    g.resize((size_t)n * model->hidden);
    AQ_TRY(take_states(*model, hidden, level == 0 ? source : own.data(), n, norm_feedback != 0, g.data()));
    AQ_TRY(aq_forward(model, kv, rows, g.data(), hidden, nullptr));
  }
  return 0;
}
