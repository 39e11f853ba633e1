// The C interface: validates, chooses the kernels, owns scratch memory, and hands jobs to the pool.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "aquiline.h"
#include "check.h"
#include "formats/formats.h"
#include "isas.h"
#include "kernels/kernels.h"
#include "pool.h"

namespace aq {
const IntegerTiles* integer_tiles = nullptr;
}

namespace {

using namespace aq;

// Scratch that grows to the largest call seen and is then reused.
class Buffer {
 public:
  template <class T = float>
  T* reserve(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > capacity_) {
      free(data_);
      data_ = aligned_alloc(64, bytes);
      capacity_ = data_ == nullptr ? 0 : bytes;
    }
    return (T*)data_;
  }

 private:
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

// What all calls share. The mutex admits one call at a time to pool and scratch. Never destroyed, like the pool.
struct Engine {
  Engine();

  std::mutex mutex;
  const Isa* isa = best_isa();
  std::vector<Tile> tiles;
  double* seconds = nullptr;
  Buffer normed, qkv, attended, gate_up, codes, embedded, cosine, sine, partials, workspace, logits, best, second;
  Buffer expert_inputs, expert_outputs, routing, outputs;
};

Engine& engine() {
  static Engine* const e = new Engine;
  return *e;
}

// A fork waits until no thread is in a call. Otherwise the child would inherit a lock held by a thread that the child
// does not have, would wait for it for ever, and its scratch would be in the middle of that call.
Engine::Engine() {
  integer_tiles = isa->integer_tiles;
  pthread_atfork([] { engine().mutex.lock(); }, [] { engine().mutex.unlock(); },
                 [] {
                   forget_workers();
                   engine().mutex.unlock();
                 });
}

const Kernels& kernels() { return *engine().isa->kernels; }

void use(const Isa* isa) {
  engine().isa = isa;
  integer_tiles = isa->integer_tiles;
}

using Lock = std::lock_guard<std::mutex>;

template <class Job, void (*Kernels::*member)(const Worker&, const Job&)>
void run_job(const Job& job) {
  run([](const Worker& worker, const void* argument) { (kernels().*member)(worker, *(const Job*)argument); }, &job);
}

size_t padded_vocab(int vocab) { return ((size_t)vocab + 63) / 64 * 64; }

#define AQ_RESERVE(pointer, buffer, type, count)                                                   \
  do {                                                                                             \
    pointer = engine().buffer.reserve<type>(count);                                                \
    AQ_REQUIRE(pointer != nullptr, "out of memory: %s of %zu elements", #buffer, (size_t)(count)); \
  } while (0)

constexpr int64_t kCutFrom = 1 << 17;  // products of queries and keys, from which on cutting tiles is worth a barrier

// How many tiles `rows` rows of one slot are cut into. Workers without heads of their own take tiles in turn, and all
// take as many.
int count_tiles(int rows, int num_heads, int kv_heads) {
  const int tile_rows = kTileQueries / (num_heads / kv_heads), threads = num_threads();
  const int count = (rows + tile_rows - 1) / tile_rows;
  if (kv_heads % threads == 0 || count * kv_heads < 4 * threads) return count;
  return std::min(rows, (count + threads - 1) / threads * threads);
}

// Fills a job: the tiles of rows, whether they are cut between workers, and the memory for partial results.
int plan_attention(const AqKV& kv, const AqRows& rows, int num_heads, AttentionJob* job) {
  Engine& e = engine();
  e.tiles.clear();
  int high = 0;
  int64_t work = 0;
  for (int r = 0; r < rows.num_rows; r++) {
    const int own = rows.context_len[r] + rows.tail_len[r];
    high = std::max(high, own), work += (int64_t)own * num_heads * kv.head_dim;
  }
  for (int r = 0, end; r < rows.num_rows; r = end) {
    for (end = r + 1; end < rows.num_rows && rows.slots[end] == rows.slots[r];) end++;
    const int count = count_tiles(end - r, num_heads, kv.num_kv_heads);
    for (int i = 0; i < count; i++) {
      const int first = r + (end - r) * i / count;
      e.tiles.push_back({first, r + (end - r) * (i + 1) / count - first});
    }
  }
  job->kv = &kv, job->rows = &rows, job->num_heads = num_heads;
  job->tiles = e.tiles.data(), job->num_tiles = (int)e.tiles.size();
  job->num_blocks = (high + AQ_BLOCK - 1) / AQ_BLOCK;
  const int items = job->num_tiles * kv.num_kv_heads, threads = num_threads();
  job->deferred = work >= kCutFrom && items % threads != 0 && items < 4 * threads;
  if (job->deferred)
    AQ_RESERVE(job->partials, partials, float,
               (size_t)rows.num_rows * num_heads * job->num_blocks * (16 + kv.head_dim));
  job->workspace_floats = (size_t)kTileQueries * (3 * kv.head_dim + 4) + (size_t)AQ_BLOCK * kv.head_dim * 2;
  AQ_RESERVE(job->workspace, workspace, float, threads * job->workspace_floats);
  return 0;
}

enum { kHeadPart = 2, kDraftParts = 3, kFusionPart = 6 };  // indices in the seconds of aq_time_parts

// Adds the time of a scope to a part's seconds while aq_time_parts is on.
class PartTimer {
 public:
  explicit PartTimer(int part) : part_(part), began_(seconds()) {}
  ~PartTimer() {
    if (engine().seconds != nullptr) engine().seconds[part_] += seconds() - began_;
  }

 private:
  const int part_;
  const double began_;
};

int parts_of(const AqModel& model) { return model.is_draft ? kDraftParts : 0; }

// Memory for a model's experts, if it has any: enough for the layer that needs most.
int plan_experts(const AqModel& model, int rows, ForwardJob* job) {
  size_t most = 1, count = 0, words = 0;
  for (int i = 0; i < model.num_layers; i++) {
    const AqExperts* experts = model.layers[i].mlp.experts;
    if (experts == nullptr) continue;
    most = std::max(most, (size_t)experts->per_token), count = std::max(count, (size_t)experts->count);
    words = std::max(words, routing_words(*experts, rows));
  }
  AQ_RESERVE(job->gate_up, gate_up, float, rows * most * model.intermediate);
  if (count == 0) return 0;
  const size_t threads = num_threads();
  job->experts.input_floats = (size_t)rows * std::max(model.hidden, model.intermediate);
  AQ_RESERVE(job->experts.logits, logits, float, rows* count);
  AQ_RESERVE(job->experts.inputs, expert_inputs, float, threads * job->experts.input_floats);
  AQ_RESERVE(job->experts.outputs, expert_outputs, float, rows * most * model.hidden);
  AQ_RESERVE(job->experts.routing, routing, int32_t, threads* words);
  return 0;
}

bool takes_codes(const AqModel& model) {
  for (int i = 0; i < model.num_layers; i++)
    if (host::takes_codes(model.layers[i].attention.o.dtype) || host::takes_codes(model.layers[i].mlp.down.dtype))
      return true;
  return false;
}

bool norms_outputs(const AqModel& model) {
  for (int i = 0; i < model.num_layers; i++)
    if (model.layers[i].attention_out_norm != nullptr || model.layers[i].mlp_out_norm != nullptr) return true;
  return false;
}

template <class Job, auto Kernel>
void run_head(const Job& job) {
  const PartTimer timer(kHeadPart + (job.model == nullptr ? 0 : parts_of(*job.model)));
  run_job<Job, Kernel>(job);
}

int check_selection(const AqModel* model, const float* hidden, const int32_t* row_index, int n) {
  AQ_TRY(check_model(model));
  AQ_REQUIRE(n >= 0, "n=%d: must be at least 0", n);
  AQ_TRY(check_pointer("hidden", hidden, sizeof(float)));
  AQ_TRY(check_pointer("row_index", row_index, sizeof(int32_t)));
  for (int i = 0; i < n; i++) AQ_REQUIRE(row_index[i] >= 0, "row_index[%d]=%d: must be at least 0", i, row_index[i]);
  return 0;
}

int draw(DrawJob job) {
  AQ_TRY(check_pointer("tokens", job.tokens, sizeof(int32_t)));
  AQ_TRY(check_sampling(job.sampling, job.n));
  if (job.n == 0) return 0;
  const size_t width = padded_vocab(job.vocab), threads = num_threads();
  if (job.model != nullptr) {
    AQ_RESERVE(job.normed, normed, float, norm_copies(job.n, threads) * job.n * job.model->hidden);
    AQ_RESERVE(job.logits, logits, float, job.n* width);
  }
  AQ_RESERVE(job.best, best, Best, threads * job.n);
  if (job.margins != nullptr) AQ_RESERVE(job.second, second, Best, threads * job.n);
  job.workspace_floats = 6 * width;
  AQ_RESERVE(job.workspace, workspace, float, threads* job.workspace_floats);
  run_head<DrawJob, &Kernels::draw>(job);
  return 0;
}

int head_draw(DrawJob job) {
  AQ_TRY(check_selection(job.model, job.hidden, job.row_index, job.n));
  if (job.d2t != nullptr) AQ_TRY(check_pointer("d2t", job.d2t, sizeof(int32_t)));
  job.vocab = job.model->head.n;
  Lock lock(engine().mutex);
  return draw(job);
}

int head_topk(TopKJob job) {
  AQ_TRY(check_selection(job.model, job.hidden, job.row_index, job.n));
  const int vocab = job.model->head.n;
  AQ_REQUIRE(job.k >= 0 && job.k <= vocab, "k=%d: must be in [0, %d]", job.k, vocab);
  AQ_TRY(check_pointer("ids", job.ids, sizeof(int32_t)));
  AQ_TRY(check_pointer("logprobs", job.logprobs, sizeof(float)));
  for (int i = 0; job.chosen != nullptr && i < job.n; i++)
    AQ_REQUIRE(job.chosen[i] >= 0 && job.chosen[i] < vocab, "chosen[%d]=%d: must be in [0, %d)", i, job.chosen[i],
               vocab);
  if (job.n == 0) return 0;
  Lock lock(engine().mutex);
  const size_t width = padded_vocab(vocab);
  AQ_RESERVE(job.normed, normed, float, norm_copies(job.n, num_threads()) * job.n * job.model->hidden);
  AQ_RESERVE(job.logits, logits, float, job.n* width);
  job.workspace_floats = 3 * width;
  AQ_RESERVE(job.workspace, workspace, float, num_threads() * job.workspace_floats);
  run_head<TopKJob, &Kernels::head_topk>(job);
  return 0;
}

// Keys lie in groups of 16, values in groups of kFour: 4 for codes, of which a key's lie in words of 4 channels.
template <class T>
void move_keys(const AqKV& kv, const int32_t* table, int src, int dst) {
  constexpr int kFour = host::kIsSame<T, Code> ? 4 : 1;
  const size_t page = (size_t)kv.page_size * kv.head_dim;
  const auto base = [&](int layer, int head, int index) {
    return (((size_t)table[index / kv.page_size] * kv.num_layers + layer) * kv.num_kv_heads + head) * page;
  };
  const auto key = [&](int index) {
    return (size_t)(index % kv.page_size / 16) * 16 * kv.head_dim + index % 16 * kFour;
  };
  const auto value = [&](int index) {
    return (size_t)(index % kv.page_size / kFour * kFour) * kv.head_dim + index % kFour;
  };
  for (int layer = 0; layer < kv.num_layers; layer++)
    for (int head = 0; head < kv.num_kv_heads; head++) {
      const size_t from = base(layer, head, src), to = base(layer, head, dst);
      const T *k = (const T*)kv.k + from + key(src), *v = (const T*)kv.v + from + value(src);
      T *new_k = (T*)kv.k + to + key(dst), *new_v = (T*)kv.v + to + value(dst);
      for (int d = 0; d < kv.head_dim; d += kFour) memcpy(new_k + d * 16, k + d * 16, kFour * sizeof(T));
      for (int d = 0; d < kv.head_dim; d++) new_v[d * kFour] = v[d * kFour];
      if (kFour == 1) continue;
      const size_t old_scale = from / kv.head_dim + src % kv.page_size, scale = to / kv.head_dim + dst % kv.page_size;
      kv.k_scales[scale] = kv.k_scales[old_scale], kv.v_scales[scale] = kv.v_scales[old_scale];
    }
}

}  // namespace

void aq::run_alone(void (*fn)(const Worker&, const void*), const void* argument) {
  Lock lock(engine().mutex);
  run(fn, argument);
}

extern "C" {

const char* aq_last_error(void) { return last_error(); }

const char* aq_isa(void) { return engine().isa->name; }

const char* aq_available_isas(void) {
  static const std::string names = [] {
    std::string joined;
    for (const Isa& isa : isas())
      if (isa.available) joined += (joined.empty() ? "" : ",") + std::string(isa.name);
    return joined;
  }();
  return names.c_str();
}

int aq_select_isa(const char* name) {
  Lock lock(engine().mutex);
  if (name == nullptr) return use(best_isa()), 0;
  for (const Isa& isa : isas())
    if (isa.available && strcmp(isa.name, name) == 0) return use(&isa), 0;
  return fail("isa=%s: must be one of %s", name, aq_available_isas());
}

int aq_has_bf16_dot(void) { return has_dot() ? 1 : 0; }

int32_t aq_fastest_bf16(void) {
  Lock lock(engine().mutex);
  return fastest_bf16();
}

int aq_set_threads(int32_t threads) {
  AQ_REQUIRE(threads >= 1 && threads <= 1024, "threads=%d: must be in [1, 1024]", threads);
  Lock lock(engine().mutex);
  set_threads(threads);
  return 0;
}

int32_t aq_num_threads(void) {
  Lock lock(engine().mutex);
  return num_threads();
}

int aq_forward(const AqModel* model, const AqKV* kv, const AqRows* rows, const float* g, int32_t num_states,
               float* hidden, float* const* features, int32_t* num_experts) {
  AQ_TRY(check_model(model));
  AQ_TRY(check_kv(kv, model->num_kv_heads, model->head_dim));
  AQ_REQUIRE(kv->num_layers >= model->num_layers, "kv.num_layers=%d: the model has %d", kv->num_layers,
             model->num_layers);
  AQ_TRY(check_rows(rows, *kv, model->vocab, true));
  AQ_REQUIRE(num_states >= 0 && num_states <= rows->num_rows, "num_states=%d: must be in [0, %d]", num_states,
             rows->num_rows);
  AQ_REQUIRE(model->is_draft || num_states == rows->num_rows, "num_states=%d: all %d rows of this model have states",
             num_states, rows->num_rows);
  AQ_TRY(check_pointer("hidden", hidden, sizeof(float)));
  if (model->is_draft) AQ_TRY(check_pointer("g", g, sizeof(float)));
  if (features != nullptr) AQ_TRY(check_pointer("features", features, sizeof(float*)));
  if (num_experts != nullptr) AQ_TRY(check_pointer("num_experts", num_experts, sizeof(int32_t)));
  int32_t touched = 0;
  if (num_experts != nullptr) *num_experts = 0;
  if (rows->num_rows == 0) return 0;
  Lock lock(engine().mutex);
  ForwardJob job{};
  job.model = model, job.kv = kv, job.rows = rows, job.g = g, job.num_states = num_states;
  job.hidden = hidden, job.features = features, job.num_experts = &touched;
  job.seconds = engine().seconds == nullptr ? nullptr : engine().seconds + parts_of(*model);
  const size_t n = rows->num_rows, heads = (size_t)model->num_heads * model->head_dim;
  // Few rows have a copy for each thread, so the rows with states may take more than all rows do.
  const size_t own = norm_copies(num_states, num_threads()) * num_states;
  const size_t num_normed = std::max(norm_copies(rows->num_rows, num_threads()) * n, own);
  AQ_RESERVE(job.normed, normed, float, num_normed * model->layers[0].attention.qkv.k);
  const size_t qkv_width = num_outputs(model->layers[0].attention.qkv);
  AQ_RESERVE(job.qkv, qkv, float, n* qkv_width);
  AQ_RESERVE(job.attended, attended, float, n* heads);
  AQ_TRY(plan_experts(*model, std::max(num_states, 1), &job));
  if (takes_codes(*model)) {
    const size_t widest = heads > (size_t)model->intermediate ? heads : model->intermediate;
    AQ_RESERVE(job.codes, codes, Codes, num_normed * ((widest + 31) / 32));
  }
  if (host::is_in_blocks(model->embed_dtype)) AQ_RESERVE(job.embedded, embedded, float, n * model->hidden);
  const size_t num_angles = n * model->head_dim / 2 * (model->local_inv_freq == nullptr ? 1 : 2);
  AQ_RESERVE(job.cosine, cosine, float, num_angles);
  AQ_RESERVE(job.sine, sine, float, num_angles);
  if (norms_outputs(*model)) AQ_RESERVE(job.outputs, outputs, float, n * model->hidden);
  AqRows with_states = *rows;
  with_states.num_rows = num_states;
  AQ_TRY(plan_attention(*kv, with_states, model->num_heads, &job.attention));
  job.attention.q = job.qkv, job.attention.q_stride = (int)qkv_width;
  job.attention.out = job.attended, job.attention.scale = model->attn_scale;
  run_job<ForwardJob, &Kernels::forward>(job);
  if (num_experts != nullptr) *num_experts = touched;
  return 0;
}

int aq_time_parts(double* seconds) {
  if (seconds != nullptr) AQ_TRY(check_pointer("seconds", seconds, sizeof(double)));
  Lock lock(engine().mutex);
  engine().seconds = seconds;
  return 0;
}

int aq_head_logits(const AqModel* model, const float* hidden, const int32_t* row_index, int32_t n, float* logits) {
  AQ_TRY(check_selection(model, hidden, row_index, n));
  AQ_TRY(check_pointer("logits", logits, sizeof(float)));
  if (n == 0) return 0;
  Lock lock(engine().mutex);
  TopKJob job{};
  job.model = model, job.hidden = hidden, job.row_index = row_index, job.n = n, job.logits = logits;
  AQ_RESERVE(job.normed, normed, float, norm_copies(n, num_threads()) * n * model->hidden);
  run_head<TopKJob, &Kernels::head_logits>(job);
  return 0;
}

int aq_head_draw(const AqModel* model, const float* hidden, const int32_t* row_index, int32_t n,
                 const AqSampling* sampling, const int32_t* d2t, int32_t* tokens) {
  return head_draw({model, hidden, row_index, nullptr, n, 0, d2t, sampling, tokens});
}

int aq_head_guess(const AqModel* model, const float* hidden, const int32_t* row_index, int32_t n,
                  const AqSampling* sampling, const int32_t* d2t, int32_t* tokens, int32_t* runners_up,
                  float* margins) {
  AQ_TRY(check_pointer("runners_up", runners_up, sizeof(int32_t)));
  AQ_TRY(check_pointer("margins", margins, sizeof(float)));
  return head_draw({model, hidden, row_index, nullptr, n, 0, d2t, sampling, tokens, runners_up, margins});
}

int aq_head_topk(const AqModel* model, const float* hidden, const int32_t* row_index, int32_t n, int32_t k,
                 const AqSampling* sampling, const int32_t* d2t, int32_t* ids, float* logprobs) {
  if (sampling != nullptr) AQ_TRY(check_sampling(sampling, n));
  if (d2t != nullptr) AQ_TRY(check_pointer("d2t", d2t, sizeof(int32_t)));
  return head_topk({model, hidden, row_index, n, k, sampling, d2t, ids, logprobs});
}

int aq_head_logprobs(const AqModel* model, const float* hidden, const int32_t* row_index, int32_t n, int32_t k,
                     int32_t* ids, float* logprobs, const int32_t* chosen, float* chosen_logprobs, int32_t* ranks) {
  AQ_TRY(check_pointer("chosen", chosen, sizeof(int32_t)));
  AQ_TRY(check_pointer("chosen_logprobs", chosen_logprobs, sizeof(float)));
  AQ_TRY(check_pointer("ranks", ranks, sizeof(int32_t)));
  return head_topk({model, hidden, row_index, n, k, nullptr, nullptr, ids, logprobs, chosen, chosen_logprobs, ranks});
}

int aq_draw(const float* logits, int32_t n, int32_t vocab, const AqSampling* sampling, int32_t* tokens) {
  AQ_REQUIRE(n >= 0, "n=%d: must be at least 0", n);
  AQ_REQUIRE(vocab > 0, "vocab=%d: must be positive", vocab);
  AQ_TRY(check_pointer("logits", logits, sizeof(float)));
  Lock lock(engine().mutex);
  DrawJob job{};
  job.given_logits = logits, job.n = n, job.vocab = vocab, job.sampling = sampling, job.tokens = tokens;
  return draw(job);
}

int aq_linear(const AqLinear* linear, const float* x, int32_t rows, float* y) {
  AQ_TRY(check_pointer("linear", linear, alignof(AqLinear)));
  AQ_TRY(check_parts("weight", *linear, 0, 0));
  AQ_REQUIRE(rows >= 0, "rows=%d: must be at least 0", rows);
  AQ_TRY(check_pointer("x", x, sizeof(float)));
  AQ_TRY(check_pointer("y", y, sizeof(float)));
  Lock lock(engine().mutex);
  LinearJob job{linear, x, rows, y, nullptr};
  if (host::takes_rounded(linear->dtype)) AQ_RESERVE(job.rounded, normed, Rounded, (size_t)rows * linear->k);
  if (host::takes_codes(linear->dtype))
    AQ_RESERVE(job.rounded, codes, Codes, norm_copies(rows, num_threads()) * rows * linear->k / 32);
  run_job<LinearJob, &Kernels::linear>(job);
  return 0;
}

int aq_rms_norm(const float* x, const float* weight, int32_t rows, int32_t width, float eps, float* y) {
  AQ_REQUIRE(rows >= 0, "rows=%d: must be at least 0", rows);
  AQ_REQUIRE(width > 0 && width % 16 == 0, "width=%d: must be a positive multiple of 16", width);
  AQ_TRY(check_pointer("x", x, sizeof(float)));
  AQ_TRY(check_pointer("weight", weight, sizeof(float)));
  AQ_TRY(check_pointer("y", y, sizeof(float)));
  kernels().rms_norm(x, weight, rows, width, eps, y);
  return 0;
}

int aq_fuse(const AqFusion* fusion, const float* features, int32_t rows, float* g) {
  AQ_TRY(check_pointer("fusion", fusion, alignof(AqFusion)));
  AQ_TRY(check_linear("fc", fusion->fc, 0, 0));
  AQ_TRY(check_pointer("features", features, sizeof(float)));
  AQ_REQUIRE(rows >= 0, "rows=%d: must be at least 0", rows);
  const PartTimer timer(kFusionPart);
  const int width = fusion->fc.k, parts = fusion->num_parts;
  std::vector<float> normed;
  const auto norm = [&](const float* weight, int at, int count) {
    for (int r = 0; r < rows; r++)
      kernels().rms_norm(features + (size_t)r * width + at, weight, 1, count, fusion->eps,
                         normed.data() + (size_t)r * width + at);
  };
  if (fusion->norm != nullptr || fusion->part_norms != nullptr) normed.resize((size_t)rows * width);
  if (fusion->norm != nullptr) {
    AQ_TRY(check_pointer("norm", fusion->norm, sizeof(float)));
    norm(fusion->norm, 0, width);
    features = normed.data();
  }
  if (fusion->part_norms != nullptr) {
    AQ_TRY(check_pointer("part_norms", fusion->part_norms, sizeof(float)));
    AQ_REQUIRE(parts > 0 && width % (16 * parts) == 0, "num_parts=%d: must divide fc.k=%d into multiples of 16", parts,
               width);
    for (int i = 0; i < parts; i++) norm(fusion->part_norms + i * (width / parts), i * (width / parts), width / parts);
    features = normed.data();
  }
  return aq_linear(&fusion->fc, features, rows, g);
}

int aq_swiglu(const float* gate_up, int32_t rows, int32_t width, float* y) {
  AQ_REQUIRE(rows >= 0, "rows=%d: must be at least 0", rows);
  AQ_REQUIRE(width > 0 && width % 16 == 0, "width=%d: must be a positive multiple of 16", width);
  AQ_TRY(check_pointer("gate_up", gate_up, sizeof(float)));
  AQ_TRY(check_pointer("y", y, sizeof(float)));
  kernels().swiglu(gate_up, rows, width, y);
  return 0;
}

int aq_rope(float* x, const int32_t* positions, const float* inv_freq, float scale, int32_t rows, int32_t heads,
            int32_t head_dim) {
  AQ_REQUIRE(rows >= 0, "rows=%d: must be at least 0", rows);
  AQ_REQUIRE(heads > 0, "heads=%d: must be positive", heads);
  AQ_REQUIRE(head_dim > 0 && head_dim % 16 == 0 && head_dim <= kMaxHeadDim,
             "head_dim=%d: must be a positive multiple of 16 up to %d", head_dim, kMaxHeadDim);
  AQ_TRY(check_pointer("x", x, sizeof(float)));
  AQ_TRY(check_pointer("positions", positions, sizeof(int32_t)));
  AQ_TRY(check_pointer("inv_freq", inv_freq, sizeof(float)));
  kernels().rope(x, positions, inv_freq, scale, rows, heads, head_dim);
  return 0;
}

int aq_write_kv(const AqKV* kv, int32_t layer, const AqRows* rows, const float* k, const float* v) {
  AQ_TRY(check_kv(kv, 0, 0));
  AQ_REQUIRE(layer >= 0 && layer < kv->num_layers, "layer=%d: must be in [0, %d)", layer, kv->num_layers);
  AQ_TRY(check_rows(rows, *kv, 0, false));
  AQ_TRY(check_pointer("k", k, sizeof(float)));
  AQ_TRY(check_pointer("v", v, sizeof(float)));
  kernels().write_kv(*kv, layer, *rows, k, v);
  return 0;
}

int aq_attention(const AqKV* kv, int32_t layer, const AqRows* rows, const float* q, int32_t num_heads, float scale,
                 int32_t window, const float* sinks, int32_t arithmetic, float* out) {
  AQ_TRY(check_kv(kv, 0, 0));
  AQ_REQUIRE(layer >= 0 && layer < kv->num_layers, "layer=%d: must be in [0, %d)", layer, kv->num_layers);
  AQ_REQUIRE(num_heads > 0 && num_heads % kv->num_kv_heads == 0 && num_heads / kv->num_kv_heads <= kTileQueries,
             "num_heads=%d: must be a multiple, up to %d, of num_kv_heads=%d", num_heads, kTileQueries,
             kv->num_kv_heads);
  AQ_REQUIRE(window >= 0, "window=%d: must be at least 0 (none)", window);
  const bool is_dot = host::is_dot(arithmetic), is_tiled = host::is_tiled(arithmetic);
  AQ_REQUIRE(is_dot || is_tiled ? host::holds_rounded(kv->dtype) && (is_tiled || has_dot()) : arithmetic == 0,
             "arithmetic=%d: must be 0 (float32), or over keys in bfloat16 28 (tiles) or, where the CPU has it, 2 (dot "
             "product)",
             arithmetic);
  AQ_TRY(check_rows(rows, *kv, 0, true));
  AQ_TRY(check_pointer("q", q, sizeof(float)));
  AQ_TRY(check_pointer("out", out, sizeof(float)));
  if (rows->num_rows == 0) return 0;
  Lock lock(engine().mutex);
  AttentionJob job{};
  AQ_TRY(plan_attention(*kv, *rows, num_heads, &job));
  job.q = q, job.q_stride = num_heads * kv->head_dim, job.out = out, job.sinks = sinks;
  job.layer = layer, job.window = window, job.scale = scale;
  job.pair_block = pair_block(is_dot, is_tiled);
  run_job<AttentionJob, &Kernels::attention>(job);
  return 0;
}

int aq_exp_log(const float* x, int32_t count, float* exps, float* logs) {
  AQ_REQUIRE(count >= 0, "count=%d: must be at least 0", count);
  AQ_TRY(check_pointer("x", x, sizeof(float)));
  AQ_TRY(check_pointer("exps", exps, sizeof(float)));
  AQ_TRY(check_pointer("logs", logs, sizeof(float)));
  kernels().exp_log(x, count, exps, logs);
  return 0;
}

int aq_gumbel(uint64_t seed, int32_t position, int32_t count, float* noise) {
  AQ_REQUIRE(count >= 0, "count=%d: must be at least 0", count);
  AQ_TRY(check_pointer("noise", noise, sizeof(float)));
  kernels().gumbel(seed, position, count, noise);
  return 0;
}

int aq_move_kv(const AqKV* kv, const int32_t* page_table, int32_t table_stride, const int32_t* slots,
               const int32_t* src, const int32_t* dst, int32_t count) {
  AQ_TRY(check_kv(kv, 0, 0));
  AQ_REQUIRE(count >= 0, "count=%d: must be at least 0", count);
  AQ_REQUIRE(table_stride > 0, "table_stride=%d: must be positive", table_stride);
  AQ_TRY(check_pointer("page_table", page_table, sizeof(int32_t)));
  AQ_TRY(check_pointer("slots", slots, sizeof(int32_t)));
  AQ_TRY(check_pointer("src", src, sizeof(int32_t)));
  AQ_TRY(check_pointer("dst", dst, sizeof(int32_t)));
  for (int i = 0; i < count; i++) {
    AQ_REQUIRE(slots[i] >= 0, "slots[%d]=%d: must be at least 0", i, slots[i]);
    const int32_t* table = page_table + (size_t)slots[i] * table_stride;
    AQ_TRY(check_index("src", i, src[i], *kv, table, table_stride));
    AQ_TRY(check_index("dst", i, dst[i], *kv, table, table_stride));
  }
  for (int i = 0; i < count; i++) {
    const int32_t* table = page_table + (size_t)slots[i] * table_stride;
    host::with_keys(kv->dtype,
                    [&](auto* element) { move_keys<host::ValueOf<decltype(element)>>(*kv, table, src[i], dst[i]); });
  }
  return 0;
}

}  // extern "C"
