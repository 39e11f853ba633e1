// The C interface of a running batch: a step as three stages (draft, verify, keep) and as one call. The structs of
// aquiline.h apply; backends/cpu/native.py mirrors these.
//
// A batch keeps what a later step needs of its slots: every token known so far, how far keys and draft keys reach, how
// tokens are drawn, and what changes their logits. Models, keys and buffers are the caller's and must outlive it. A
// stage returns 0, -1 where it refuses its input, which then has changed nothing, or -2 where it failed inside: slots
// stay as they were before the step but for the admissions and pages that the step brought. aq_last_error() says why.
//
// A token's index is its place in its sequence, prompt and output together. The root of a slot that decodes is its last
// known token; its keys are not written yet. Draft row j pairs the target's feature of token j with token j + 1, at KV
// index j + 1.
#pragma once
#include "api/aquiline.h"

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

enum { AQ_MAX_NODES = 256, AQ_MAX_DEPTH = 32 };  // of one slot's tree, the root included; its deepest level

typedef struct AqBatch AqBatch;

// hidden [max_rows, H], features [max_rows, num_capture * H] (NULL: no capture) and draft_hidden [max_rows, Hd] receive
// what the last forward left. fused [num_pages, page_size, Hd]: the draft's input made of the target's feature at each
// KV index. Without a draft the last four pointers and those of the draft are NULL.
typedef struct {
  const AqModel *target, *draft;
  const AqKV *target_kv, *draft_kv;
  float *hidden, *features, *draft_hidden, *fused;
  const int32_t* d2t;
  AqFusion fusion;
  int32_t num_slots, pages_per_slot, max_rows, norm_feedback;
} AqBatchConfig;

// A sequence takes a slot: backends/base.py, Admit. bad_words: of each its length, then its tokens.
typedef struct {
  int32_t slot, num_tokens, num_prompt, num_hit, drafts, first_draft_key;
  int32_t min_tokens, num_biases, num_end_tokens, bad_words_size;
  float repetition_penalty, presence_penalty, frequency_penalty;
  AqSampling sampling;  // position apart
  const int32_t *tokens, *bias_tokens;
  const float* biases;
  const int32_t *end_tokens, *bad_words;
} AqAdmit;

// How a tree grows below a root. A chain takes `depth` tokens as the draft draws them; a static tree names its nodes in
// level order by parent and rank among the parent's children; a dynamic tree expands the `width` best nodes of a level
// `depth` times and keeps the num_nodes - 1 best of all. parents and ranks [num_nodes] are of static trees; the root's
// are 0.
enum { AQ_CHAIN = 0, AQ_STATIC = 1, AQ_DYNAMIC = 2 };
typedef struct {
  int32_t kind, depth, width, num_nodes;
  const int32_t *parents, *ranks;
} AqShape;

// A step as one run of int32: num_extends, num_chunks, num_decodes, num_pages; then that many AqExtend, AqChunk,
// AqDecode; then of each pages message an AqPages and its pages; then of each decode that brings a proposal its tokens
// and their parents, as node numbers.
typedef struct {
  int32_t slot, until;
} AqExtend;
typedef struct {
  int32_t slot, start, end, is_last, draws;
} AqChunk;
// shape: a number that aq_add_shape gave, or -1: no draft model. num_forced: drafts of a chain to accept whatever is
// drawn, -1: the law. num_proposed: tokens of a proposal, which takes the place of the draft model's; -1: there is
// none.
typedef struct {
  int32_t slot, shape, num_forced, num_proposed;
} AqDecode;
typedef struct {
  int32_t slot, group, first, count;
} AqPages;

AqBatch* aq_open_batch(const AqBatchConfig*);  // NULL on failure
int aq_close_batch(AqBatch*);
int aq_add_shape(AqBatch*, const AqShape*, int32_t* number);

// Writes missing draft keys, applies admissions and pages, and grows the trees of the step's decodes. seconds [5] of
// aq_keep begin to count here: draft, binding, verify, draw and accept, keep.
int aq_draft(AqBatch*, const int32_t* message, const AqAdmit* admits, int32_t num_admits);

// The grown trees: out holds offsets [decodes + 1], then tokens and parents (slot-local nodes) of all nodes.
int aq_read_trees(AqBatch*, int32_t* out);
// Other trees in their place, laid out the same. Their roots stay.
int aq_replace_trees(AqBatch*, const int32_t* trees);

// One target forward over trees and chunks, and a token drawn at every row. masks [nodes + chunks that draw, words]:
// which tokens a row may draw; NULL: all.
int aq_verify(AqBatch*, const uint32_t* masks, int32_t num_rows, int32_t num_words);

// Moves every slot to its next root. out: the size of what follows up to the trees, and the number of draft rows run;
// of each decode the root's index, nodes drafted, draft_end, the number of kept tokens, and these (-1: the target's
// logits are not numbers); of each chunk the token drawn (-2: it does not draw) and draft_end. Then of each decode its
// tokens, parents, and the nodes of the kept path.
int aq_keep(AqBatch*, int32_t* out, double* seconds);

// The three one after the other.
int aq_step(AqBatch*, const int32_t* message, const AqAdmit* admits, int32_t num_admits, int32_t* out, double* seconds);

// Single parts of the stages, for tests. The path of one tree whose nodes' tokens were drawn, root first, path
// [AQ_MAX_DEPTH + 1]; num_forced as in AqDecode. And the best num_nodes - 1 of a dynamic tree's candidates in the order
// they were found, with the node number of each one's parent; parents [count]: of candidates, -1 for the root.
int aq_accept(const int32_t* tokens, const int32_t* parents, const int32_t* drawn, int32_t num_nodes,
              int32_t num_forced, int32_t* path, int32_t* length);
int aq_select(const float* scores, const int32_t* parents, int32_t count, int32_t num_nodes, int32_t* chosen,
              int32_t* node_parents);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
