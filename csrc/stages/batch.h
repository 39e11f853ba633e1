// The state of a running batch: slots, the step in progress, and the rows of a forward. Plain data; the stages
// (draft.cpp, verify.cpp, keep.cpp) work on it one after the other.
#pragma once
#include <memory>
#include <vector>

#include "api/check.h"
#include "kernels/kernels.h"
#include "rules.h"
#include "stages.h"

namespace aq {

// Rows of features that a slot holds for the draft. A draft whose window is no longer reads nothing else, so its
// sequences hold their last features until they draft. With kSpareHeld more than the window they drop all before it:
// until then the keys of whole pages can still be written. Those of any other draft have no more than kMostHeld; then
// they are fused together: see fuse_held.
constexpr int kMostHeld = 256, kSpareHeld = 64;

// What a sequence leaves in its slot between steps.
struct Slot {
  bool is_admitted = false, decodes = false, drafts = false;
  int num_prompt = 0, max_tokens = 0;
  int num_computed = 0;  // tokens that have keys and, if the slot drafts, features; the root's index while it decodes
  int first_draft_key = 1, draft_end = 1;  // draft keys exist for the KV indices [first_draft_key, draft_end)
  int num_hit = 0;
  AqSampling sampling{};
  Rules rules;
  std::vector<int32_t> history;  // every token known
  int num_held = 0;  // of the last computed tokens: their features are held and not fused yet, see AqBatch::held_at

  int root() const { return (int)history.size() - 1; }
  int first_feature() const { return first_draft_key - 1; }  // no feature of an earlier token is read
  AqSampling sampling_at(int index) const {  // how the token with that index is drawn
    AqSampling own = sampling;
    own.position = index;
    return own;
  }
};

// An AqShape with what follows from it. For each node of a static tree: its level, whether it has children (is_inner),
// the number of its parent among the rows of the parent's level (parent_rows), and its path as rows that the draft
// writes behind the root (paths).
struct Shape {
  int kind = AQ_CHAIN, depth = 0, width = 1, num_nodes = 1;
  std::vector<int32_t> parents, ranks, levels, is_inner, parent_rows;
  std::vector<std::vector<int32_t>> paths;
};

// The trees of a step: nodes of slot after slot, roots first; parents are slot-local, levels count from the root's 0.
struct Trees {
  std::vector<int32_t> tokens, parents, levels, offsets;

  void clear() { tokens.clear(), parents.clear(), levels.clear(), offsets.assign(1, 0); }
  int size(int b) const { return offsets[b + 1] - offsets[b]; }
  bool is_chain(int b) const { return levels[offsets[b + 1] - 1] == size(b) - 1; }
};

// The buffers of a forward's rows, and the functions that fill them. A draft row's KV index is its position plus one.
class RowBuffer {
 public:
  void open(int max_rows, bool is_draft, const int32_t* page_table, int pages_per_slot, int num_slots);
  void clear() { rows_.num_rows = 0; }
  int num_rows() const { return rows_.num_rows; }
  const AqRows& rows() const { return rows_; }
  // A token at KV index `index` that sees the keys [key_start, index]. It writes its own key if is_written.
  void add(int slot, int token, int index, int key_start, bool is_written = true);
  // A tree's node that sees the keys [key_start, base), then those at base + path[i]. Its own key is the last of these.
  void add_node(int slot, int token, int base, const std::vector<int32_t>& path, int key_start);

 private:
  int next(int slot, int token, int index, int key_start);

  AqRows rows_{};
  bool is_draft_ = false;
  std::unique_ptr<int32_t[]> tokens_, positions_, slots_, write_, key_start_, context_len_, tail_, tail_len_;
};

// Draft rows [begin, end) of a slot.
struct Span {
  int slot, begin, end;
};

// What the draft said at one level of a chain with a cut: see Guess in spec/confidence.py.
struct Guess {
  int32_t token, runner_up, margin;
};

enum class Stage { idle, drafted, verified };

// The seconds that aq_keep reports, in this order: of the stages draft, verify and keep, where verify fills rows, runs
// the target's forward and draws.
enum StageTime { kDraftTime, kRowsTime, kVerifyTime, kDrawTime, kKeepTime, kNumTimes };

}  // namespace aq

struct AqBatch {
  AqBatchConfig config{};
  std::vector<aq::Slot> slots;
  std::vector<aq::Shape> shapes;
  std::vector<int32_t> page_table;  // [num_slots, pages_per_slot]; -1: the slot has no such page
  aq::RowBuffer rows, draft_rows;
  // A ring of features for each slot, [num_slots, held_rows(), num_capture * H]. What no slot held takes no memory.
  std::unique_ptr<float[]> held;

  // The step in progress.
  aq::Stage stage = aq::Stage::idle;
  std::vector<AqExtend> extends;
  std::vector<AqChunk> chunks;
  std::vector<AqDecode> decodes;
  aq::Trees trees;
  std::vector<int32_t> first_rows;  // of each chunk
  std::vector<float*> feature_rows;  // where each row's features go; NULL: nobody reads them
  std::vector<int32_t> chunk_tokens;  // drawn by each chunk; -2: it does not draw
  std::vector<std::vector<int32_t>> paths, kept;  // of each decode: accepted nodes, root first; tokens
  std::vector<std::vector<aq::Guess>> guesses;  // of each decode: empty without a cut
  int num_draft_rows = 0;
  int32_t num_experts = 0;  // read by the target, of all layers together
  double seconds[aq::kNumTimes] = {};
  double lapped = 0.0;

  // Memory that stages reuse.
  std::vector<float> g, states, gathered, logits, logprobs, margins;
  std::vector<int32_t> ids, runners_up, drawn;
  std::vector<AqSampling> samplings;

  int vocab() const { return config.target->vocab; }
  int page_size() const { return config.target_kv->page_size; }
  int max_context() const { return config.pages_per_slot * page_size(); }
  // The draft's window where slots hold all that it reads, see kMostHeld; else 0.
  int held_window() const {
    const int window = config.draft == nullptr ? 0 : config.draft->layers[0].attention.window;
    return window <= aq::kMostHeld ? window : 0;
  }
  int held_rows() const { return held_window() > 0 ? held_window() + aq::kSpareHeld : aq::kMostHeld; }
  // The feature that a slot holds of the token with that index.
  float* held_at(int slot, int index) const {
    return held.get() + ((size_t)slot * held_rows() + index % held_rows()) * config.fusion.fc.k;
  }
  float* fused_at(int slot, int index) const;
  void lap(aq::StageTime stage);
};

namespace aq {

struct Message;

// message.cpp
int read_message(const AqBatch& batch, const int32_t* message, const AqConfidence* confidence, Message* out);
int check_step(const AqBatch& batch, const Message& message, const AqAdmit* admits, int num_admits);

// batch.cpp
void admit(AqBatch* batch, const AqAdmit& admit);

// Pointers to the parts of a message.
struct Message {
  const AqExtend* extends;
  const AqChunk* chunks;
  const AqDecode* decodes;
  int num_extends, num_chunks, num_decodes;
  std::vector<const AqPages*> pages;  // each with its pages behind it
  std::vector<const int32_t*> proposals;  // of each decode: tokens, then parents; NULL: none
  std::vector<const AqCut*> cuts;  // of each decode; NULL: none
  const float* row_costs;
  int num_row_costs;
};

// A feature that the draft's input is computed from, and the slot and KV index that this is kept by.
struct Featured {
  const float* feature;
  int slot, index;
};

// Rows that are fused, or written as draft keys, at once. They and what is computed of them stay in the caches, and
// sequences that begin to draft together need no more memory than a prompt.
constexpr int kPieceRows = 256;

// draft.cpp: computes the draft's inputs from these features, and keeps them.
int fuse_rows(AqBatch* batch, const std::vector<Featured>& rows);

// draft.cpp: fuses the features that the slots hold, so that the draft can read those of all computed tokens. A step
// that does not draft only holds the feature of its token: fused one by one, each would read all weights of the fusion.
int fuse_held(AqBatch* batch, const std::vector<int>& slots);

// draft.cpp: runs the draft rows of the spans in as few passes as max_rows allows. The last pass holds the last row of
// each span, and leaves its state in draft_hidden; last[i] is its number there. NULL: only keys are wanted.
int extend(AqBatch* batch, const std::vector<Span>& spans, std::vector<int32_t>* last);

// grow.cpp: grows a tree by the draft model below the root of every decode that has a shape; fills batch->trees.
int grow(AqBatch* batch, const Message& message);
int finish_trees(Trees* trees);  // computes levels from parents; refuses parents that make no tree

}  // namespace aq
