// Whole decode cycles in one call: draft chains, verify, draw, accept, keep. Nothing here that the single calls would
// not do; it spares the caller a dozen round trips, which for a small model cost as much as its draft.
#include <string.h>

#include <algorithm>
#include <vector>

#include "aquiline.h"
#include "check.h"
#include "kernels/kernels.h"

namespace {

using namespace aq;

// The rows of one forward, being filled: those of AqRows are static buffers of the caller's.
class Writer {
 public:
  Writer(const AqRows& rows, const AqSlots& state, int max_rows) : rows_(rows), state_(state), max_rows_(max_rows) {
    rows_.num_rows = 0;
  }

  // A row that sees KV indices [key_start, write], itself last.
  int add(int slot, int token, int position, int write, int key_start) {
    const int r = rows_.num_rows;
    AQ_REQUIRE(r < max_rows_, "more than max_rows=%d rows", max_rows_);
    set(rows_.slots, slot), set(rows_.tokens, token), set(rows_.positions, position), set(rows_.write, write);
    set(rows_.key_start, key_start), set(rows_.context_len, write + 1), set(rows_.tail_len, 0);
    rows_.num_rows++;
    return 0;
  }

  // A draft's row j stands at KV index j + 1 (ARCHITECTURE.md, "Decisions").
  int add_draft(int slot, int token, int position) {
    return add(slot, token, position, position + 1, state_.first_draft_key[slot]);
  }

  const AqRows& rows() const { return rows_; }

 private:
  void set(const int32_t* column, int value) { const_cast<int32_t*>(column)[rows_.num_rows] = value; }

  AqRows rows_;
  const AqSlots& state_;
  const int max_rows_;
};

int check_rows_buffers(const char* name, const AqRows* rows) {
  AQ_TRY(check_pointer(name, rows, alignof(AqRows)));
  const int32_t* columns[] = {rows->tokens,    rows->positions,   rows->slots,    rows->write,
                              rows->key_start, rows->context_len, rows->tail_len, rows->page_table};
  for (const int32_t* column : columns) AQ_TRY(check_pointer(name, column, sizeof(int32_t)));
  return 0;
}

int check_cycle(const AqCycle& c, const int32_t* slots, int n, int depth) {
  const AqSlots& state = c.slots;
  AQ_REQUIRE(n >= 1, "n=%d: must be at least 1", n);
  AQ_REQUIRE(depth >= 0 && (depth == 0 || c.draft != nullptr), "depth=%d: must be at least 0, and 0 without a draft",
             depth);
  AQ_REQUIRE((int64_t)n * (depth + 1) <= c.max_rows, "n=%d, depth=%d: there is room for %d rows", n, depth, c.max_rows);
  AQ_TRY(check_model(c.target));
  AQ_TRY(check_kv(c.target_kv, 0, 0));
  AQ_TRY(check_rows_buffers("rows", c.rows));
  AQ_TRY(check_pointer("hidden", c.hidden, sizeof(float)));
  const int32_t* columns[] = {slots, state.tokens, state.positions};
  for (const int32_t* column : columns) AQ_TRY(check_pointer("slots", column, sizeof(int32_t)));
  AQ_TRY(check_pointer("slots.settings", state.settings, alignof(AqSampling)));
  if (c.draft != nullptr) {
    AQ_TRY(check_model(c.draft));
    AQ_TRY(check_rows_buffers("draft_rows", c.draft_rows));
    AQ_TRY(check_pointer("features", c.features, sizeof(float)));
    AQ_TRY(check_pointer("draft_hidden", c.draft_hidden, sizeof(float)));
    AQ_TRY(check_pointer("d2t", c.d2t, sizeof(int32_t)));
    const int32_t* drafted[] = {state.first_draft_key, state.num_carried, state.carried_tokens};
    for (const int32_t* column : drafted) AQ_TRY(check_pointer("slots", column, sizeof(int32_t)));
    AQ_TRY(check_pointer("slots.carried", state.carried, sizeof(float)));
    AQ_TRY(check_pointer("slots.page_features", state.page_features, sizeof(float)));
    AQ_REQUIRE(state.width == c.target->num_capture * c.target->hidden, "slots.width=%d: must be %d", state.width,
               c.target->num_capture * c.target->hidden);
    AQ_REQUIRE(depth < state.max_carry, "depth=%d: must be below max_carry=%d", depth, state.max_carry);
  }
  for (int b = 0; b < n; b++) {
    const int slot = slots[b];
    AQ_REQUIRE(slot >= 0 && slot < state.num_slots && slot < c.rows->num_slots, "slots[%d]=%d: must be in [0, %d)", b,
               slot, state.num_slots);
    AQ_REQUIRE(state.positions[slot] >= 0, "positions[%d]=%d: must be at least 0", slot, state.positions[slot]);
    if (depth > 0)
      AQ_REQUIRE(state.num_carried[slot] >= 1 && state.num_carried[slot] <= state.max_carry,
                 "num_carried[%d]=%d: must be in [1, %d]", slot, state.num_carried[slot], state.max_carry);
  }
  return 0;
}

// What the next pass reads of the last one: its rows, normed where the draft feeds back normed states.
int take_states(const AqCycle& c, const std::vector<int32_t>& source, float* g) {
  const int width = c.draft->hidden, n = (int)source.size();
  for (int i = 0; i < n; i++)
    memcpy(g + (size_t)i * width, c.draft_hidden + (size_t)source[i] * width, width * sizeof(float));
  return c.norm_feedback ? aq_rms_norm(g, c.draft->final_norm, n, width, c.draft->eps, g) : 0;
}

// How the token after each of a slot's rows is drawn: at position root + 1 for the root.
AqSampling sampling_of(const AqSlots& state, int slot, int level) {
  AqSampling sampling = state.settings[slot];
  sampling.position = state.positions[slot] + level + 1;
  return sampling;
}

// The extend pass over what the slots carry, then chains below their roots: each token drawn as the target draws it,
// from the draft's logits. drafted [n, depth].
int draft(const AqCycle& c, const int32_t* slots, int n, int depth, int32_t* drafted, int32_t* num_rows) {
  const AqSlots& state = c.slots;
  Writer extend(*c.draft_rows, state, c.max_rows);
  std::vector<float> features, g;
  std::vector<int32_t> source(n), drawn(n);
  std::vector<AqSampling> sampling(n);
  for (int b = 0; b < n; b++) {
    const int slot = slots[b], count = state.num_carried[slot];
    const size_t first = (size_t)slot * state.max_carry;
    for (int j = 0; j < count; j++)
      AQ_TRY(extend.add_draft(slot, state.carried_tokens[first + j], state.positions[slot] - count + j));
    const float* carried = state.carried + first * state.width;
    features.insert(features.end(), carried, carried + (size_t)count * state.width);
    source[b] = extend.rows().num_rows - 1;
  }
  const int num_extended = extend.rows().num_rows;
  *num_rows = num_extended + n * (depth - 1);
  g.resize((size_t)num_extended * c.draft->hidden);
  AQ_TRY(aq_fuse(&c.fusion, features.data(), num_extended, g.data()));
  AQ_TRY(aq_forward(c.draft, c.draft_kv, &extend.rows(), g.data(), c.draft_hidden, nullptr));
  for (int level = 0; level < depth; level++) {
    for (int b = 0; b < n; b++) sampling[b] = sampling_of(state, slots[b], level);
    AQ_TRY(aq_head_draw(c.draft, c.draft_hidden, source.data(), n, sampling.data(), c.d2t, drawn.data()));
    Writer pass(*c.draft_rows, state, c.max_rows);
    for (int b = 0; b < n; b++) {
      const int token = drawn[b] < 0 ? c.d2t[0] : drawn[b];  // of a row that holds no numbers: any token is as good
      drafted[(size_t)b * depth + level] = token;
      AQ_TRY(pass.add_draft(slots[b], token, state.positions[slots[b]] + level));
    }
    if (level + 1 == depth) break;
    AQ_TRY(take_states(c, source, g.data()));
    AQ_TRY(aq_forward(c.draft, c.draft_kv, &pass.rows(), g.data(), c.draft_hidden, nullptr));
    for (int b = 0; b < n; b++) source[b] = b;
  }
  return 0;
}

// Keeps what the next cycle reads: the features of the accepted path, root included, beside the tokens that follow
// them, and the new root. chain: the tokens of root and drafts.
void keep(const AqCycle& c, int slot, const float* features, const int32_t* chain, int num_accepted, int bonus) {
  const AqSlots& state = c.slots;
  const int root = state.positions[slot], page_size = c.target_kv->page_size;
  if (c.draft != nullptr) {
    const size_t first = (size_t)slot * state.max_carry, row_bytes = (size_t)state.width * sizeof(float);
    memcpy(state.carried + first * state.width, features, (num_accepted + 1) * row_bytes);
    memcpy(state.carried_tokens + first, chain + 1, num_accepted * sizeof(int32_t));
    state.carried_tokens[first + num_accepted] = bonus;
    state.num_carried[slot] = num_accepted + 1;
    const int32_t* table = c.rows->page_table + (size_t)slot * c.rows->table_stride;
    for (int level = 0; level <= num_accepted; level++)
      if ((root + level) % page_size == page_size - 1)
        memcpy(state.page_features + (size_t)table[(root + level) / page_size] * state.width,
               features + (size_t)level * state.width, row_bytes);
  }
  state.tokens[slot] = bonus < 0 ? 0 : bonus;
  state.positions[slot] = root + num_accepted + 1;
}

// Tells the caller what each stage took.
class Laps {
 public:
  explicit Laps(double* stages) : stages_(stages), last_(seconds()) {}
  void lap(int stage) {
    const double now = seconds();
    stages_[stage] = now - last_, last_ = now;
  }

 private:
  double* stages_;
  double last_;
};

}  // namespace

int aq_cycle(const AqCycle* cycle, const int32_t* slots, int32_t n, int32_t depth, int32_t* out, double* stages) {
  AQ_TRY(check_pointer("cycle", cycle, alignof(AqCycle)));
  AQ_TRY(check_pointer("out", out, sizeof(int32_t)));
  AQ_TRY(check_pointer("stages", stages, sizeof(double)));
  const AqCycle& c = *cycle;
  AQ_TRY(check_cycle(c, slots, n, depth));
  const AqSlots& state = c.slots;
  const int width = depth + 1, num_rows = n * width;
  const auto found = [&](int b) { return out + 1 + (size_t)b * (3 + width); };  // root, num_accepted, bonus, tokens
  Laps laps(stages);

  std::vector<int32_t> drafted((size_t)n * depth), drawn(num_rows), places(num_rows);
  out[0] = 0;
  if (depth > 0) AQ_TRY(draft(c, slots, n, depth, drafted.data(), &out[0]));
  laps.lap(0);

  Writer verify(*c.rows, state, c.max_rows);
  std::vector<AqSampling> sampling(num_rows);
  for (int b = 0; b < n; b++) {
    const int slot = slots[b], root = found(b)[0] = state.positions[slot];
    int32_t* chain = found(b) + 3;
    chain[0] = state.tokens[slot];
    std::copy_n(drafted.begin() + (ptrdiff_t)b * depth, depth, chain + 1);
    for (int level = 0; level < width; level++) {
      const int i = b * width + level, position = root + level;
      AQ_TRY(verify.add(slot, chain[level], position, position, 0));
      places[i] = i, sampling[i] = sampling_of(state, slot, level);
    }
  }
  laps.lap(1);
  AQ_TRY(aq_forward(c.target, c.target_kv, &verify.rows(), nullptr, c.hidden, c.features));
  laps.lap(2);

  AQ_TRY(aq_head_draw(c.target, c.hidden, places.data(), num_rows, sampling.data(), nullptr, drawn.data()));
  for (int b = 0; b < n; b++) {
    const int32_t *chain = found(b) + 3, *own = drawn.data() + b * width;
    int accepted = 0;
    while (accepted < depth && chain[accepted + 1] == own[accepted]) accepted++;
    found(b)[1] = accepted, found(b)[2] = own[accepted];
  }
  laps.lap(3);

  for (int b = 0; b < n; b++)
    keep(c, slots[b], c.features + (size_t)b * width * state.width, found(b) + 3, found(b)[1], found(b)[2]);
  laps.lap(4);
  return 0;
}
