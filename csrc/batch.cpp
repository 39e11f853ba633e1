// A batch's life, and what a step may ask of it: everything is checked before anything changes.
#include "batch.h"

#include <string.h>

#include <new>

using namespace aq;

namespace aq {

void RowBuffer::open(int max_rows, bool is_draft, const int32_t* page_table, int pages_per_slot, int num_slots) {
  is_draft_ = is_draft;
  for (auto* column : {&tokens_, &positions_, &slots_, &write_, &key_start_, &context_len_, &tail_len_})
    column->reset(new int32_t[max_rows]);
  tail_.reset(new int32_t[(size_t)max_rows * (AQ_MAX_DEPTH + 1)]);
  rows_ = {tokens_.get(),      positions_.get(), slots_.get(),    write_.get(), key_start_.get(),
           context_len_.get(), tail_.get(),      tail_len_.get(), page_table,   0,
           AQ_MAX_DEPTH + 1,   pages_per_slot,   num_slots};
}

int RowBuffer::next(int slot, int token, int index, int key_start) {
  const int r = rows_.num_rows++;
  slots_[r] = slot, tokens_[r] = token, positions_[r] = index - is_draft_, key_start_[r] = key_start;
  return r;
}

void RowBuffer::add(int slot, int token, int index, int key_start, bool is_written) {
  const int r = next(slot, token, index, key_start);
  write_[r] = is_written ? index : -1, context_len_[r] = index + 1, tail_len_[r] = 0;
}

void RowBuffer::add_node(int slot, int token, int base, const std::vector<int32_t>& path, int key_start) {
  const int length = (int)path.size(), r = next(slot, token, base + length - 1, key_start);
  for (int i = 0; i < length; i++) tail_[(size_t)r * (AQ_MAX_DEPTH + 1) + i] = base + path[i];
  write_[r] = base + path[length - 1], context_len_[r] = base, tail_len_[r] = length;
}

namespace {

int check_config(const AqBatchConfig* config) {
  AQ_TRY(check_pointer("config", config, alignof(AqBatchConfig)));
  const AqBatchConfig& c = *config;
  AQ_TRY(check_model(c.target));
  AQ_TRY(check_kv(c.target_kv, c.target->num_kv_heads, c.target->head_dim));
  AQ_TRY(check_pointer("hidden", c.hidden, sizeof(float)));
  AQ_REQUIRE(c.num_slots > 0, "num_slots=%d: must be positive", c.num_slots);
  AQ_REQUIRE(c.pages_per_slot > 0, "pages_per_slot=%d: must be positive", c.pages_per_slot);
  AQ_REQUIRE(c.max_rows / AQ_MAX_NODES >= c.num_slots, "max_rows=%d: %d slots may need %d", c.max_rows, c.num_slots,
             c.num_slots * AQ_MAX_NODES);
  if (c.draft == nullptr) return 0;
  AQ_TRY(check_model(c.draft));
  AQ_TRY(check_kv(c.draft_kv, c.draft->num_kv_heads, c.draft->head_dim));
  AQ_TRY(check_pointer("features", c.features, sizeof(float)));
  AQ_TRY(check_pointer("draft_hidden", c.draft_hidden, sizeof(float)));
  AQ_TRY(check_pointer("fused", c.fused, sizeof(float)));
  AQ_TRY(check_pointer("d2t", c.d2t, sizeof(int32_t)));
  AQ_TRY(check_linear("fc", c.fusion.fc, c.draft->hidden, c.target->num_capture * c.target->hidden));
  AQ_REQUIRE(c.draft_kv->num_pages == c.target_kv->num_pages && c.draft_kv->page_size == c.target_kv->page_size,
             "draft_kv has %d pages of %d: must be %d of %d", c.draft_kv->num_pages, c.draft_kv->page_size,
             c.target_kv->num_pages, c.target_kv->page_size);
  return 0;
}

int check_shape(const AqBatch& batch, const AqShape& s) {
  AQ_REQUIRE(batch.config.draft != nullptr, "the batch has no draft model");
  AQ_REQUIRE(s.kind >= AQ_CHAIN && s.kind <= AQ_DYNAMIC, "kind=%d: must be in [0, 2]", s.kind);
  AQ_REQUIRE(s.depth >= 0 && s.depth <= AQ_MAX_DEPTH, "depth=%d: must be in [0, %d]", s.depth, AQ_MAX_DEPTH);
  AQ_REQUIRE(s.num_nodes >= 1 && s.num_nodes <= AQ_MAX_NODES, "num_nodes=%d: must be in [1, %d]", s.num_nodes, AQ_MAX_NODES);
  const int vocab = batch.config.draft->head.n;
  AQ_REQUIRE(s.width >= 1 && s.width <= vocab, "width=%d: the draft's vocabulary has %d tokens", s.width, vocab);
  if (s.kind == AQ_DYNAMIC) {
    const int64_t found = (int64_t)s.width + (int64_t)s.depth * s.width * s.width;
    AQ_REQUIRE(s.depth < AQ_MAX_DEPTH && (int64_t)s.depth * s.width <= AQ_MAX_NODES && s.num_nodes <= 1 + found,
               "depth=%d, width=%d, num_nodes=%d: no such tree", s.depth, s.width, s.num_nodes);
  }
  if (s.kind == AQ_CHAIN)
    AQ_REQUIRE(s.depth >= 1 && s.num_nodes == s.depth + 1, "depth=%d, num_nodes=%d: no such chain", s.depth, s.num_nodes);
  if (s.kind != AQ_STATIC) return 0;
  AQ_TRY(check_pointer("parents", s.parents, sizeof(int32_t)));
  AQ_TRY(check_pointer("ranks", s.ranks, sizeof(int32_t)));
  for (int i = 1; i < s.num_nodes; i++) {
    AQ_REQUIRE(s.parents[i] >= 0 && s.parents[i] < i, "parents[%d]=%d: must be in [0, %d)", i, s.parents[i], i);
    AQ_REQUIRE(s.ranks[i] >= 0 && s.ranks[i] < s.width, "ranks[%d]=%d: must be in [0, %d)", i, s.ranks[i], s.width);
  }
  return 0;
}

// Levels, inner nodes, and where each stands among the rows that the draft runs, level by level.
int plan_static(Shape* shape, const AqShape& source) {
  const int n = source.num_nodes;
  shape->parents.assign(source.parents, source.parents + n), shape->ranks.assign(source.ranks, source.ranks + n);
  shape->levels.assign(n, 0), shape->is_inner.assign(n, 0), shape->parent_rows.assign(n, 0), shape->paths.assign(n, {});
  for (int i = 1; i < n; i++) {
    shape->levels[i] = shape->levels[shape->parents[i]] + 1, shape->is_inner[shape->parents[i]] = 1;
    AQ_REQUIRE(shape->levels[i] >= shape->levels[i - 1] && shape->levels[i] <= AQ_MAX_DEPTH,
               "node %d of level %d: nodes stand in level order, up to %d", i, shape->levels[i], AQ_MAX_DEPTH);
  }
  shape->depth = shape->levels[n - 1];
  std::vector<int32_t> row_of(n, 0);
  int scratch = 0, in_level = 0;
  for (int i = 1; i < n; i++) {
    if (shape->levels[i] != shape->levels[i - 1]) in_level = 0;
    shape->parent_rows[i] = row_of[shape->parents[i]];
    if (!shape->is_inner[i]) continue;
    row_of[i] = in_level++;
    shape->paths[i] = shape->paths[shape->parents[i]];
    shape->paths[i].push_back(scratch++);
  }
  return 0;
}

int check_tokens(const char* name, const int32_t* tokens, int count, int vocab) {
  AQ_REQUIRE(count >= 0, "%s: count=%d must be at least 0", name, count);
  if (count > 0) AQ_TRY(check_pointer(name, tokens, sizeof(int32_t)));
  for (int i = 0; i < count; i++)
    AQ_REQUIRE(tokens[i] >= 0 && tokens[i] < vocab, "%s[%d]=%d: must be in [0, %d)", name, i, tokens[i], vocab);
  return 0;
}

int check_admit(const AqBatch& batch, const AqAdmit& a) {
  AQ_REQUIRE(a.num_tokens >= 1 && a.num_tokens <= batch.max_context(), "admit slot %d: %d tokens, there is room for %d", a.slot,
             a.num_tokens, batch.max_context());
  AQ_REQUIRE(a.num_prompt >= 1 && a.num_prompt <= a.num_tokens, "num_prompt=%d: must be in [1, %d]", a.num_prompt, a.num_tokens);
  AQ_REQUIRE(a.num_hit >= 0 && a.num_hit <= a.num_tokens, "num_hit=%d: must be in [0, %d]", a.num_hit, a.num_tokens);
  AQ_REQUIRE(!a.drafts || batch.config.draft != nullptr, "admit slot %d: drafts, and there is no draft model", a.slot);
  AQ_REQUIRE(a.first_draft_key >= 1 && a.first_draft_key <= a.num_hit + 1, "first_draft_key=%d: must be in [1, %d]",
             a.first_draft_key, a.num_hit + 1);
  AQ_TRY(check_sampling(&a.sampling, 1));
  AQ_TRY(check_tokens("tokens", a.tokens, a.num_tokens, batch.vocab()));
  AQ_TRY(check_tokens("logit_bias", a.bias_tokens, a.num_biases, batch.vocab()));
  if (a.num_biases > 0) AQ_TRY(check_pointer("biases", a.biases, sizeof(float)));
  AQ_TRY(check_tokens("end_token_ids", a.end_tokens, a.num_end_tokens, batch.vocab()));
  for (int at = 0; at < a.bad_words_size; at += 1 + a.bad_words[at]) {
    AQ_TRY(check_pointer("bad_words", a.bad_words, sizeof(int32_t)));
    AQ_REQUIRE(a.bad_words[at] >= 1 && at + a.bad_words[at] < a.bad_words_size, "bad_words: a word has %d tokens", a.bad_words[at]);
    AQ_TRY(check_tokens("bad_words", a.bad_words + at + 1, a.bad_words[at], batch.vocab()));
  }
  return 0;
}

// Marks a slot that a part of the step names, which it may do once.
int take(const AqBatch& batch, const char* part, int slot, std::vector<uint8_t>* taken) {
  AQ_REQUIRE(slot >= 0 && slot < batch.config.num_slots, "%s slot=%d: must be in [0, %d)", part, slot, batch.config.num_slots);
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

int check_chunk(const AqChunk& chunk, int num_known, int num_computed) {
  AQ_REQUIRE(chunk.start >= 0 && chunk.start < chunk.end && chunk.end <= num_known && chunk.start <= num_computed &&
                 chunk.end >= num_computed,
             "chunk [%d, %d) of slot %d: %d tokens are known and %d computed", chunk.start, chunk.end, chunk.slot, num_known,
             num_computed);
  const int wanted = chunk.end + !chunk.draws;
  AQ_REQUIRE(chunk.is_last ? num_known == wanted : !chunk.draws && num_known >= wanted, "chunk [%d, %d) of slot %d: is_last=%d and draws=%d, %d tokens known",
             chunk.start, chunk.end, chunk.slot, chunk.is_last, chunk.draws, num_known);
  return 0;
}

int check_decode(const AqBatch& batch, const AqDecode& decode, const int32_t* proposal) {
  const Slot& slot = batch.slots[decode.slot];
  AQ_REQUIRE(slot.decodes, "decode slot=%d: has no root yet", decode.slot);
  AQ_REQUIRE(decode.num_forced >= -1, "num_forced=%d: must be at least 0, or -1", decode.num_forced);
  AQ_REQUIRE(decode.shape >= -1 && decode.shape < (int)batch.shapes.size(), "shape=%d: there is no such shape", decode.shape);
  AQ_REQUIRE(decode.shape < 0 || slot.drafts, "decode slot=%d: was admitted as a sequence that never drafts", decode.slot);
  if (proposal == nullptr) return 0;
  const int count = decode.num_proposed;
  AQ_REQUIRE(count < AQ_MAX_NODES, "a proposal of %d tokens: must be below %d", count, AQ_MAX_NODES);
  AQ_TRY(check_tokens("proposal", proposal, count, batch.vocab()));
  std::vector<int32_t> levels(count + 1, 0);
  for (int i = 1; i <= count; i++) {
    const int parent = proposal[count + i - 1];
    AQ_REQUIRE(parent >= 0 && parent < i, "proposal: entry %d follows entry %d, must be one before it", i - 1, parent - 1);
    levels[i] = levels[parent] + 1;
    AQ_REQUIRE(levels[i] <= AQ_MAX_DEPTH, "proposal: is deeper than %d", AQ_MAX_DEPTH);
  }
  return 0;
}

int rows_of(const AqBatch& batch, const AqDecode& decode) {
  if (decode.num_proposed >= 0) return 1 + decode.num_proposed;
  return decode.shape < 0 ? 1 : batch.shapes[decode.shape].num_nodes;
}

}  // namespace

int read_message(const AqBatch& batch, const int32_t* message, Message* out) {
  AQ_TRY(check_pointer("message", message, sizeof(int32_t)));
  const int num_slots = batch.config.num_slots, *counts = message;
  for (int i = 0; i < 3; i++)
    AQ_REQUIRE(counts[i] >= 0 && counts[i] <= num_slots, "a step with %d parts of a kind: there are %d slots", counts[i], num_slots);
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
    AQ_REQUIRE(admit != nullptr || (slot.is_admitted && !slot.decodes), "chunk slot=%d: holds no sequence that prefills", chunk.slot);
    if (admit != nullptr) AQ_TRY(check_chunk(chunk, admit->num_tokens, admit->num_hit));
    else AQ_TRY(check_chunk(chunk, (int)slot.history.size(), slot.num_computed));
    num_rows += chunk.end - chunk.start;
  }
  for (int i = 0; i < m.num_decodes; i++) {
    const AqDecode& decode = m.decodes[i];
    AQ_TRY(take(batch, "decode", decode.slot, &running));
    AQ_REQUIRE(admit_of[decode.slot] == nullptr, "decode slot=%d: is admitted in the same step", decode.slot);
    AQ_TRY(check_decode(batch, decode, m.proposals[i]));
    num_rows += rows_of(batch, decode);
  }
  AQ_REQUIRE(num_rows <= batch.config.max_rows, "a step of %lld rows: there is room for %d", (long long)num_rows,
             batch.config.max_rows);
  return 0;
}

void admit(AqBatch* batch, const AqAdmit& a) {
  Slot& slot = batch->slots[a.slot];
  slot.is_admitted = true, slot.decodes = false, slot.drafts = a.drafts != 0;
  slot.num_prompt = a.num_prompt, slot.num_hit = slot.num_computed = a.num_hit;
  slot.first_draft_key = a.first_draft_key;
  slot.draft_end = a.first_draft_key > a.num_hit ? a.first_draft_key : a.num_hit;
  slot.sampling = a.sampling;
  slot.history.assign(a.tokens, a.tokens + a.num_tokens);
  slot.rules.start(a, batch->vocab());
  int32_t* table = batch->page_table.data() + (size_t)a.slot * batch->config.pages_per_slot;
  for (int i = 0; i < batch->config.pages_per_slot; i++) table[i] = -1;
}

}  // namespace aq

float* AqBatch::fused_at(int slot, int index) const {
  const int page = page_table[(size_t)slot * config.pages_per_slot + index / page_size()];
  if (page < 0) return nullptr;
  return config.fused + ((size_t)page * page_size() + index % page_size()) * config.draft->hidden;
}

void AqBatch::lap(StageTime time) {
  const double now = aq::seconds();
  seconds[time] += now - lapped, lapped = now;
}

AqBatch* aq_open_batch(const AqBatchConfig* config) {
  if (check_config(config) != 0) return nullptr;
  AqBatch* batch = new (std::nothrow) AqBatch;
  if (batch == nullptr) {
    fail("out of memory: a batch of %d slots", config->num_slots);
    return nullptr;
  }
  batch->config = *config;
  batch->slots.resize(config->num_slots);
  batch->page_table.assign((size_t)config->num_slots * config->pages_per_slot, -1);
  batch->rows.open(config->max_rows, false, batch->page_table.data(), config->pages_per_slot, config->num_slots);
  if (config->draft != nullptr)
    batch->draft_rows.open(config->max_rows, true, batch->page_table.data(), config->pages_per_slot, config->num_slots);
  return batch;
}

int aq_close_batch(AqBatch* batch) {
  delete batch;
  return 0;
}

int aq_add_shape(AqBatch* batch, const AqShape* source, int32_t* number) {
  AQ_TRY(check_pointer("batch", batch, alignof(AqBatch)));
  AQ_TRY(check_pointer("shape", source, alignof(AqShape)));
  AQ_TRY(check_shape(*batch, *source));
  Shape shape;
  shape.kind = source->kind, shape.depth = source->depth, shape.width = source->width, shape.num_nodes = source->num_nodes;
  if (shape.kind == AQ_STATIC) AQ_TRY(plan_static(&shape, *source));
  *number = (int32_t)batch->shapes.size();
  batch->shapes.push_back(std::move(shape));
  return 0;
}
