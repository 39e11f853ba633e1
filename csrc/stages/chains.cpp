// Chains: one drafted token a level. A chain with a cut ends where the draft is unsure, and second choices stand beside
// it as leaves; spec/confidence.py says when. The host's copy of earlier text may stand in the same tree.
#include <algorithm>

#include "growing.h"

namespace aq {

void grow_chain(const AqBatch& batch, Growing* tree, int level, const Children& children, NextPass* next) {
  const int source = tree->sources[0], token = tree->tokens[level + 1] = children.ids[0];
  tree->sources.clear();
  if (level + 1 == tree->shape->depth) return;
  next->rows->add(tree->slot, token, tree->base + level, batch.slots[tree->slot].first_draft_key);
  next->expect(tree, source);
}

namespace {

// The bounds are MARGIN_BOUNDS of spec/confidence.py. A NaN, the margin of two infinite scores, is in the first bucket.
int bucket_of(float margin) {
  int bucket = 0;
  for (float bound = 0.125f; bucket < AQ_MARGINS - 1 && margin >= bound; bound *= 2.0f) bucket++;
  return bucket;
}

}  // namespace

void grow_cut_chain(AqBatch* batch, Growing* tree, int level, const Children& children, NextPass* next) {
  const AqCut& cut = *tree->cut;
  const Guess guess{children.ids[0], children.runners_up[0], bucket_of(children.margins[0])};
  batch->guesses[tree->decode].push_back(guess);
  const int source = tree->sources[0];
  tree->sources.clear();
  const float second = tree->chances.back() * cut.seconds[guess.margin];
  if (guess.runner_up >= 0 && second >= cut.least_node)
    tree->leaves.push_back(guess.runner_up), tree->leaf_parents.push_back(level), tree->leaf_chances.push_back(second);
  const float chance = tree->chances.back() * cut.chances[guess.margin];
  if (!(chance >= cut.least_node)) return;
  tree->tokens.push_back(guess.token), tree->chances.push_back(chance);
  if (level + 1 == tree->shape->depth || !(chance >= cut.least_pass)) return;
  next->rows->add(tree->slot, guess.token, tree->base + level, batch->slots[tree->slot].first_draft_key);
  next->expect(tree, source);
}

namespace {

// A node that a cut let through. leaf: its number among the leaves of its tree, unless it is one of the chain.
struct Candidate {
  float chance;
  int tree, leaf;
  bool is_leaf;
};

// Those of all trees, parents before children and likelier ones before others.
std::vector<Candidate> candidates_of(const std::vector<Growing>& trees) {
  std::vector<Candidate> found;
  for (int t = 0; t < (int)trees.size(); t++) {
    const Growing& tree = trees[t];
    for (int level = 1, leaf = 0; tree.cut != nullptr && level <= (int)tree.chances.size(); level++) {
      if (level < (int)tree.chances.size()) found.push_back({tree.chances[level], t, 0, false});
      if (leaf < (int)tree.leaves.size() && tree.leaf_parents[leaf] + 1 == level)
        found.push_back({tree.leaf_chances[leaf], t, leaf, true}), leaf++;
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Candidate& a, const Candidate& b) { return a.chance > b.chance; });
  return found;
}

}  // namespace

// No node is likelier than its parent, so a tree keeps a node's parent whenever it keeps the node.
void choose_cut_nodes(const Message& message, std::vector<Growing>* trees) {
  if (message.num_row_costs == 0) return;
  const std::vector<Candidate> candidates = candidates_of(*trees);
  int num_copied = 0, count = 0;
  for (int b = 0; b < message.num_decodes; b++) num_copied += std::max(message.decodes[b].num_proposed, 0);
  double expected = 0.0, most = 0.0;
  for (int n = 1; n <= (int)candidates.size() && num_copied + n < message.num_row_costs; n++) {
    expected += candidates[n - 1].chance;
    const double worth = expected - ((double)message.row_costs[num_copied + n] - message.row_costs[num_copied]);
    if (worth > most) most = worth, count = n;
  }
  for (Growing& tree : *trees)
    if (tree.cut != nullptr) tree.num_kept = 1, tree.keeps_leaf.assign(tree.leaves.size(), 0);
  for (int n = 0; n < count; n++) {
    Growing& tree = (*trees)[candidates[n].tree];
    if (candidates[n].is_leaf) tree.keeps_leaf[candidates[n].leaf] = 1;
    else tree.num_kept++;
  }
  for (Growing& tree : *trees) {
    if (tree.cut == nullptr) continue;
    tree.tokens.resize(tree.num_kept);
    int num_leaves = 0;
    for (int i = 0; i < (int)tree.leaves.size(); i++) {
      if (!tree.keeps_leaf[i]) continue;
      tree.leaves[num_leaves] = tree.leaves[i], tree.leaf_parents[num_leaves++] = tree.leaf_parents[i];
    }
    tree.leaves.resize(num_leaves), tree.leaf_parents.resize(num_leaves);
  }
}

// The leaves stand behind the chain's nodes, so that those are verified and kept as a chain's are: their keys stand in
// place. Only the key of an accepted leaf has to move. A copied token that stands below its parent already is that
// node; the others follow behind the leaves.
void finish_cut_chain(Growing* tree, const int32_t* copied, int num_copied) {
  std::vector<int32_t>&tokens = tree->tokens, &parents = tree->parents;
  for (int i = 0; i < (int)tokens.size(); i++) parents.push_back(std::max(i - 1, 0));
  tokens.insert(tokens.end(), tree->leaves.begin(), tree->leaves.end());
  parents.insert(parents.end(), tree->leaf_parents.begin(), tree->leaf_parents.end());
  for (int i = 0, parent = 0; i < num_copied; i++) {
    int node = parent + 1;
    while (node < (int)tokens.size() && (parents[node] != parent || tokens[node] != copied[i])) node++;
    if (node == (int)tokens.size()) tokens.push_back(copied[i]), parents.push_back(parent);
    parent = node;
  }
}

}  // namespace aq
