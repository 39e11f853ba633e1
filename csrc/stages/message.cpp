// Reads a step from one array of int32 and checks it as a whole, before anything changes.
#include <algorithm>
#include <cmath>

#include "batch.h"

namespace aq {

namespace {

int check_tokens(const char* name, const int32_t* tokens, int count, int vocab) {
  AQ_REQUIRE(count >= 0, "%s: count=%d must be at least 0", name, count);
  if (count > 0) AQ_TRY(check_pointer(name, tokens, sizeof(int32_t)));
  for (int i = 0; i < count; i++)
    AQ_REQUIRE(tokens[i] >= 0 && tokens[i] < vocab, "%s[%d]=%d: must be in [0, %d)", name, i, tokens[i], vocab);
  return 0;
}

int check_admit(const AqBatch& batch, const AqAdmit& a) {
  AQ_REQUIRE(a.num_tokens >= 1 && a.num_tokens <= batch.max_context(), "admit slot %d: %d tokens, there is room for %d",
             a.slot, a.num_tokens, batch.max_context());
  AQ_REQUIRE(a.num_prompt >= 1 && a.num_prompt <= a.num_tokens, "num_prompt=%d: must be in [1, %d]", a.num_prompt,
             a.num_tokens);
  AQ_REQUIRE(a.num_hit >= 0 && a.num_hit <= a.num_tokens, "num_hit=%d: must be in [0, %d]", a.num_hit, a.num_tokens);
  AQ_REQUIRE(!a.drafts || batch.config.draft != nullptr, "admit slot %d: drafts, and there is no draft model", a.slot);
  AQ_REQUIRE(a.first_draft_key >= 1 && a.first_draft_key <= std::max(a.num_hit + 1, a.num_tokens),
             "first_draft_key=%d: must be in [1, %d]", a.first_draft_key, std::max(a.num_hit + 1, a.num_tokens));
  const int most = std::max(a.num_hit, a.first_draft_key);
  AQ_REQUIRE(a.draft_end >= a.first_draft_key && a.draft_end <= most, "draft_end=%d: must be in [%d, %d]", a.draft_end,
             a.first_draft_key, most);
  AQ_TRY(check_sampling(&a.sampling, 1));
  AQ_TRY(check_tokens("tokens", a.tokens, a.num_tokens, batch.vocab()));
  AQ_TRY(check_tokens("logit_bias", a.bias_tokens, a.num_biases, batch.vocab()));
  if (a.num_biases > 0) AQ_TRY(check_pointer("biases", a.biases, sizeof(float)));
  AQ_TRY(check_tokens("end_token_ids", a.end_tokens, a.num_end_tokens, batch.vocab()));
  for (int at = 0; at < a.bad_words_size; at += 1 + a.bad_words[at]) {
    AQ_TRY(check_pointer("bad_words", a.bad_words, sizeof(int32_t)));
    AQ_REQUIRE(a.bad_words[at] >= 1 && at + a.bad_words[at] < a.bad_words_size, "bad_words: a word has %d tokens",
               a.bad_words[at]);
    AQ_TRY(check_tokens("bad_words", a.bad_words + at + 1, a.bad_words[at], batch.vocab()));
  }
  return 0;
}

// Marks a slot that a part of the step names. Fails if the slot is marked already.
int take(const AqBatch& batch, const char* part, int slot, std::vector<uint8_t>* taken) {
  AQ_REQUIRE(slot >= 0 && slot < batch.config.num_slots, "%s slot=%d: must be in [0, %d)", part, slot,
             batch.config.num_slots);
  AQ_REQUIRE(!(*taken)[slot], "%s slot=%d: stands twice in the step", part, slot);
  (*taken)[slot] = 1;
  return 0;
}

int check_pages(const AqBatch& batch, const AqPages& pages) {
  AQ_REQUIRE(pages.slot >= 0 && pages.slot < batch.config.num_slots, "pages slot=%d: must be in [0, %d)", pages.slot,
             batch.config.num_slots);
  AQ_REQUIRE(pages.group == 0, "pages group=%d: there is one group, 0", pages.group);
  const int32_t* own = &pages.count + 1;
  for (int i = 0; i < pages.count; i++)
    AQ_REQUIRE(own[i] >= 0 && own[i] < batch.config.target_kv->num_pages, "page %d: must be in [0, %d)", own[i],
               batch.config.target_kv->num_pages);
  return 0;
}

// A chunk may lie within cached pages, for their draft keys.
int check_chunk(const AqChunk& chunk, int num_known, int num_computed) {
  AQ_REQUIRE(chunk.start >= 0 && chunk.start < chunk.end && chunk.end <= num_known && chunk.start <= num_computed,
             "chunk [%d, %d) of slot %d: %d tokens are known and %d computed", chunk.start, chunk.end, chunk.slot,
             num_known, num_computed);
  const int wanted = chunk.end + !chunk.draws;
  AQ_REQUIRE(chunk.is_last ? num_known == wanted : !chunk.draws && num_known >= wanted,
             "chunk [%d, %d) of slot %d: is_last=%d and draws=%d, %d tokens known", chunk.start, chunk.end, chunk.slot,
             chunk.is_last, chunk.draws, num_known);
  return 0;
}

int check_cut(const AqBatch& batch, const AqDecode& decode, const AqCut& cut) {
  const bool is_chain = decode.shape >= 0 && batch.shapes[decode.shape].kind == AQ_CHAIN;
  AQ_REQUIRE(is_chain, "cut of slot %d: only a chain that the draft model drafts has one", decode.slot);
  for (int i = 0; i < AQ_MARGINS; i++) {
    AQ_REQUIRE(cut.chances[i] >= 0.0f && cut.chances[i] <= 1.0f, "cut of slot %d: chances[%d]=%g: must be in [0, 1]",
               decode.slot, i, cut.chances[i]);
    AQ_REQUIRE(cut.seconds[i] >= 0.0f && cut.seconds[i] <= 1.0f, "cut of slot %d: seconds[%d]=%g: must be in [0, 1]",
               decode.slot, i, cut.seconds[i]);
  }
  AQ_REQUIRE(cut.least_node >= 0.0f && cut.least_pass >= 0.0f,
             "cut of slot %d: least_node=%g, least_pass=%g: must be at least 0", decode.slot, cut.least_node,
             cut.least_pass);
  return 0;
}

int rows_of(const AqBatch& batch, const AqDecode& decode) {
  const int num_proposed = std::max(decode.num_proposed, 0);
  if (decode.has_cut) return 1 + 2 * batch.shapes[decode.shape].depth + num_proposed;
  if (decode.num_proposed >= 0) return 1 + num_proposed;
  return decode.shape < 0 ? 1 : batch.shapes[decode.shape].num_nodes;
}

int check_decode(const AqBatch& batch, const AqDecode& decode, const int32_t* proposal, const AqCut* cut) {
  const Slot& slot = batch.slots[decode.slot];
  AQ_REQUIRE(slot.decodes, "decode slot=%d: has no root yet", decode.slot);
  AQ_REQUIRE(decode.shape >= -1 && decode.shape < (int)batch.shapes.size(), "shape=%d: there is no such shape",
             decode.shape);
  AQ_REQUIRE(decode.shape < 0 || slot.drafts, "decode slot=%d: was admitted as a sequence that never drafts",
             decode.slot);
  if (cut != nullptr) AQ_TRY(check_cut(batch, decode, *cut));
  if (proposal == nullptr) return 0;
  const int count = decode.num_proposed;
  AQ_REQUIRE(count < AQ_MAX_NODES, "a proposal of %d tokens: must be below %d", count, AQ_MAX_NODES);
  AQ_REQUIRE(rows_of(batch, decode) <= AQ_MAX_NODES,
             "a proposal of %d tokens beside a cut: trees have at most %d nodes", count, AQ_MAX_NODES);
  AQ_TRY(check_tokens("proposal", proposal, count, batch.vocab()));
  std::vector<int32_t> levels(count + 1, 0);
  for (int i = 1; i <= count; i++) {
    const int parent = proposal[count + i - 1];
    AQ_REQUIRE(parent >= 0 && parent < i, "proposal: entry %d follows entry %d, must be one before it", i - 1,
               parent - 1);
    AQ_REQUIRE(cut == nullptr || parent == i - 1,
               "proposal: entry %d follows entry %d, beside a cut it must be a chain", i - 1, parent - 1);
    levels[i] = levels[parent] + 1;
    AQ_REQUIRE(levels[i] <= AQ_MAX_DEPTH, "proposal: is deeper than %d", AQ_MAX_DEPTH);
  }
  return 0;
}

}  // namespace

int read_message(const AqBatch& batch, const int32_t* message, const AqConfidence* confidence, Message* out) {
  AQ_TRY(check_pointer("message", message, sizeof(int32_t)));
  AQ_TRY(check_pointer("confidence", confidence, alignof(AqConfidence)));
  const AqCut* cuts = confidence->cuts;
  int num_cuts = 0;
  out->row_costs = confidence->row_costs, out->num_row_costs = confidence->num_row_costs;
  AQ_REQUIRE(out->num_row_costs >= 0, "num_row_costs=%d: must be at least 0", out->num_row_costs);
  if (out->num_row_costs > 0) AQ_TRY(check_pointer("row_costs", out->row_costs, sizeof(float)));
  for (int i = 0; i < out->num_row_costs; i++)
    AQ_REQUIRE(std::isfinite(out->row_costs[i]), "row_costs[%d]=%g: must be a finite number", i, out->row_costs[i]);
  const int num_slots = batch.config.num_slots, *counts = message;
  for (int i = 0; i < 3; i++)
    AQ_REQUIRE(counts[i] >= 0 && counts[i] <= num_slots, "a step with %d parts of a kind: there are %d slots",
               counts[i], num_slots);
  AQ_REQUIRE(counts[3] >= 0 && counts[3] <= num_slots * batch.config.pages_per_slot,
             "a step with %d runs of pages: there are %d slots of %d", counts[3], num_slots,
             batch.config.pages_per_slot);
  out->num_extends = counts[0], out->num_chunks = counts[1], out->num_decodes = counts[2];
  out->extends = (const AqExtend*)(message + 4);
  out->chunks = (const AqChunk*)(out->extends + out->num_extends);
  out->decodes = (const AqDecode*)(out->chunks + out->num_chunks);
  const int32_t* at = (const int32_t*)(out->decodes + out->num_decodes);
  for (int i = 0; i < counts[3]; i++) {
    const AqPages* pages = (const AqPages*)at;
    AQ_REQUIRE(pages->first >= 0 && pages->count >= 0 && pages->count <= batch.config.pages_per_slot - pages->first,
               "pages [%d, %d) of slot %d: a slot has %d", pages->first, pages->first + pages->count, pages->slot,
               batch.config.pages_per_slot);
    out->pages.push_back(pages);
    at = &pages->count + 1 + pages->count;
  }
  for (int i = 0; i < out->num_decodes; i++) {
    const int count = out->decodes[i].num_proposed;
    AQ_REQUIRE(count >= -1, "num_proposed=%d: must be at least 0, or -1", count);
    out->proposals.push_back(count < 0 ? nullptr : at);
    at += count < 0 ? 0 : 2 * count;
    const bool has_cut = out->decodes[i].has_cut != 0;
    if (has_cut) AQ_TRY(check_pointer("cuts", cuts, alignof(AqCut)));
    if (has_cut) AQ_REQUIRE(++num_cuts <= confidence->num_cuts, "num_cuts=%d: decodes have more", confidence->num_cuts);
    out->cuts.push_back(has_cut ? cuts++ : nullptr);
  }
  return 0;
}

int check_step(const AqBatch& batch, const Message& m, const AqAdmit* admits, int num_admits) {
  const int num_slots = batch.config.num_slots;
  std::vector<uint8_t> extended(num_slots), admitted(num_slots), running(num_slots);
  for (int i = 0; i < m.num_extends; i++) {
    const AqExtend& e = m.extends[i];
    AQ_TRY(take(batch, "extend", e.slot, &extended));
    const Slot& slot = batch.slots[e.slot];
    AQ_REQUIRE(slot.is_admitted && slot.drafts, "extend slot=%d: holds no sequence that drafts", e.slot);
    AQ_REQUIRE(e.until <= slot.num_computed + 1 && e.until <= (int)slot.history.size(),
               "extend slot=%d until=%d: %zu tokens are known and %d computed", e.slot, e.until, slot.history.size(),
               slot.num_computed);
  }
  AQ_REQUIRE(num_admits >= 0 && num_admits <= num_slots, "num_admits=%d: there are %d slots", num_admits, num_slots);
  if (num_admits > 0) AQ_TRY(check_pointer("admits", admits, alignof(AqAdmit)));
  std::vector<const AqAdmit*> admit_of(num_slots, nullptr);
  for (int i = 0; i < num_admits; i++) {
    AQ_TRY(take(batch, "admit", admits[i].slot, &admitted));
    AQ_TRY(check_admit(batch, admits[i]));
    admit_of[admits[i].slot] = admits + i;
  }
  for (const AqPages* pages : m.pages) AQ_TRY(check_pages(batch, *pages));
  int64_t num_rows = 0;
  for (int i = 0; i < m.num_chunks; i++) {
    const AqChunk& chunk = m.chunks[i];
    AQ_TRY(take(batch, "chunk", chunk.slot, &running));
    const Slot& slot = batch.slots[chunk.slot];
    const AqAdmit* admit = admit_of[chunk.slot];
    AQ_REQUIRE(admit != nullptr || (slot.is_admitted && !slot.decodes),
               "chunk slot=%d: holds no sequence that prefills", chunk.slot);
    if (admit != nullptr) AQ_TRY(check_chunk(chunk, admit->num_tokens, admit->num_hit));
    else AQ_TRY(check_chunk(chunk, (int)slot.history.size(), slot.num_computed));
    num_rows += chunk.end - chunk.start;
  }
  for (int i = 0; i < m.num_decodes; i++) {
    const AqDecode& decode = m.decodes[i];
    AQ_TRY(take(batch, "decode", decode.slot, &running));
    AQ_REQUIRE(admit_of[decode.slot] == nullptr, "decode slot=%d: is admitted in the same step", decode.slot);
    AQ_TRY(check_decode(batch, decode, m.proposals[i], m.cuts[i]));
    num_rows += rows_of(batch, decode);
  }
  AQ_REQUIRE(num_rows <= batch.config.max_rows, "a step of %lld rows: there is room for %d", (long long)num_rows,
             batch.config.max_rows);
  return 0;
}

}  // namespace aq
