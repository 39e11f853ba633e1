// Opening and closing a batch, its rows and shapes, and admission of sequences to slots.
#include "batch.h"

#include <string.h>

#include <algorithm>
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
  AQ_REQUIRE(s.num_nodes >= 1 && s.num_nodes <= AQ_MAX_NODES, "num_nodes=%d: must be in [1, %d]", s.num_nodes,
             AQ_MAX_NODES);
  const int vocab = batch.config.draft->head.n;
  AQ_REQUIRE(s.width >= 1 && s.width <= vocab, "width=%d: the draft's vocabulary has %d tokens", s.width, vocab);
  if (s.kind == AQ_DYNAMIC) {
    const int64_t found = (int64_t)s.width + (int64_t)s.depth * s.width * s.width;
    AQ_REQUIRE(s.depth < AQ_MAX_DEPTH && (int64_t)s.depth * s.width <= AQ_MAX_NODES && s.num_nodes <= 1 + found,
               "depth=%d, width=%d, num_nodes=%d: no such tree", s.depth, s.width, s.num_nodes);
  }
  if (s.kind == AQ_CHAIN)
    AQ_REQUIRE(s.depth >= 1 && s.num_nodes == s.depth + 1, "depth=%d, num_nodes=%d: no such chain", s.depth,
               s.num_nodes);
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

}  // namespace

void admit(AqBatch* batch, const AqAdmit& a) {
  Slot& slot = batch->slots[a.slot];
  slot.is_admitted = true, slot.decodes = false, slot.drafts = a.drafts != 0;
  slot.num_prompt = a.num_prompt, slot.max_tokens = a.max_tokens;
  slot.num_hit = slot.num_computed = a.num_hit;
  slot.first_draft_key = a.first_draft_key;
  slot.draft_end = a.draft_end;
  slot.sampling = a.sampling;
  slot.history.assign(a.tokens, a.tokens + a.num_tokens);
  slot.num_held = 0;
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
  if (config->draft == nullptr) return batch;
  batch->draft_rows.open(config->max_rows, true, batch->page_table.data(), config->pages_per_slot, config->num_slots);
  batch->held.reset(new float[(size_t)config->num_slots * batch->held_rows() * config->fusion.fc.k]);
  return batch;
}

int aq_close_batch(AqBatch* batch) {
  delete batch;
  return 0;
}

int aq_renew_draft(AqBatch* batch, const AqModel* draft, const int32_t* first_draft_keys) {
  AQ_TRY(check_pointer("batch", batch, alignof(AqBatch)));
  AQ_TRY(check_pointer("first_draft_keys", first_draft_keys, sizeof(int32_t)));
  AQ_REQUIRE(batch->config.draft != nullptr, "the batch has no draft model");
  AQ_REQUIRE(batch->stage == Stage::idle, "a step is in progress");
  AQ_TRY(check_model(draft));
  const AqModel& old = *batch->config.draft;
  AQ_REQUIRE(draft->hidden == old.hidden && draft->num_layers == old.num_layers && draft->vocab == old.vocab &&
                 draft->num_kv_heads == old.num_kv_heads && draft->head_dim == old.head_dim &&
                 draft->head.n == old.head.n && draft->layers[0].attention.window == old.layers[0].attention.window,
             "the draft has another geometry than the one before");
  for (int i = 0; i < batch->config.num_slots; i++) {
    const Slot& slot = batch->slots[i];
    const int first = first_draft_keys[i];
    const int last = std::max(slot.first_draft_key, slot.num_computed + 1);
    AQ_REQUIRE(first == 0 || (slot.drafts && first >= slot.first_draft_key && first <= last),
               "first_draft_keys[%d]=%d: must be 0 or in [%d, %d]", i, first, slot.first_draft_key, last);
  }
  batch->config.draft = draft;
  for (int i = 0; i < batch->config.num_slots; i++)
    if (first_draft_keys[i] > 0) batch->slots[i].first_draft_key = batch->slots[i].draft_end = first_draft_keys[i];
  return 0;
}

int aq_add_shape(AqBatch* batch, const AqShape* source, int32_t* number) {
  AQ_TRY(check_pointer("batch", batch, alignof(AqBatch)));
  AQ_TRY(check_pointer("shape", source, alignof(AqShape)));
  AQ_TRY(check_shape(*batch, *source));
  Shape shape;
  shape.kind = source->kind, shape.depth = source->depth, shape.width = source->width,
  shape.num_nodes = source->num_nodes;
  if (shape.kind == AQ_STATIC) AQ_TRY(plan_static(&shape, *source));
  *number = (int32_t)batch->shapes.size();
  batch->shapes.push_back(std::move(shape));
  return 0;
}
