// A tree while it grows, level by level (grow.cpp): what is known of it, what the head answers, and the next pass.
#pragma once
#include <vector>

#include "batch.h"

namespace aq {

// One slot's tree while it grows. Tokens and parents are those of nodes in a chain or a static tree, and those of
// candidates in a dynamic tree, where a parent is a candidate (-1: the root) and scores are cumulative
// log-probabilities. sources: the rows of the last pass whose children are chosen next. base: the KV index behind the
// root's, where the tree's own draft rows begin. cut: what ends a chain by confidence, or NULL. Such a chain has only
// the nodes that may be verified; chances: that each of them is accepted; leaves: runners-up, with their parents and
// chances.
struct Growing {
  const Shape* shape;
  const AqCut* cut;
  int decode, slot, base;
  std::vector<int32_t> tokens, parents, sources, beam, leaves, leaf_parents;
  std::vector<float> scores, chances, leaf_chances;
  std::vector<std::vector<int32_t>> beam_paths;
  std::vector<uint8_t> keeps_leaf;
  int level_begin = 0, num_rows = 0, num_kept = 0;

  Growing(const Shape* own, const AqCut* own_cut, int b, int number, int root)
      : shape(own), cut(own_cut), decode(b), slot(number), base(root + 1) {
    if (cut != nullptr) tokens.resize(1), chances.assign(1, 1.0f);
    else if (shape->kind != AQ_DYNAMIC) tokens.resize(shape->num_nodes), parents = shape->parents;
  }
};

// What the head answered: the k best children of each source row, or with k = 1 the child drawn. runners_up and margins
// are there if the child was drawn and any chain has a cut.
struct Children {
  const int32_t* ids;
  const float* logprobs;
  const int32_t* runners_up;
  const float* margins;
  int k;
};

// Rows of the next pass, and the rows of this one whose states they start from.
struct NextPass {
  RowBuffer* rows;
  std::vector<int32_t> states;

  // The row just added starts from the state of row `source`, and its children are chosen next.
  void expect(Growing* tree, int source) {
    states.push_back(source);
    tree->sources.push_back(rows->num_rows() - 1);
  }
};

// chains.cpp
void grow_chain(const AqBatch& batch, Growing* tree, int level, const Children& children, NextPass* next);
void grow_cut_chain(AqBatch* batch, Growing* tree, int level, const Children& children, NextPass* next);
void choose_cut_nodes(const Message& message, std::vector<Growing>* trees);
void finish_cut_chain(Growing* tree, const int32_t* copied, int num_copied);

}  // namespace aq
