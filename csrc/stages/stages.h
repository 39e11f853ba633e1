// The C interface of a running batch: a step as three stages (draft, verify, keep) and as one call. It uses structs of
// aquiline.h; backends/cpu/native.py mirrors the structs of both files.
//
// A batch keeps what a later step needs of each slot: every token known so far, how far keys and draft keys reach, how
// tokens are drawn, and what changes their logits. Models, keys and buffers belong to the caller and must outlive the
// batch. A stage returns 0 on success, -1 if it refuses its input, or -2 if it failed while it ran; aq_last_error()
// says why. Refused input has changed nothing. After a failure the slots are as they were before the step, but the
// admissions and pages that the step brought stay applied.
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
enum { AQ_MARGINS = 8 };  // buckets of margins: see spec/confidence.py

typedef struct AqBatch AqBatch;

// hidden [max_rows, H], features [max_rows, num_capture * H] (NULL: no capture) and draft_hidden [max_rows, Hd] receive
// the outputs of the last forward. fused [num_pages, page_size, Hd]: the draft's input, computed from the target's
// feature at each KV index. Without a draft model every pointer but target, target_kv and hidden is NULL.
typedef struct {
  const AqModel *target, *draft;
  const AqKV *target_kv, *draft_kv;
  float *hidden, *features, *draft_hidden, *fused;
  const int32_t* d2t;
  AqFusion fusion;
  int32_t num_slots, pages_per_slot, max_rows, norm_feedback;
} AqBatchConfig;

// A sequence takes a slot: see Admit in backends/base.py. bad_words: for each word its length, then its tokens.
typedef struct {
  int32_t slot, num_tokens, num_prompt, num_hit, drafts, first_draft_key, draft_end;
  int32_t min_tokens, max_tokens, num_biases, num_end_tokens, bad_words_size;
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

// A step is one array of int32: num_extends, num_chunks, num_decodes, num_pages; then that many AqExtend, AqChunk and
// AqDecode; then num_pages times an AqPages followed by its pages; then, for each decode with a proposal, the tokens of
// the proposal and their parents, as node numbers.
typedef struct {
  int32_t slot, until;
} AqExtend;
typedef struct {
  int32_t slot, start, end, is_last, draws;
} AqChunk;
// shape: a number that aq_add_shape gave; -1: the draft model does not draft. num_proposed: the
// number of tokens of a proposal, which is verified in place of the draft model's tree; -1: there is no proposal.
// has_cut: whether an AqCut ends the chain that the draft model drafts. A proposal beside a cut is a chain; both are
// verified in one tree, in which a token that both have behind the same tokens is one node.
typedef struct {
  int32_t slot, shape, num_proposed, has_cut;
} AqDecode;
typedef struct {
  int32_t slot, group, first, count;
} AqPages;

// How confidence ends a chain: see Cut in spec/confidence.py. chances and seconds are by bucket of the margin.
typedef struct {
  float chances[AQ_MARGINS], seconds[AQ_MARGINS], least_node, least_pass;
} AqCut;

// What the confidence of a step's drafts decides: one cut for each decode that has one, in order; and row_costs of a
// StepInput (backends/base.py). Without any, every node that a cut lets through is verified.
typedef struct {
  const AqCut* cuts;
  const float* row_costs;
  int32_t num_cuts, num_row_costs;
} AqConfidence;

AqBatch* aq_open_batch(const AqBatchConfig*);  // NULL on failure
int aq_close_batch(AqBatch*);
int aq_add_shape(AqBatch*, const AqShape*, int32_t* number);

// Between two steps: `draft`, of the same geometry, drafts from now on. first_draft_keys [num_slots]: of a slot whose
// draft keys are all missing now, the first KV index that is to have one again; 0: the slot is left as it is.
int aq_renew_draft(AqBatch*, const AqModel* draft, const int32_t* first_draft_keys);

// Writes missing draft keys, applies admissions and pages, and grows the trees of the step's decodes. Here begin the
// times that aq_keep reports as seconds [5]: draft, binding, verify, draw and accept, keep.
int aq_draft(AqBatch*, const int32_t* message, const AqConfidence*, const AqAdmit* admits, int32_t num_admits);

// The grown trees: out holds offsets [decodes + 1], then tokens and parents (slot-local nodes) of all nodes.
int aq_read_trees(AqBatch*, int32_t* out);
// Replaces the grown trees by others, laid out as aq_read_trees does. Each tree keeps its root's token.
int aq_replace_trees(AqBatch*, const int32_t* trees);

// Before another step begins: the features of the last step's first rows, out [num_rows, num_capture * H]. Refused
// where one of them has none, since the draft never reads it.
int aq_read_features(AqBatch*, int32_t num_rows, float* out);

// Changes the logits [vocab] of a row of the host's choice, after the slot's own rules and before the mask.
typedef void (*AqEdit)(int32_t row, float* logits);

// One target forward over trees and chunks, and a token drawn at every row. masks [nodes + chunks that draw, words]:
// which tokens a row may draw; NULL: all. edited [nodes + chunks that draw]: whether edit changes a row's logits; NULL:
// no row's. edit runs on the calling thread.
int aq_verify(AqBatch*, const uint32_t* masks, int32_t num_rows, int32_t num_words, const uint8_t* edited, AqEdit edit);

// Moves every slot to its next root. out holds the size of what follows up to the trees, the number of draft rows run,
// and the number of experts that the target read, of all layers together; for each decode the root's index, the number
// of nodes drafted, first_draft_key, draft_end and features_end (Decoded in backends/base.py), the number of kept
// tokens, and the kept tokens (-1: the target's logits are not numbers), with a cut also the number of levels that were
// drafted, and the token, the runner-up and the margin's bucket of each; for each chunk the token drawn (-2: it does
// not draw) and the same three. Then follow for each decode its tree's tokens, parents, and the nodes of the kept path.
int aq_keep(AqBatch*, int32_t* out, double* seconds);

// The three stages one after the other; then the same decodes again from where they stand, num_steps times in all, or
// until a sequence has max_tokens of output or draws one of its end tokens, or its logits are not numbers. The reports
// of the steps stand in out one behind the other, their times in seconds [num_steps, 5]; num_done says how many there
// are. More than one step: the message has no chunks and no proposals.
int aq_step(AqBatch*, const int32_t* message, const AqConfidence*, const AqAdmit* admits, int32_t num_admits,
            int32_t num_steps, int32_t* out, double* seconds, int32_t* num_done);

// Single parts of the stages, for tests. aq_accept finds the accepted path of one tree, root first: path
// [AQ_MAX_DEPTH + 1]. aq_select chooses the best num_nodes - 1 of a dynamic tree's
// candidates, in the order they were found, with the node number of each one's parent. Its parents [count] are
// candidates, -1 for the root.
int aq_accept(const int32_t* tokens, const int32_t* parents, const int32_t* drawn, int32_t num_nodes, int32_t* path,
              int32_t* length);
int aq_select(const float* scores, const int32_t* parents, int32_t count, int32_t num_nodes, int32_t* chosen,
              int32_t* node_parents);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
