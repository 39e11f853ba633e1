// The verify stage: one target forward over trees and prompt chunks, the target's own token at every row, and the
// accepted path of each tree.
//
// At every node the target draws with noise keyed by seed and index, so that the token drawn after a given prefix is
// the same whether the prefix was drafted or not. In symbols, for node i with parent p(i): ok(i) = token(i) ==
// drawn(p(i)). Node i is accepted iff ok holds for every node of its path below the root. The kept tokens are those of
// the accepted path and the token that its deepest node drew.
#include <algorithm>

#include "batch.h"

namespace aq {

namespace {

constexpr int kRuleRows = 32;  // rows whose logits are in memory at once

void path_of(const Trees& trees, int first, int node, std::vector<int32_t>* path) {
  path->resize(trees.levels[first + node] + 1);
  for (int level = (int)path->size() - 1; level >= 0; level--)
    (*path)[level] = node, node = trees.parents[first + node];
}

// Node i of a slot is written at KV index root + i. If its level is i, as in a chain, its path is all nodes up to it
// and this is its index in the sequence. Any other node reads the keys before its root, and of the keys from the root
// on only those of its own path.
//
// What a draft with a window reads of a chunk is written where the slot holds it, as far as it is held. If the step is
// never kept this may have replaced earlier features, which the draft rows behind the whole prompt do not read.
void bind(AqBatch* batch) {
  RowBuffer& rows = batch->rows;
  const size_t wide = batch->config.fusion.fc.k;
  const Trees& trees = batch->trees;
  std::vector<int32_t> path;
  rows.clear();
  batch->feature_rows.clear();
  for (int b = 0; b < (int)batch->decodes.size(); b++) {
    const int slot = batch->decodes[b].slot, first = trees.offsets[b], root = batch->slots[slot].root();
    for (int i = 0; i < trees.size(b); i++) {
      float* own = batch->slots[slot].drafts ? batch->config.features + (first + i) * wide : nullptr;
      batch->feature_rows.push_back(own);
      if (trees.levels[first + i] == i) {
        rows.add(slot, trees.tokens[first + i], root + i, 0);
        continue;
      }
      path_of(trees, first, i, &path);
      rows.add_node(slot, trees.tokens[first + i], root, path, 0);
    }
  }
  batch->first_rows.clear();
  for (const AqChunk& chunk : batch->chunks) {
    const Slot& slot = batch->slots[chunk.slot];
    batch->first_rows.push_back(rows.num_rows());
    // The keys of the first num_hit tokens stand in cached pages: they are read and not written.
    const bool is_held = batch->held_window() > 0;
    const int first = std::max(slot.first_feature(), is_held ? chunk.end - batch->held_rows() : 0);
    for (int i = chunk.start; i < chunk.end; i++) {
      float* own = is_held ? batch->held_at(chunk.slot, i) : batch->config.features + rows.num_rows() * wide;
      batch->feature_rows.push_back(slot.drafts && i >= first ? own : nullptr);
      rows.add(chunk.slot, slot.history[i], i, 0, i >= slot.num_hit);
    }
  }
}

// A row that draws: its number in the forward, its slot, and its decode and node there (both -1: last row of a chunk).
struct Drawing {
  int row, slot, decode, node;
};

std::vector<Drawing> drawing_rows(const AqBatch& batch) {
  std::vector<Drawing> found;
  for (int b = 0; b < (int)batch.decodes.size(); b++)
    for (int i = 0; i < batch.trees.size(b); i++) found.push_back({(int)found.size(), batch.decodes[b].slot, b, i});
  for (size_t i = 0; i < batch.chunks.size(); i++) {
    const AqChunk& chunk = batch.chunks[i];
    if (chunk.draws) found.push_back({batch.first_rows[i] + chunk.end - chunk.start - 1, chunk.slot, -1, -1});
  }
  return found;
}

Before before(const AqBatch& batch, const Drawing& row) {
  const Slot& slot = batch.slots[row.slot];
  Before found{slot.history.data(), (int)slot.history.size(), {}};
  if (row.node > 0) {
    const int first = batch.trees.offsets[row.decode];
    path_of(batch.trees, first, row.node, &found.path);
    for (int32_t& node : found.path) node = batch.trees.tokens[first + node];
    found.path.erase(found.path.begin());
  }
  return found;
}

int draw_plain(AqBatch* batch, const std::vector<Drawing>& all, const std::vector<int>& which) {
  const AqBatchConfig& c = batch->config;
  std::vector<int32_t> places, tokens(which.size());
  batch->samplings.clear();
  for (const int i : which) {
    places.push_back(all[i].row);
    batch->samplings.push_back(batch->slots[all[i].slot].sampling_at(batch->rows.rows().positions[all[i].row] + 1));
  }
  AQ_TRY(aq_head_draw(c.target, c.hidden, places.data(), (int)which.size(), batch->samplings.data(), nullptr,
                      tokens.data()));
  for (size_t i = 0; i < which.size(); i++) batch->drawn[which[i]] = tokens[i];
  return 0;
}

// What the host says of the rows that draw, see aq_verify.
struct Host {
  const uint32_t* masks;
  int num_words;
  const uint8_t* edited;
  AqEdit edit;

  const uint32_t* mask(int row) const { return masks == nullptr ? nullptr : masks + (size_t)row * num_words; }
  bool edits(int row) const { return edited != nullptr && edited[row]; }
  bool changes(int row, int vocab) const { return edits(row) || (masks != nullptr && !allows_all(mask(row), vocab)); }
};

int draw_ruled(AqBatch* batch, const std::vector<Drawing>& all, const std::vector<int>& which, const Host& host) {
  const AqBatchConfig& c = batch->config;
  const int vocab = c.target->head.n;
  for (size_t begin = 0; begin < which.size(); begin += kRuleRows) {
    const int n = (int)std::min(which.size() - begin, (size_t)kRuleRows);
    int32_t places[kRuleRows], tokens[kRuleRows];
    AqSampling sampling[kRuleRows];
    for (int i = 0; i < n; i++) {
      const Drawing& row = all[which[begin + i]];
      places[i] = row.row;
      sampling[i] = batch->slots[row.slot].sampling_at(batch->rows.rows().positions[row.row] + 1);
    }
    batch->logits.resize((size_t)kRuleRows * vocab);
    AQ_TRY(aq_head_logits(c.target, c.hidden, places, n, batch->logits.data()));
    for (int i = 0; i < n; i++) {
      const int number = which[begin + i];
      float* logits = batch->logits.data() + (size_t)i * vocab;
      Rules& rules = batch->slots[all[number].slot].rules;
      if (rules.any()) rules.apply(before(*batch, all[number]), logits);
      if (host.edits(number)) host.edit(number, logits);
      if (const uint32_t* mask = host.mask(number)) apply_mask(mask, vocab, logits);
    }
    AQ_TRY(aq_draw(batch->logits.data(), n, vocab, sampling, tokens));
    for (int i = 0; i < n; i++) batch->drawn[which[begin + i]] = tokens[i];
  }
  return 0;
}

int draw(AqBatch* batch, const std::vector<Drawing>& all, const Host& host) {
  const int vocab = batch->config.target->head.n;
  std::vector<int> plain, ruled;
  for (int i = 0; i < (int)all.size(); i++)
    (host.changes(i, vocab) || batch->slots[all[i].slot].rules.any() ? ruled : plain).push_back(i);
  batch->drawn.assign(all.size(), -1);
  if (!plain.empty()) AQ_TRY(draw_plain(batch, all, plain));
  return ruled.empty() ? 0 : draw_ruled(batch, all, ruled, host);
}

// The accepted nodes of one tree, root first. One pass suffices because parents stand before their children.
void accept(const int32_t* tokens, const int32_t* parents, const int32_t* drawn, int num_nodes,
            std::vector<int32_t>* path) {
  path->assign(1, 0);
  for (int i = 1; i < num_nodes; i++) {
    const int node = path->back();
    if (parents[i] == node && tokens[i] == drawn[node]) path->push_back(i);
  }
}

void accept(AqBatch* batch, int b) {
  const Trees& trees = batch->trees;
  const int first = trees.offsets[b];
  const int32_t *tokens = trees.tokens.data() + first, *drawn = batch->drawn.data() + first;
  std::vector<int32_t>&path = batch->paths[b], &kept = batch->kept[b];
  accept(tokens, trees.parents.data() + first, drawn, trees.size(b), &path);
  kept.clear();
  for (size_t level = 1; level < path.size(); level++) kept.push_back(tokens[path[level]]);
  kept.push_back(drawn[path.back()]);
}

int verify(AqBatch* batch, const std::vector<Drawing>& all, const Host& host) {
  const AqBatchConfig& c = batch->config;
  AQ_TRY(aq_forward(c.target, c.target_kv, &batch->rows.rows(), nullptr, batch->rows.num_rows(), c.hidden,
                    batch->feature_rows.data(), &batch->num_experts));
  batch->lap(kVerifyTime);
  AQ_TRY(draw(batch, all, host));
  const size_t count = batch->decodes.size();
  batch->paths.resize(count), batch->kept.resize(count);
  for (size_t b = 0; b < count; b++) accept(batch, (int)b);
  batch->chunk_tokens.clear();
  size_t next = batch->trees.tokens.size();
  for (const AqChunk& chunk : batch->chunks) batch->chunk_tokens.push_back(chunk.draws ? batch->drawn[next++] : -2);
  batch->lap(kDrawTime);
  return 0;
}

int check_verify(const AqBatch& batch, const Host& host, int num_rows) {
  AQ_REQUIRE(batch.stage == Stage::drafted, "the step has not been drafted");
  int expected = (int)batch.trees.tokens.size();
  for (const AqChunk& chunk : batch.chunks) expected += chunk.draws;
  if (host.edited != nullptr) {
    AQ_TRY(check_pointer("edited", host.edited, sizeof(uint8_t)));
    AQ_REQUIRE(num_rows == expected && host.edit != nullptr, "edited [%d]: must be [%d], with an edit", num_rows,
               expected);
  }
  if (host.masks == nullptr) return 0;
  AQ_TRY(check_pointer("masks", host.masks, sizeof(uint32_t)));
  AQ_REQUIRE(num_rows == expected && host.num_words == (batch.config.target->head.n + 31) / 32,
             "masks [%d, %d]: must be [%d, %d]", num_rows, host.num_words, expected,
             (batch.config.target->head.n + 31) / 32);
  return 0;
}

}  // namespace
}  // namespace aq

using namespace aq;

int aq_accept(const int32_t* tokens, const int32_t* parents, const int32_t* drawn, int32_t num_nodes, int32_t* path,
              int32_t* length) {
  const struct {
    const char* name;
    const int32_t* pointer;
  } arrays[] = {
      {"tokens", tokens}, {"parents", parents}, {"drawn", drawn}, {"path", path}, {"length", length},
  };
  for (const auto& array : arrays) AQ_TRY(check_pointer(array.name, array.pointer, sizeof(int32_t)));
  Trees trees;
  trees.offsets = {0, num_nodes}, trees.tokens.assign(tokens, tokens + num_nodes),
  trees.parents.assign(parents, parents + num_nodes);
  AQ_TRY(finish_trees(&trees));
  std::vector<int32_t> found;
  accept(tokens, parents, drawn, num_nodes, &found);
  std::copy(found.begin(), found.end(), path);
  *length = (int32_t)found.size();
  return 0;
}

int aq_read_features(AqBatch* batch, int32_t num_rows, float* out) {
  AQ_TRY(check_pointer("batch", batch, alignof(AqBatch)));
  AQ_TRY(check_pointer("out", out, sizeof(float)));
  const size_t wide = batch->config.fusion.fc.k, count = batch->feature_rows.size();
  AQ_REQUIRE(num_rows >= 0 && num_rows <= (int)count, "num_rows=%d: the last step had %zu", num_rows, count);
  for (int r = 0; r < num_rows; r++) {
    AQ_REQUIRE(batch->feature_rows[r] != nullptr, "row %d: has no features, the draft reads none", r);
    std::copy_n(batch->feature_rows[r], wide, out + r * wide);
  }
  return 0;
}

int aq_verify(AqBatch* batch, const uint32_t* masks, int32_t num_rows, int32_t num_words, const uint8_t* edited,
              AqEdit edit) {
  AQ_TRY(check_pointer("batch", batch, alignof(AqBatch)));
  const Host host{masks, num_words, edited, edit};
  AQ_TRY(check_verify(*batch, host, num_rows));
  batch->lapped = seconds();
  bind(batch);
  const std::vector<Drawing> all = drawing_rows(*batch);
  batch->lap(kRowsTime);
  if (verify(batch, all, host) != 0) return -2;
  batch->stage = Stage::verified;
  return 0;
}
