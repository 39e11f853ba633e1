// The draft stage writes the draft keys that are missing, then grows a tree below every root.
#include <string.h>

#include <algorithm>

#include "batch.h"

namespace aq {

namespace {

// Adds the draft row of a token j to the next pass, and what the row reads.
int add_row(AqBatch* batch, int number, int j) {
  const size_t width = batch->config.draft->hidden;
  RowBuffer& rows = batch->draft_rows;
  const Slot& slot = batch->slots[number];
  const float* fused = batch->fused_at(number, j);
  AQ_REQUIRE(fused != nullptr, "slot %d has no page for KV index %d", number, j);
  memcpy(batch->g.data() + rows.num_rows() * width, fused, width * sizeof(float));
  rows.add(number, slot.history[j + 1], j + 1, slot.first_draft_key);
  return 0;
}

// One pass over the next take[i] rows of each span. With `last` the last row of each span, which stands before all
// others, leaves its state. Other rows only write their keys.
int run_spans(AqBatch* batch, std::vector<Span>* left, const std::vector<int>& take, std::vector<int32_t>* last) {
  const AqBatchConfig& c = batch->config;
  RowBuffer& rows = batch->draft_rows;
  rows.clear();
  size_t num_rows = 0;
  for (const int count : take) num_rows += count;
  batch->g.resize(std::max(batch->g.size(), num_rows * c.draft->hidden));
  for (size_t i = 0; last != nullptr && i < left->size(); i++) {
    (*last)[i] = rows.num_rows();
    AQ_TRY(add_row(batch, (*left)[i].slot, (*left)[i].begin + take[i] - 1));
  }
  const int num_states = rows.num_rows();
  for (size_t i = 0; i < left->size(); i++) {
    Span& span = (*left)[i];
    const int end = span.begin + take[i];
    for (; span.begin < end - (last != nullptr); span.begin++) AQ_TRY(add_row(batch, span.slot, span.begin));
    span.begin = end;
  }
  batch->num_draft_rows += rows.num_rows();
  return aq_forward(c.draft, c.draft_kv, &rows.rows(), batch->g.data(), num_states, c.draft_hidden, nullptr, nullptr);
}

}  // namespace

int fuse_rows(AqBatch* batch, const std::vector<Featured>& rows) {
  if (rows.empty()) return 0;
  const AqBatchConfig& c = batch->config;
  const size_t wide = c.fusion.fc.k, width = c.draft->hidden;
  batch->g.resize(std::max(batch->g.size(), std::min(rows.size(), (size_t)kPieceRows) * width));
  for (size_t begin = 0, count; begin < rows.size(); begin += count) {
    const size_t most = std::min(rows.size() - begin, (size_t)kPieceRows);
    const float* features = rows[begin].feature;
    for (count = 1; count < most && rows[begin + count].feature == features + count * wide;) count++;
    if (count < most && count < kPieceRows / 4) {  // too few that stand side by side
      count = most;
      batch->gathered.resize(std::max(batch->gathered.size(), count * wide));
      for (size_t i = 0; i < count; i++)
        memcpy(batch->gathered.data() + i * wide, rows[begin + i].feature, wide * sizeof(float));
      features = batch->gathered.data();
    }
    AQ_TRY(aq_fuse(&c.fusion, features, (int)count, batch->g.data()));
    for (size_t i = 0; i < count; i++) {
      const Featured& row = rows[begin + i];
      float* kept = batch->fused_at(row.slot, row.index);
      AQ_REQUIRE(kept != nullptr, "slot %d has no page for KV index %d", row.slot, row.index);
      memcpy(kept, batch->g.data() + i * width, width * sizeof(float));
    }
  }
  return 0;
}

int fuse_held(AqBatch* batch, const std::vector<int>& slots) {
  std::vector<Featured> found;
  for (const int number : slots) {
    const Slot& slot = batch->slots[number];
    for (int j = slot.num_computed - slot.num_held; j < slot.num_computed; j++)
      found.push_back({batch->held_at(number, j), number, j});
  }
  AQ_TRY(fuse_rows(batch, found));
  for (const int number : slots) batch->slots[number].num_held = 0;
  return 0;
}

int extend(AqBatch* batch, const std::vector<Span>& spans, std::vector<int32_t>* last) {
  std::vector<int> slots;
  for (const Span& span : spans) slots.push_back(span.slot);
  AQ_TRY(fuse_held(batch, slots));
  std::vector<Span> left = spans;
  std::vector<int> take(spans.size());
  if (last != nullptr) last->assign(spans.size(), 0);
  int64_t num_left = 0;
  for (const Span& span : left) num_left += span.end - span.begin;
  const int most = std::min(batch->config.max_rows, std::max(kPieceRows, (int)spans.size()));
  while (num_left > most) {  // the last row of each span waits for the last pass
    int room = most;
    for (size_t i = 0; i < left.size(); i++) {
      take[i] = std::min(room, left[i].end - left[i].begin - 1);
      room -= take[i], num_left -= take[i];
    }
    AQ_TRY(run_spans(batch, &left, take, nullptr));
  }
  for (size_t i = 0; i < left.size(); i++) take[i] = left[i].end - left[i].begin;
  if (num_left > 0) AQ_TRY(run_spans(batch, &left, take, last));
  for (const Span& span : spans)
    batch->slots[span.slot].draft_end = std::max(batch->slots[span.slot].draft_end, span.end + 1);
  return 0;
}

namespace {

int draft(AqBatch* batch, const Message& message, const AqAdmit* admits, int num_admits) {
  std::vector<Span> spans;
  for (const AqExtend& e : batch->extends) {
    const Slot& slot = batch->slots[e.slot];
    if (slot.draft_end < e.until) spans.push_back({e.slot, slot.draft_end - 1, e.until - 1});
  }
  AQ_TRY(extend(batch, spans, nullptr));
  for (int i = 0; i < num_admits; i++) admit(batch, admits[i]);
  for (const AqPages* pages : message.pages)
    std::copy_n(&pages->count + 1, pages->count,
                batch->page_table.begin() + (ptrdiff_t)pages->slot * batch->config.pages_per_slot + pages->first);
  return grow(batch, message);
}

}  // namespace
}  // namespace aq

using namespace aq;

int aq_draft(AqBatch* batch, const int32_t* message, const AqConfidence* confidence, const AqAdmit* admits,
             int32_t num_admits) {
  AQ_TRY(check_pointer("batch", batch, alignof(AqBatch)));
  Message m;
  AQ_TRY(read_message(*batch, message, confidence, &m));
  AQ_TRY(check_step(*batch, m, admits, num_admits));
  batch->stage = Stage::idle;
  batch->extends.assign(m.extends, m.extends + m.num_extends);
  batch->chunks.assign(m.chunks, m.chunks + m.num_chunks);
  batch->decodes.assign(m.decodes, m.decodes + m.num_decodes);
  batch->num_draft_rows = batch->num_experts = 0;
  std::fill_n(batch->seconds, (int)kNumTimes, 0.0);
  batch->lapped = seconds();
  if (draft(batch, m, admits, num_admits) != 0) return -2;
  batch->lap(kDraftTime);
  batch->stage = Stage::drafted;
  return 0;
}

int aq_read_trees(AqBatch* batch, int32_t* out) {
  AQ_TRY(check_pointer("batch", batch, alignof(AqBatch)));
  AQ_TRY(check_pointer("out", out, sizeof(int32_t)));
  AQ_REQUIRE(batch->stage == Stage::drafted, "the step has no trees that wait to be verified");
  const Trees& trees = batch->trees;
  out = std::copy(trees.offsets.begin(), trees.offsets.end(), out);
  out = std::copy(trees.tokens.begin(), trees.tokens.end(), out);
  std::copy(trees.parents.begin(), trees.parents.end(), out);
  return 0;
}

int aq_replace_trees(AqBatch* batch, const int32_t* source) {
  AQ_TRY(check_pointer("batch", batch, alignof(AqBatch)));
  AQ_TRY(check_pointer("trees", source, sizeof(int32_t)));
  AQ_REQUIRE(batch->stage == Stage::drafted, "the step has no trees that wait to be verified");
  const int count = (int)batch->decodes.size();
  AQ_REQUIRE(source[0] == 0, "offsets[0]=%d: must be 0", source[0]);
  int64_t num_rows = source[count];
  for (const AqChunk& chunk : batch->chunks) num_rows += chunk.end - chunk.start;
  AQ_REQUIRE(num_rows <= batch->config.max_rows, "a step of %lld rows: there is room for %d", (long long)num_rows,
             batch->config.max_rows);
  Trees trees;
  for (int b = 0; b < count; b++)
    AQ_REQUIRE(source[b + 1] > source[b] && source[b + 1] - source[b] <= AQ_MAX_NODES,
               "offsets[%d]=%d: a tree has 1 to %d nodes", b + 1, source[b + 1], AQ_MAX_NODES);
  const int32_t *tokens = source + count + 1, *parents = tokens + source[count];
  trees.offsets.assign(source, source + count + 1);
  trees.tokens.assign(tokens, tokens + source[count]);
  trees.parents.assign(parents, parents + source[count]);
  for (int b = 0; b < count; b++) {
    const Slot& slot = batch->slots[batch->decodes[b].slot];
    AQ_REQUIRE(trees.tokens[trees.offsets[b]] == slot.history.back(), "tree %d: its root is token %d, must be %d", b,
               trees.tokens[trees.offsets[b]], slot.history.back());
  }
  for (const int token : trees.tokens)
    AQ_REQUIRE(token >= 0 && token < batch->vocab(), "token %d: must be in [0, %d)", token, batch->vocab());
  AQ_TRY(finish_trees(&trees));
  batch->trees = std::move(trees);
  return 0;
}
