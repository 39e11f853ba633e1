// The interface between the dispatching side (api.cpp) and the kernels, which are compiled once per instruction set.
//
// A kernel is called by every worker of the pool at once and divides the work by (index, count); how it divides it
// never changes a result. Plain data only: see simd/inline.h for why nothing from std:: may appear here.
#pragma once
#include <stddef.h>

#include "api/aquiline.h"
#include "simd/types.h"

namespace aq {

struct Worker {
  int index, count;
  void barrier() const;  // returns once every worker has arrived; pool.cpp
};

double seconds();  // of a steady clock; pool.cpp

constexpr int kSpan = 512;         // attention folds blocks within spans of this many positions, then the spans
constexpr int kMaxHeadDim = 512;
constexpr int kTileQueries = 128;  // attention reads a block of keys once for this many (row, head) pairs
constexpr int kOwnRows = 16;       // up to so many rows, each worker norms all of them for itself

// Outputs of a linear and of its rest.
static inline int num_outputs(const AqLinear& linear) {
  int count = 0;
  for (const AqLinear* part = &linear; part != nullptr; part = part->rest) count += part->n;
  return count;
}

// How many copies of the normed rows a call needs memory for.
static inline size_t norm_copies(int rows, int threads) { return rows <= kOwnRows ? threads : 1; }

// A tile of a linear: sums[r * kPanelWidth + i] of up to Tiling::rows rows and of the outputs of num_blocks <=
// kPanel blocks (kernels/tile.h). w: steps of the linear's format; x: inputs as the format takes them, `stride` of them
// a row.
using TileFunction = void (*)(int rows, const void* w, int num_blocks, int steps, const void* x, size_t stride,
                              size_t next, float* sums);

// dot.cpp defines what needs AVX512_BF16: the tiles of a linear and the blocks of attention in the second arithmetic.
// kHasDot: whether they are compiled in.
extern const bool kHasDot;
void dot_tile(int rows, const void* w, int num_blocks, int steps, const void* x, size_t stride, size_t next,
              float* sums);

constexpr int kGroups = AQ_BLOCK / 16;

// The keys of one block that a row sees: positions [from, to) of it. k[g]: [dim][16] of a group, v[j]: [dim].
// next_k and next_v are groups of 16 keys to prefetch meanwhile: pages are too short for the hardware to run ahead.
// If S is Pair, k[g] is [dim / 2][16] and v[j] holds positions 2 j and 2 j + 1 of every channel.
template <class S>
struct Keys {
  const S *k[kGroups], *next_k[kGroups], *next_v[kGroups];
  const S* v[AQ_BLOCK];
  int from, to;
};

// Keys in eight bits, by groups of 16: k[g] [dim / 4][16][4] and v[g] [4][dim][4] in fours of channels and of
// positions, a scale for each key and each value. A query sees positions within [from, to).
template <> struct Keys<Code> {
  const Code *k[kGroups], *v[kGroups], *next_k[kGroups], *next_v[kGroups];
  const float *k_scales[kGroups], *v_scales[kGroups];
  int from, to;
};

// Queries in eight bits: words [queries][dim / 4] of four codes, scales with the scale of the softmax in them, and
// minus the sum of the codes. Query i sees positions [from[i], to[i]) of the block, which are not empty.
struct CodedQueries {
  uint32_t* words;
  float* scales;
  int32_t *minus, *from, *to;
};

// block_update of attention_block.h over keys in eight bits. From integer.cpp.
using CodedBlock = void (*)(const CodedQueries& q, int queries, int dim, const Keys<Code>& keys, float* maximum,
                            float* sum, float* accumulator);

// block_update of attention_block.h over pairs; paired holds 32 * dim of them for each of keys and values. dot_block:
// in the second arithmetic, from dot.cpp.
using PairBlock = void (*)(const Pair* q, int queries, int dim, const Keys<Rounded>& keys, float scale, Pair* paired,
                           float* maximum, float* sum, float* accumulator);
void dot_block(const Pair* q, int queries, int dim, const Keys<Rounded>& keys, float scale, Pair* paired,
               float* maximum, float* sum, float* accumulator);

// What integer dot products compute, from integer.cpp or tiles.cpp: the tile of a format in the third arithmetic, its
// rows at most, of fewer than kWideFrom rows and of more, and a block of attention. Also the tile and the block of the
// fourth, which tile registers compute.
struct IntegerTiles {
  TileFunction (*of)(int dtype);
  int rows, wide_rows;
  CodedBlock attention;
  PairBlock pair_attention;
  bool has_registers;  // of AMX, which the kernel has to grant
};
constexpr int kWideFrom = 13;  // below, dot products are as fast on a Granite Rapids, or faster
extern const IntegerTiles* integer_tiles;  // of the instruction set in use; api.cpp

// How attention multiplies bfloat16 keys beside linears of the second arithmetic, or of the fourth; NULL: in float32.
static inline PairBlock pair_block(bool is_dot, bool is_tiled) {
  return is_dot ? dot_block : is_tiled ? integer_tiles->pair_attention : nullptr;
}

struct Tile {
  int32_t row, num_rows;  // consecutive rows of one slot
};

struct AttentionJob {
  const AqKV* kv;
  const AqRows* rows;
  const float* q;  // [R, q_stride], heads first
  void* out;       // [R, num_heads * head_dim], float or, if is_rounded, Rounded
  bool is_rounded;
  PairBlock pair_block;  // NULL: in float32, or over keys in eight bits
  const float *sinks, *key_shift;  // key_shift: as in AqAttention, NULL for keys in floats
  int layer, num_heads, q_stride, window;
  float scale;
  const Tile* tiles;
  int num_tiles, num_blocks;
  bool deferred;       // tiles are cut between workers, and the states of their parts go to `partials`
  float* partials;     // [R, num_heads, num_blocks, 16 + head_dim]: attention.h
  float* workspace;    // per worker
  size_t workspace_floats;
};

constexpr int kMostExperts = 16;  // of a row

// Words of 32 bits that a worker's table of experts and rows takes: see Routing in experts.h.
static inline size_t routing_words(const AqExperts& experts, int rows) {
  return 3 * (size_t)rows * experts.per_token + experts.count + 1;
}

// Memory of a mixture of experts. logits [rows, count]; routing: routing_words for each worker; inputs: input_floats
// for each worker, the rows of one expert as its linears take them; outputs [rows * per_token, hidden].
struct ExpertScratch {
  float *logits, *inputs, *outputs;
  int32_t* routing;
  size_t input_floats;
};

struct ForwardJob {
  const AqModel* model;
  const AqKV* kv;
  const AqRows* rows;
  const float* g;
  int num_states;  // rows from here on only write their keys and values
  float* hidden;
  float* const* features;
  // normed holds norm_copies copies of what the linear that reads it takes. attended and gate_up hold Rounded if the
  // linear that reads them takes it, else float; a linear that takes Codes rounds them into `codes`, norm_copies of
  // [rows, the widest k / 32].
  float *normed, *qkv, *attended, *gate_up;
  float *cosine, *sine;    // [rows, head_dim / 2], and behind them those of layers with a window if these differ
  float* outputs;          // [rows, hidden], if any layer norms what it adds to the residual stream
  Codes* codes;
  float* embedded;         // [rows, hidden], if the embedding is packed in blocks
  ExpertScratch experts;   // if any layer has experts; gate_up then holds floats, a row for each expert of a row
  int32_t* num_experts;    // where worker 0 adds the number of experts that were read
  AttentionJob attention;  // the fields that are the same for every layer; its rows are the first num_states
  double* seconds;         // NULL, or where the time of attention and of the MLP is added
};

struct LinearJob {
  const AqLinear* linear;
  const float* x;
  int rows;
  float* y;
  void* rounded;  // for x as the linear takes it: [rows, k] of Rounded, or norm_copies of [rows, k / 32] of Codes
};

// The best score of a row that one worker has seen, or the second best, per lane. An id of 0xffffffff: there is none.
struct alignas(64) Best {
  float score[16];
  uint32_t id[16];
  uint32_t has_nan, has_finite;
};

struct DrawJob {
  const AqModel* model;      // NULL: logits are given
  const float* hidden;
  const int32_t* row_index;
  const float* given_logits;
  int n, vocab;
  const int32_t* d2t;        // of a draft that draws target ids, else NULL
  const AqSampling* sampling;
  int32_t *tokens, *runners_up;
  float* margins;            // NULL, as runners_up and `second` then are: only the tokens are wanted
  float* normed;             // norm_copies of [n, hidden]
  float* logits;             // [n, padded vocab], used by rows with a filter
  Best *best, *second;       // [workers, n]
  float* workspace;          // per worker: 6 * padded vocab
  size_t workspace_floats;
};

struct TopKJob {
  const AqModel* model;
  const float* hidden;
  const int32_t* row_index;
  int n, k;
  const AqSampling* sampling;  // NULL: by the logits as they are
  const int32_t* d2t;          // of a draft that ranks target ids, else NULL
  int32_t* ids;
  float* logprobs;
  const int32_t* chosen;     // NULL: only the k best are wanted
  float* chosen_logprobs;
  int32_t* ranks;
  float *normed, *logits;
  float* workspace;          // per worker: 3 * padded vocab
  size_t workspace_floats;
};

struct Kernels {
  void (*forward)(const Worker&, const ForwardJob&);
  void (*attention)(const Worker&, const AttentionJob&);
  void (*linear)(const Worker&, const LinearJob&);
  void (*head_logits)(const Worker&, const TopKJob&);
  void (*head_topk)(const Worker&, const TopKJob&);
  void (*draw)(const Worker&, const DrawJob&);
  void (*rms_norm)(const float* x, const float* weight, int rows, int width, float eps, float* y);
  void (*swiglu)(const float* gate_up, int rows, int width, float* y);
  void (*rope)(float* x, const int32_t* positions, const float* inv_freq, float scale, int rows, int heads, int dim);
  void (*write_kv)(const AqKV& kv, int layer, const AqRows& rows, const float* k, const float* v);
  void (*gumbel)(uint64_t seed, int32_t position, int count, float* noise);
  void (*exp_log)(const float* x, int count, float* exps, float* logs);
};

}  // namespace aq

// One table per instruction set, each from kernels.cpp, and the tiles of the third arithmetic, from integer.cpp.
namespace avx512 {
extern const aq::Kernels kKernels;
}
namespace avx512_vnni {
extern const aq::IntegerTiles kIntegerTiles;
}
namespace amx {
extern const aq::IntegerTiles kIntegerTiles;
}
namespace amx_twin {
extern const aq::IntegerTiles kIntegerTiles;
}
namespace avx2 {
extern const aq::Kernels kKernels;
extern const aq::IntegerTiles kIntegerTiles;
}  // namespace avx2
namespace avx_vnni {
extern const aq::IntegerTiles kIntegerTiles;
}
namespace neon {
extern const aq::Kernels kKernels;
extern const aq::IntegerTiles kIntegerTiles;
}  // namespace neon
namespace neon_dot {
extern const aq::IntegerTiles kIntegerTiles;
}
namespace portable {
extern const aq::Kernels kKernels;
extern const aq::IntegerTiles kIntegerTiles;
}  // namespace portable
