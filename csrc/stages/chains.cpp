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
  if (guess.runner_up >= 0 && tree->chance * cut.seconds[guess.margin] >= cut.least_node)
    tree->leaves.push_back(guess.runner_up), tree->leaf_parents.push_back(level);
  tree->chance *= cut.chances[guess.margin];
  if (!(tree->chance >= cut.least_node)) return;
  tree->tokens.push_back(guess.token);
  if (level + 1 == tree->shape->depth || !(tree->chance >= cut.least_pass)) return;
  next->rows->add(tree->slot, guess.token, tree->base + level, batch->slots[tree->slot].first_draft_key);
  next->expect(tree, source);
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
