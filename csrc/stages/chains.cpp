// Chains: one drafted token a level. A chain with a cut ends where the draft is unsure, and second choices stand beside
// it as leaves; spec/confidence.py says when.
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
// place. Only the key of an accepted leaf has to move.
void finish_cut_chain(Growing* tree) {
  for (int i = 0; i < (int)tree->tokens.size(); i++) tree->parents.push_back(std::max(i - 1, 0));
  tree->tokens.insert(tree->tokens.end(), tree->leaves.begin(), tree->leaves.end());
  tree->parents.insert(tree->parents.end(), tree->leaf_parents.begin(), tree->leaf_parents.end());
}

}  // namespace aq
