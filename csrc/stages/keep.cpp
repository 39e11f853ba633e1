// The keep stage moves the keys of accepted paths together, fuses features for the draft or holds them until it drafts,
// and moves every slot to its next root. Everything that can fail comes before the first change to a slot. Here also:
// the three stages in one call, once or several times.
#include <string.h>

#include <algorithm>

#include "batch.h"

namespace aq {

namespace {

// Node i of level d moves from KV index root + i to root + d. Since d <= i, no key is overwritten before it has moved.
int move_paths(AqBatch* batch) {
  std::vector<int32_t> slots, sources, targets;
  for (size_t b = 0; b < batch->decodes.size(); b++) {
    const int slot = batch->decodes[b].slot, root = batch->slots[slot].root();
    for (int level = 0; level < (int)batch->paths[b].size(); level++)
      if (batch->paths[b][level] != level)
        slots.push_back(slot), sources.push_back(root + batch->paths[b][level]), targets.push_back(root + level);
  }
  if (slots.empty()) return 0;
  return aq_move_kv(batch->config.target_kv, batch->page_table.data(), batch->config.pages_per_slot, slots.data(),
                    sources.data(), targets.data(), (int)slots.size());
}

// Whether a decode's slot holds its features, since the draft model did not run for it and may not for long. Chunks
// hold theirs if the draft has a window: only what stands in it when the sequence drafts is ever computed.
bool holds(const AqBatch& batch, size_t b) {
  return batch.slots[batch.decodes[b].slot].drafts && batch.decodes[b].shape < 0;
}

// Fuses what is held of slots that hold nothing more now, or would hold too much.
int fuse_due(AqBatch* batch) {
  std::vector<int> due;
  for (size_t b = 0; b < batch->decodes.size(); b++) {
    const int slot = batch->decodes[b].slot;
    if (batch->slots[slot].num_held == 0) continue;
    const int rows = batch->slots[slot].num_held + (int)batch->paths[b].size();
    if (!holds(*batch, b) || (batch->held_window() == 0 && rows > kMostHeld)) due.push_back(slot);
  }
  return fuse_held(batch, due);
}

// The slot holds the features of the tokens [begin, end) too. Drops those that no draft row from the token `end` on
// reads; the draft keys before them are out of reach too.
void hold_tokens(const AqBatch& batch, int begin, int end, Slot* slot) {
  const int window = batch.held_window();
  slot->num_held += end - begin;
  if (window > 0 && slot->num_held > window + kSpareHeld) {
    slot->num_held = window;
    slot->first_draft_key = slot->draft_end = end - window + 1;
  }
}

// Cannot fail.
void hold(AqBatch* batch) {
  const size_t wide = batch->config.fusion.fc.k;
  for (size_t b = 0; b < batch->decodes.size(); b++) {
    if (!holds(*batch, b)) continue;
    const int slot = batch->decodes[b].slot, root = batch->slots[slot].root(), first = batch->trees.offsets[b];
    const std::vector<int32_t>& path = batch->paths[b];
    hold_tokens(*batch, root, root + (int)path.size(), &batch->slots[slot]);
    for (size_t level = 0; level < path.size(); level++)
      memcpy(batch->held_at(slot, root + (int)level), batch->config.features + (first + path[level]) * wide,
             wide * sizeof(float));
  }
  for (size_t i = 0; i < batch->chunks.size(); i++) {
    const AqChunk& chunk = batch->chunks[i];
    Slot& slot = batch->slots[chunk.slot];
    const int begin = std::max(chunk.start, slot.first_feature());
    if (!slot.drafts || batch->held_window() == 0 || begin >= chunk.end) continue;
    if (chunk.start < slot.num_computed) slot.num_held = 0;  // they are computed again
    hold_tokens(*batch, begin, chunk.end, &slot);
  }
}

// Computes the draft's inputs that are due at once and keeps them by KV index. Where a cached page already holds one,
// its bits are the same.
int fuse(AqBatch* batch) {
  const auto feature = [&](int row) { return batch->config.features + (size_t)row * batch->config.fusion.fc.k; };
  std::vector<Featured> found;
  for (size_t b = 0; b < batch->decodes.size(); b++) {
    const int slot = batch->decodes[b].slot, root = batch->slots[slot].root(), first = batch->trees.offsets[b];
    if (!batch->slots[slot].drafts || holds(*batch, b)) continue;
    for (int level = 0; level < (int)batch->paths[b].size(); level++)
      found.push_back({feature(first + batch->paths[b][level]), slot, root + level});
  }
  for (size_t i = 0; batch->held_window() == 0 && i < batch->chunks.size(); i++) {
    const AqChunk& chunk = batch->chunks[i];
    if (!batch->slots[chunk.slot].drafts) continue;
    for (int j = std::max(chunk.start, batch->slots[chunk.slot].first_feature()); j < chunk.end; j++)
      found.push_back({feature(batch->first_rows[i] + j - chunk.start), chunk.slot, j});
  }
  return fuse_rows(batch, found);
}

// Writes the draft keys of prompt chunks that did not hold their features. The key behind a prompt's last token waits
// for the token that follows.
int extend_chunks(AqBatch* batch) {
  std::vector<Span> spans;
  if (batch->held_window() > 0) return 0;
  for (const AqChunk& chunk : batch->chunks) {
    const Slot& slot = batch->slots[chunk.slot];
    const int until = chunk.is_last ? chunk.end : chunk.end + 1;
    if (slot.drafts && slot.draft_end < until) spans.push_back({chunk.slot, slot.draft_end - 1, until - 1});
  }
  return extend(batch, spans, nullptr);
}

void advance(AqBatch* batch) {
  for (size_t b = 0; b < batch->decodes.size(); b++) {
    Slot& slot = batch->slots[batch->decodes[b].slot];
    for (const int token : batch->kept[b]) {
      slot.history.push_back(std::max(token, 0));
      slot.rules.count(slot.history.back());
    }
    slot.num_computed = slot.root();
  }
  for (size_t i = 0; i < batch->chunks.size(); i++) {
    const AqChunk& chunk = batch->chunks[i];
    Slot& slot = batch->slots[chunk.slot];
    slot.num_computed = chunk.end;
    if (chunk.draws) {
      slot.history.push_back(std::max(batch->chunk_tokens[i], 0));
      slot.rules.count(slot.history.back());
    }
    slot.decodes = chunk.is_last != 0;
  }
}

constexpr int kReportHead = 3;

int32_t* report_draft(const Slot& slot, int32_t* at) {
  *at++ = slot.first_draft_key, *at++ = slot.draft_end;
  *at++ = slot.drafts ? slot.num_computed - slot.num_held : 0;
  return at;
}

void report(const AqBatch& batch, const std::vector<int32_t>& roots, int32_t* out) {
  int32_t* at = out + kReportHead;
  for (size_t b = 0; b < batch.decodes.size(); b++) {
    *at++ = roots[b], *at++ = batch.trees.size((int)b) - 1;
    at = report_draft(batch.slots[batch.decodes[b].slot], at);
    *at++ = (int32_t)batch.kept[b].size();
    at = std::copy(batch.kept[b].begin(), batch.kept[b].end(), at);
    if (!batch.decodes[b].has_cut) continue;
    *at++ = (int32_t)batch.guesses[b].size();
    for (const Guess& guess : batch.guesses[b]) *at++ = guess.token, *at++ = guess.runner_up, *at++ = guess.margin;
  }
  for (size_t i = 0; i < batch.chunks.size(); i++) {
    *at++ = batch.chunk_tokens[i];
    at = report_draft(batch.slots[batch.chunks[i].slot], at);
  }
  out[0] = (int32_t)(at - out - kReportHead), out[1] = batch.num_draft_rows, out[2] = batch.num_experts;
  for (size_t b = 0; b < batch.decodes.size(); b++) {
    const int first = batch.trees.offsets[b], end = batch.trees.offsets[b + 1];
    at = std::copy(batch.trees.tokens.begin() + first, batch.trees.tokens.begin() + end, at);
    at = std::copy(batch.trees.parents.begin() + first, batch.trees.parents.begin() + end, at);
    at = std::copy(batch.paths[b].begin(), batch.paths[b].end(), at);
  }
}

// Where the report of the step that was kept last ends.
int32_t* end_of_report(const AqBatch& batch, int32_t* out) {
  size_t size = kReportHead + out[0] + 2 * batch.trees.tokens.size();
  for (const std::vector<int32_t>& path : batch.paths) size += path.size();
  return out + size;
}

int keep(AqBatch* batch, int32_t* out) {
  AQ_TRY(move_paths(batch));
  batch->lap(kKeepTime);
  AQ_TRY(fuse_due(batch));
  AQ_TRY(fuse(batch));
  AQ_TRY(extend_chunks(batch));
  batch->lap(kDraftTime);
  hold(batch);
  std::vector<int32_t> roots;
  for (const AqDecode& decode : batch->decodes) roots.push_back(batch->slots[decode.slot].root());
  advance(batch);
  report(*batch, roots, out);
  batch->lap(kKeepTime);
  return 0;
}

int one_step(AqBatch* batch, const int32_t* message, const AqConfidence* confidence, const AqAdmit* admits,
             int num_admits, int32_t* out, double* times) {
  if (const int failed = aq_draft(batch, message, confidence, admits, num_admits)) return failed;
  if (const int failed = aq_verify(batch, nullptr, 0, 0, nullptr, nullptr)) return failed;
  return aq_keep(batch, out, times);
}

// A message of the last step's decodes and nothing else.
std::vector<int32_t> decodes_alone(const AqBatch& batch) {
  std::vector<int32_t> message{0, 0, (int32_t)batch.decodes.size(), 0};
  const int32_t* decodes = (const int32_t*)batch.decodes.data();
  message.insert(message.end(), decodes, decodes + batch.decodes.size() * (sizeof(AqDecode) / sizeof(int32_t)));
  return message;
}

// Whether a sequence of the last step has come to its end, or its logits were no numbers.
bool has_end(const AqBatch& batch) {
  for (size_t b = 0; b < batch.decodes.size(); b++) {
    const Slot& slot = batch.slots[batch.decodes[b].slot];
    if ((int)slot.history.size() - slot.num_prompt >= slot.max_tokens) return true;
    for (const int32_t token : batch.kept[b])
      if (token < 0 || slot.rules.ends(token)) return true;
  }
  return false;
}

// Whether the decodes of a message may run again without another.
int check_repeats(const AqBatch& batch, const int32_t* message, const AqConfidence* confidence) {
  Message m;
  AQ_TRY(read_message(batch, message, confidence, &m));
  AQ_REQUIRE(m.num_chunks == 0, "num_steps above 1 beside %d chunks: a step with chunks runs once", m.num_chunks);
  for (int i = 0; i < m.num_decodes; i++)
    AQ_REQUIRE(m.proposals[i] == nullptr, "num_steps above 1 and decode %d with a proposal: such a step runs once", i);
  return 0;
}

}  // namespace
}  // namespace aq

using namespace aq;

int aq_keep(AqBatch* batch, int32_t* out, double* times) {
  AQ_TRY(check_pointer("batch", batch, alignof(AqBatch)));
  AQ_TRY(check_pointer("out", out, sizeof(int32_t)));
  AQ_TRY(check_pointer("seconds", times, sizeof(double)));
  AQ_REQUIRE(batch->stage == Stage::verified, "the step has not been verified");
  batch->lapped = seconds();
  batch->stage = Stage::idle;
  if (keep(batch, out) != 0) return -2;
  std::copy_n(batch->seconds, (int)kNumTimes, times);
  return 0;
}

int aq_step(AqBatch* batch, const int32_t* message, const AqConfidence* confidence, const AqAdmit* admits,
            int32_t num_admits, int32_t num_steps, int32_t* out, double* times, int32_t* num_done) {
  AQ_TRY(check_pointer("num_done", num_done, sizeof(int32_t)));
  AQ_TRY(check_pointer("batch", batch, alignof(AqBatch)));
  *num_done = 0;
  AQ_REQUIRE(num_steps >= 1, "num_steps=%d: must be at least 1", num_steps);
  if (num_steps > 1) AQ_TRY(check_repeats(*batch, message, confidence));
  if (const int failed = one_step(batch, message, confidence, admits, num_admits, out, times)) return failed;
  const std::vector<int32_t> again = decodes_alone(*batch);
  while (++*num_done < num_steps && !has_end(*batch)) {
    out = end_of_report(*batch, out);
    times += kNumTimes;
    if (one_step(batch, again.data(), confidence, nullptr, 0, out, times) != 0) return -2;
  }
  return 0;
}
