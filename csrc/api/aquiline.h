// The C interface of the native CPU library. Plain structs of raw pointers, mirrored by backends/cpu/native.py.
//
// A function without a result of its own returns 0, or -1 after setting aq_last_error() if a pointer is null or
// misaligned or a shape, dtype or index is out of range. It has then read and written nothing. All arrays are
// C-contiguous.
//
// Exactness (docs/decisions, 3): every result of a row is the same bits whatever the other rows, the thread
// count, the chunking of the prompt and the instruction set. Linears are one fused-multiply-add sum over k in
// order; attention reduces blocks of AQ_BLOCK absolute positions, each in position order, folded in block order within
// spans of 512 positions, and the spans in order;
// other reductions use 16 partial sums (lane = index mod 16) and one fixed merge tree.
#pragma once
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

// Changes with every struct and signature, those of stages/stages.h and lookup/lookup.h too: backends/cpu/native.py
// computes it from its mirror of them, and tests/test_abi.py says what it should be.
#define AQ_ABI 0x4387e7a1u

enum { AQ_LANES = 16, AQ_BLOCK = 64, AQ_GROUP = 32 };

// y[r, n] = sum_k x[r, k] * w[n, k] (+ bias[n]). dtype: the code of a storage format. The format's header in formats/
// says how weights are packed and in which order products are summed. rest: further outputs over the same inputs, whose
// weights are stored otherwise, or NULL; n is then a multiple of 16.
typedef struct AqLinear {
  const void* weight;
  const float* bias;  // [n] or NULL
  int32_t n, k, dtype;
  const struct AqLinear* rest;
} AqLinear;

typedef struct {
  AqLinear qkv, o;
  const float *q_norm, *k_norm;    // [head_dim] or NULL
  const float* sinks;              // [num_heads] or NULL: a logit that joins the softmax denominator
  const float* key_shift;          // [num_kv_heads, head_dim] or NULL: rotated keys in int8 are stored less this
  int32_t window;                  // 0: none
} AqAttention;

// What stands in place of one MLP: a row uses the per_token experts that the router scores highest, ties to the lowest
// id, and adds their outputs in that order, from 0, each times its weight. over_all: weights are softmax probabilities
// among all experts, else among the chosen ones. Expert e's gate_up and down lie e * gate_up_bytes and e * down_bytes
// behind those of expert 0, its biases e * n behind.
typedef struct {
  AqLinear router;                 // [count, hidden], of floats
  int64_t gate_up_bytes, down_bytes;
  int32_t count, per_token, over_all;
} AqExperts;

// down(activation(gate(x), up(x))), where activation(g, u) is AQ_SWIGLU: silu(g) * u; AQ_CLAMPED: (u + 1) * g *
// sigmoid(1.702 g) with g at most `limit` and u within it; AQ_GEGLU: gelu(g) * u, gelu by its tanh form. gate_up: the
// rows of gate and up, and their biases, alternate in runs of 16.
enum { AQ_SWIGLU = 0, AQ_CLAMPED = 1, AQ_GEGLU = 2 };
typedef struct {
  AqLinear gate_up, down;          // of expert 0 if there are experts
  const AqExperts* experts;        // NULL: a dense MLP
  int32_t activation;
  float limit;
} AqMlp;

typedef struct {
  AqAttention attention;
  AqMlp mlp;
  const float *input_norm, *post_norm;  // [hidden], before attention and before the MLP
  const float* hidden_norm;             // draft only
  const float *attention_out_norm, *mlp_out_norm;  // [hidden] or NULL: of what o and down add to the residual stream
} AqLayer;

typedef struct {
  int32_t hidden, num_layers, num_heads, num_kv_heads, head_dim, intermediate, vocab;
  int32_t embed_dtype, is_draft, norm_before_residual, num_capture;
  float eps, attn_scale, embed_scale;  // embed_scale: a factor on a target's embeddings
  float rope_scale, local_rope_scale;
  const float *inv_freq,
      *local_inv_freq;  // [head_dim / 2]; the local one, if not NULL, is that of layers with a window
  const void* embed;               // [vocab, hidden] row-major
  const AqLayer* layers;
  const float* final_norm;
  AqLinear head;
  const int32_t* capture;          // ascending layer indices; features[r] = their outputs, concatenated
} AqModel;

// k [page][layer][kv_head][page_size / 16][head_dim][16], v [page][layer][kv_head][page_size][head_dim], of floats. In
// int8: k [page][layer][kv_head][page_size / 16][head_dim / 4][16][4] of codes plus 128, v
// [page][layer][kv_head][page_size / 4][head_dim][4] of codes, and k_scales and v_scales
// [page][layer][kv_head][page_size], which are NULL for floats.
typedef struct {
  void *k, *v;
  float *k_scales, *v_scales;
  int32_t num_layers, num_pages, page_size, num_kv_heads, head_dim, dtype;
} AqKV;

// The flat rows of one forward: see Rows in types.py.
typedef struct {
  const int32_t *tokens, *positions, *slots, *write, *key_start, *context_len, *tail, *tail_len, *page_table;
  int32_t num_rows, tail_stride, table_stride, num_slots;
} AqRows;

// How a row's token is drawn: see SAMPLING in types.py.
typedef struct {
  float temperature, top_p, min_p;
  int32_t top_k, position;
  uint64_t seed;
} AqSampling;

const char* aq_last_error(void);
// The interface that the library was built with: AQ_ABI for NULL, the size in bytes of a struct of this file, of
// stages.h or of lookup.h for its name, -1 for any other name.
int64_t aq_abi(const char* name);
const char* aq_format_name(int32_t code);    // of a storage format (formats/); NULL where no format has that code
const char* aq_isa(void);                    // the instruction set in use: one of api.cpp's `detect`
int aq_select_isa(const char* name);         // NULL: the best this CPU has
const char* aq_available_isas(void);         // comma-separated, best first
int aq_has_bf16_dot(void);      // whether this CPU and build have the dot product of the second arithmetic
int32_t aq_fastest_bf16(void);  // the dtype in which bfloat16 weights are multiplied fastest
int aq_set_threads(int32_t threads);  // >= 1, the calling thread included
int32_t aq_num_threads(void);

int64_t aq_packed_bytes(int32_t n, int32_t k, int32_t dtype);
// Packs a weight [n, k] of dtype. For a quantised format weight holds the codes as int8, and the format's header says
// what scales holds.
int aq_pack(const void* weight, const void* scales, int32_t n, int32_t k, int32_t dtype, void* packed);

// One forward of a decoder: embeds, runs every layer, writes KV, leaves the residual stream of the last layer
// (before the final norm) in hidden [R, hidden] and the captured features of row r in features[r]
// [num_capture * hidden] (NULL: those of this row are not wanted; features NULL: none are). A draft model (is_draft)
// has one layer over [input_norm(embed); hidden_norm(g)], g [R, hidden]. Of its rows only the first num_states leave
// anything in hidden; the others only write their keys and values. In other models all rows have states. num_experts
// (NULL: not wanted): how many experts were read, of all layers together.
int aq_forward(const AqModel*, const AqKV*, const AqRows*, const float* g, int32_t num_states, float* hidden,
               float* const* features, int32_t* num_experts);

// From now on every call adds the time of its parts to seconds [7]: the target's attention (norm to output
// projection), MLP and head, the draft's attention, MLP and head, and fusion. NULL ends the timing.
int aq_time_parts(double* seconds);

// Head functions act on the n rows row_index[i] of hidden [*, model->hidden]; each applies the final norm first.
int aq_head_logits(const AqModel*, const float* hidden, const int32_t* row_index, int32_t n, float* logits);
// Draws a token for every row, row i by the i-th AqSampling; tokens[i] = -1 where a logit is NaN or none is finite.
// d2t [head.n] of a draft (else NULL): the difference between target id and draft id. Tokens are then target ids, each
// scored with the noise that the target gives it.
int aq_head_draw(const AqModel*, const float* hidden, const int32_t* row_index, int32_t n, const AqSampling*,
                 const int32_t* d2t, int32_t* tokens);
// The same draws, and how near each was: runners_up[i] is the token with the second best score (-1: no other token was
// possible), margins[i] by how much the best score exceeds it. Where tokens[i] is -1 the two are -1 and 0.
int aq_head_guess(const AqModel*, const float* hidden, const int32_t* row_index, int32_t n, const AqSampling*,
                  const int32_t* d2t, int32_t* tokens, int32_t* runners_up, float* margins);
// The k >= 0 most probable ids in descending order (ties: lowest id first) and their log-probabilities. If a logit is
// NaN or +inf or none is finite, the log-probabilities are NaN and the ids meaningless. For a row with an AqSampling
// whose temperature is above 0, logits / temperature plus the noise of a draw take the place of logits. d2t as above.
int aq_head_topk(const AqModel*, const float* hidden, const int32_t* row_index, int32_t n, int32_t k, const AqSampling*,
                 const int32_t* d2t, int32_t* ids, float* logprobs);
// The k most probable ids by the unchanged logits, and the log-probability and rank (from 1) of token chosen[i] of
// each row i.
int aq_head_logprobs(const AqModel*, const float* hidden, const int32_t* row_index, int32_t n, int32_t k, int32_t* ids,
                     float* logprobs, const int32_t* chosen, float* chosen_logprobs, int32_t* ranks);
int aq_draw(const float* logits, int32_t n, int32_t vocab, const AqSampling*, int32_t* tokens);

// Single parts, for tests and for the draft's fusion layer.
int aq_linear(const AqLinear*, const float* x, int32_t rows, float* y);
int aq_rms_norm(const float* x, const float* weight, int32_t rows, int32_t width, float eps, float* y);
int aq_swiglu(const float* gate_up, int32_t rows, int32_t width, float* y);  // gate_up interleaved in runs of 16
int aq_rope(float* x, const int32_t* positions, const float* inv_freq, float scale, int32_t rows, int32_t heads,
            int32_t head_dim);
int aq_write_kv(const AqKV*, int32_t layer, const AqRows*, const float* k, const float* v);
// arithmetic: 0 for float32, and for keys in int8, which are multiplied as integers; 2 for the second arithmetic. A
// forward uses the second one if its output projection does.
int aq_attention(const AqKV*, int32_t layer, const AqRows*, const float* q, int32_t num_heads, float scale,
                 int32_t window, const float* sinks, int32_t arithmetic, float* out);
int aq_exp_log(const float* x, int32_t count, float* exps, float* logs);  // logs[i] = 0 where x[i] <= 0
int aq_gumbel(uint64_t seed, int32_t position, int32_t count, float* noise);  // token ids 0 .. count - 1

// How a target's features [fc.k] become a draft's input: two optional norms, then fc. norm [fc.k] is taken over the
// whole feature, part_norms [num_parts, fc.k / num_parts] over each part by itself.
typedef struct {
  AqLinear fc;
  const float *norm, *part_norms;
  int32_t num_parts;
  float eps;
} AqFusion;
int aq_fuse(const AqFusion*, const float* features, int32_t rows, float* g);  // [rows, fc.k] to [rows, fc.n]

// Copies keys and values of every layer from KV index src[i] to dst[i] of slot slots[i], in order.
int aq_move_kv(const AqKV*, const int32_t* page_table, int32_t table_stride, const int32_t* slots, const int32_t* src,
               const int32_t* dst, int32_t count);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
