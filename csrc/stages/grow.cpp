// Trees grow level by level: one pass of the draft per level for all slots together, whatever their shapes. The keys
// that the draft writes behind a root are valid for this step only.
//
// Children are chosen by the draft's logits in the way the target draws by its own: logits / temperature, plus the same
// noise. The nearer the two distributions, the more often both prefer the same token: at least (1 - TV) / (1 + TV) of
// the time, where TV is their total variation distance. Source: Daliri, Musco and Suresh, arXiv 2408.07978. A chain
// draws its tokens, with top-k, top-p and min-p applied; other trees rank tokens without these filters.
#include <string.h>

#include <algorithm>

#include "growing.h"

namespace aq {

namespace {

void grow_static(const AqBatch& batch, Growing* tree, int level, const Children& children, NextPass* next) {
  const Shape& shape = *tree->shape;
  const std::vector<int32_t> sources = std::move(tree->sources);
  tree->sources.clear();
  for (int node = 1; node < shape.num_nodes; node++) {
    if (shape.levels[node] != level + 1) continue;
    const int row = shape.parent_rows[node];
    const int token = tree->tokens[node] = children.ids[(size_t)row * children.k + shape.ranks[node]];
    if (!shape.is_inner[node]) continue;
    next->rows->add_node(tree->slot, token, tree->base, shape.paths[node], batch.slots[tree->slot].first_draft_key);
    next->expect(tree, sources[row]);
  }
}

// Places of the `count` best scores in stable descending order; NaN comes last.
std::vector<int32_t> best_first(const float* scores, int size, int count) {
  std::vector<int32_t> places(size);
  for (int i = 0; i < size; i++) places[i] = i;
  std::stable_sort(places.begin(), places.end(), [scores](int a, int b) {
    return scores[a] > scores[b] || (scores[a] == scores[a] && scores[b] != scores[b]);
  });
  places.resize(count);
  return places;
}

// EAGLE-2: the children of the beam join the candidates, and the best of them are the next beam. Source: Li et al.,
// arXiv 2406.16858.
void grow_dynamic(const AqBatch& batch, Growing* tree, int level, const Children& children, NextPass* next) {
  const int k = tree->shape->width, begin = (int)tree->tokens.size(), num_sources = (int)tree->sources.size();
  for (int i = 0; i < num_sources; i++)
    for (int j = 0; j < k; j++) {
      const float logprob = children.logprobs[(size_t)i * children.k + j];
      const int parent = level == 0 ? -1 : tree->level_begin + tree->beam[i];
      tree->tokens.push_back(children.ids[(size_t)i * children.k + j]);
      tree->parents.push_back(parent);
      tree->scores.push_back(level == 0 ? logprob : tree->scores[parent] + (logprob > 0.0f ? 0.0f : logprob));
    }
  tree->level_begin = begin;
  const std::vector<int32_t> sources = std::move(tree->sources);
  tree->sources.clear();
  if (level == tree->shape->depth) return;
  tree->beam = best_first(tree->scores.data() + begin, num_sources * k, k);
  if (level == 0)
    for (int i = 0; i < k; i++) tree->beam[i] = i;
  std::vector<std::vector<int32_t>> paths;
  for (const int place : tree->beam) {
    paths.push_back(level == 0 ? std::vector<int32_t>() : tree->beam_paths[place / k]);
    paths.back().push_back(tree->num_rows++);
    next->rows->add_node(tree->slot, tree->tokens[begin + place], tree->base, paths.back(),
                         batch.slots[tree->slot].first_draft_key);
    next->expect(tree, sources[place / k]);
  }
  tree->beam_paths = std::move(paths);
}

// The best num_nodes - 1 candidates in the order they were found, and the node numbers of their parents. A parent
// scores no less than its child and stands before it, so it is chosen whenever the child is.
std::vector<int32_t> choose_nodes(const float* scores, const int32_t* parents, int count, int num_nodes,
                                  std::vector<int32_t>* node_parents) {
  std::vector<int32_t> chosen = best_first(scores, count, num_nodes - 1), number(count, 0);
  std::sort(chosen.begin(), chosen.end());
  node_parents->assign(num_nodes, 0);
  for (int i = 1; i < num_nodes; i++) {
    const int parent = parents[chosen[i - 1]];
    number[chosen[i - 1]] = i;
    (*node_parents)[i] = parent < 0 ? 0 : number[parent];
  }
  return chosen;
}

void select(Growing* tree) {
  std::vector<int32_t> parents, tokens(1, 0);
  const std::vector<int32_t> chosen = choose_nodes(tree->scores.data(), tree->parents.data(), (int)tree->scores.size(),
                                                   tree->shape->num_nodes, &parents);
  for (const int candidate : chosen) tokens.push_back(tree->tokens[candidate]);
  tree->tokens = std::move(tokens), tree->parents = std::move(parents);
}

// Asks the head for the children of the trees that draw (chains) or rank (all others).
int choose(AqBatch* batch, const std::vector<Growing*>& trees, int level, bool draws, std::vector<int32_t>* places,
           int* k) {
  const AqBatchConfig& c = batch->config;
  bool has_cut = false;
  batch->samplings.clear(), places->clear(), *k = 1;
  for (const Growing* tree : trees) {
    has_cut |= tree->cut != nullptr;
    for (const int source : tree->sources) {
      places->push_back(source);
      batch->samplings.push_back(batch->slots[tree->slot].sampling_at(tree->base + level));
      *k = std::max(*k, tree->shape->width);
    }
  }
  const int n = (int)places->size();
  for (auto* column : {&batch->ids, &batch->runners_up}) column->resize((size_t)n * *k);
  for (auto* column : {&batch->logprobs, &batch->margins}) column->resize((size_t)n * *k);
  if (!draws)
    return aq_head_topk(c.draft, c.draft_hidden, places->data(), n, *k, batch->samplings.data(), c.d2t,
                        batch->ids.data(), batch->logprobs.data());
  const AqSampling* samplings = batch->samplings.data();
  int32_t* const tokens = batch->ids.data();
  if (has_cut)
    AQ_TRY(aq_head_guess(c.draft, c.draft_hidden, places->data(), n, samplings, c.d2t, tokens, batch->runners_up.data(),
                         batch->margins.data()));
  else AQ_TRY(aq_head_draw(c.draft, c.draft_hidden, places->data(), n, samplings, c.d2t, tokens));
  for (int i = 0; i < n; i++)
    if (batch->ids[i] < 0) batch->ids[i] = c.d2t[0];  // a row whose logits are not numbers: any token will do
  return 0;
}

// Copies the states of the last pass that the next one starts from, and norms them where the draft feeds back normed
// states.
int take_states(AqBatch* batch, const std::vector<int32_t>& sources) {
  const AqBatchConfig& c = batch->config;
  const size_t width = c.draft->hidden;
  batch->g.resize(std::max(batch->g.size(), sources.size() * width));
  for (size_t i = 0; i < sources.size(); i++)
    memcpy(batch->g.data() + i * width, c.draft_hidden + sources[i] * width, width * sizeof(float));
  if (!c.norm_feedback) return 0;
  return aq_rms_norm(batch->g.data(), c.draft->final_norm, (int)sources.size(), (int)width, c.draft->eps,
                     batch->g.data());
}

// Grows level after level until no tree has rows to run.
int grow_levels(AqBatch* batch, std::vector<Growing>* trees) {
  NextPass next{&batch->draft_rows, {}};
  std::vector<int32_t> places;
  std::vector<Growing*> who;
  for (int level = 0;; level++) {
    next.rows->clear(), next.states.clear();
    for (const bool draws : {true, false}) {
      who.clear();
      for (Growing& tree : *trees)
        if ((tree.shape->kind == AQ_CHAIN) == draws && !tree.sources.empty()) who.push_back(&tree);
      if (who.empty()) continue;
      int k = 1;
      AQ_TRY(choose(batch, who, level, draws, &places, &k));
      Children children{batch->ids.data(), batch->logprobs.data(), batch->runners_up.data(), batch->margins.data(), k};
      for (Growing* tree : who) {
        const size_t count = tree->sources.size() * k;
        const auto grow_one = draws ? grow_chain : tree->shape->kind == AQ_STATIC ? grow_static : grow_dynamic;
        if (tree->cut != nullptr) grow_cut_chain(batch, tree, level, children, &next);
        else grow_one(*batch, tree, level, children, &next);
        children.ids += count, children.logprobs += count;
        children.runners_up += count, children.margins += count;
      }
    }
    if (next.states.empty()) return 0;
    AQ_TRY(take_states(batch, next.states));
    batch->num_draft_rows += next.rows->num_rows();
    AQ_TRY(aq_forward(batch->config.draft, batch->config.draft_kv, &next.rows->rows(), batch->g.data(),
                      next.rows->num_rows(), batch->config.draft_hidden, nullptr, nullptr));
  }
}

void add_tree(Trees* trees, int root, const int32_t* tokens, const int32_t* parents, int count) {
  const int first = trees->offsets.back();
  trees->tokens.push_back(root), trees->parents.push_back(0);
  trees->tokens.insert(trees->tokens.end(), tokens, tokens + count);
  for (int i = 0; i < count; i++) trees->parents.push_back(parents == nullptr ? i : parents[i]);
  trees->offsets.push_back(first + 1 + count);
}

}  // namespace

int finish_trees(Trees* trees) {
  trees->levels.assign(trees->tokens.size(), 0);
  for (size_t b = 0; b + 1 < trees->offsets.size(); b++) {
    const int first = trees->offsets[b];
    for (int i = 1; i < trees->size((int)b); i++) {
      const int parent = trees->parents[first + i];
      AQ_REQUIRE(parent >= 0 && parent < i, "parents[%d]=%d: must be in [0, %d)", first + i, parent, i);
      trees->levels[first + i] = trees->levels[first + parent] + 1;
      AQ_REQUIRE(trees->levels[first + i] <= AQ_MAX_DEPTH, "node %d stands on level %d: trees end at %d", first + i,
                 trees->levels[first + i], AQ_MAX_DEPTH);
    }
  }
  return 0;
}

int grow(AqBatch* batch, const Message& message) {
  std::vector<Growing> growing;
  std::vector<Span> spans;
  batch->guesses.resize(batch->decodes.size());
  for (std::vector<Guess>& guesses : batch->guesses) guesses.clear();
  for (int b = 0; b < (int)batch->decodes.size(); b++) {
    const AqDecode& decode = batch->decodes[b];
    if (decode.shape < 0 || (decode.num_proposed >= 0 && !decode.has_cut)) continue;
    const Slot& slot = batch->slots[decode.slot];
    // The row right before the root runs even if its key exists already: the first children are chosen from its state.
    // If the slot's first draft key stands behind its root, there is no such row and the slot cannot draft yet.
    const int begin = std::min(slot.draft_end, slot.root()) - 1;
    if (slot.first_draft_key > slot.root()) continue;
    spans.push_back({decode.slot, begin, slot.root()});
    growing.emplace_back(&batch->shapes[decode.shape], message.cuts[b], b, decode.slot, slot.root());
  }
  std::vector<int32_t> last;
  AQ_TRY(extend(batch, spans, &last));
  for (size_t i = 0; i < growing.size(); i++) growing[i].sources.assign(1, last[i]);
  AQ_TRY(grow_levels(batch, &growing));
  choose_cut_nodes(message, &growing);
  Trees& trees = batch->trees;
  trees.clear();
  size_t grown = 0;
  for (int b = 0; b < (int)batch->decodes.size(); b++) {
    const int root = batch->slots[batch->decodes[b].slot].history.back(), count = batch->decodes[b].num_proposed;
    if (grown < growing.size() && growing[grown].decode == b) {
      Growing& tree = growing[grown++];
      if (tree.shape->kind == AQ_DYNAMIC) select(&tree);
      if (tree.cut != nullptr) finish_cut_chain(&tree, message.proposals[b], count);
      add_tree(&trees, root, tree.tokens.data() + 1, tree.parents.empty() ? nullptr : tree.parents.data() + 1,
               (int)tree.tokens.size() - 1);
    } else {
      const int32_t* proposal = message.proposals[b];
      add_tree(&trees, root, proposal, count < 0 ? nullptr : proposal + count, std::max(count, 0));
    }
  }
  return finish_trees(&trees);
}

}  // namespace aq

int aq_select(const float* scores, const int32_t* parents, int32_t count, int32_t num_nodes, int32_t* chosen,
              int32_t* node_parents) {
  using namespace aq;
  AQ_TRY(check_pointer("scores", scores, sizeof(float)));
  AQ_TRY(check_pointer("parents", parents, sizeof(int32_t)));
  AQ_TRY(check_pointer("chosen", chosen, sizeof(int32_t)));
  AQ_TRY(check_pointer("node_parents", node_parents, sizeof(int32_t)));
  AQ_REQUIRE(num_nodes >= 1 && num_nodes <= count + 1, "num_nodes=%d: must be in [1, %d]", num_nodes, count + 1);
  for (int i = 0; i < count; i++)
    AQ_REQUIRE(parents[i] >= -1 && parents[i] < i, "parents[%d]=%d: must be in [-1, %d)", i, parents[i], i);
  std::vector<int32_t> found;
  const std::vector<int32_t> best = choose_nodes(scores, parents, count, num_nodes, &found);
  std::copy(best.begin(), best.end(), chosen);
  std::copy(found.begin(), found.end(), node_parents);
  return 0;
}
