// A mixture of experts: which experts each row uses, their MLPs over the rows that use them, and the sum of each row.
// Every expert that any row uses is read once. How rows and experts are shared between workers changes no result: the
// linears give a row the same bits whatever rows are beside it, and a row adds its experts in its own order.
#pragma once
#include "linear.h"

namespace AQ_NAMESPACE {

using aq::ForwardJob;

constexpr int kMostExperts = aq::kMostExperts;  // of a row

// The experts of all rows. A pair is a row and one of its experts; the pairs of an expert stand together, rows in
// order. Every worker makes a copy of its own.
struct Routing {
  int32_t* rows;     // [pairs] the row of each pair, ordered by expert
  int32_t* places;   // [row][per_token] where in this order the row's pairs stand, the best expert first
  int32_t* begins;   // [count + 1] the first pair of each expert
  float* weights;    // [row][per_token]
};

static Routing routing_of(const Worker& worker, const ForwardJob& job, const AqExperts& experts, int rows) {
  const size_t pairs = (size_t)rows * experts.per_token;
  int32_t* at = job.experts.routing + worker.index * aq::routing_words(experts, rows);
  return Routing{at, at + pairs, at + 3 * pairs, (float*)at + 2 * pairs};
}

// The per_token highest logits of a row in descending order, and the softmax that gives their weights.
static void choose(const AqExperts& experts, const float* logits, int32_t* ids, float* weights) {
  alignas(64) float best[kMostExperts];
  const int most = experts.per_token;
  int count = 0;
  for (int e = 0; e < experts.count; e++) {
    if (count == most && logits[e] <= best[most - 1]) continue;
    int at = count < most ? count++ : most - 1;
    for (; at > 0 && !(logits[e] <= best[at - 1]); at--) best[at] = best[at - 1], ids[at] = ids[at - 1];
    best[at] = logits[e], ids[at] = e;
  }
  const auto exps = [&](const float* from, int left) {
    alignas(64) float lane[16];
    for (int i = 0; i < 16; i++) lane[i] = i < left ? from[i] : -kInfinity;
    return exp(sub(load(lane), set1(best[0])));
  };
  Vec total = zero();
  const float* among = experts.over_all ? logits : best;
  const int width = experts.over_all ? experts.count : most;
  for (int i = 0; i < width; i += 16) total = add(total, exps(among + i, width - i));
  alignas(64) float lane[16];
  store(lane, div(exps(best, most), set1(sum_lanes(total))));
  for (int i = 0; i < most; i++) weights[i] = lane[i];
}

static void route(const AqExperts& experts, const float* logits, int rows, const Routing& to) {
  const int most = experts.per_token, pairs = rows * most;
  for (int e = 0; e <= experts.count; e++) to.begins[e] = 0;
  for (int r = 0; r < rows; r++)
    choose(experts, logits + (size_t)r * experts.count, to.places + (size_t)r * most, to.weights + (size_t)r * most);
  for (int i = 0; i < pairs; i++) to.begins[to.places[i] + 1]++;
  for (int e = 0; e < experts.count; e++) to.begins[e + 1] += to.begins[e];
  for (int i = 0; i < pairs; i++) {
    const int place = to.begins[to.places[i]]++;
    to.rows[place] = i / most, to.places[i] = place;
  }
  for (int e = experts.count; e > 0; e--) to.begins[e] = to.begins[e - 1];
  to.begins[0] = 0;
}

// `count` rows of x [*, linear.k] as the linear takes them, those that `rows` names or else the first ones. They are
// put into `buffer` unless they lie together as they are wanted.
static const void* gathered(const AqLinear& linear, const float* x, const int32_t* rows, int count, float* buffer) {
  const size_t width = linear.k;
  const bool is_coded = takes_codes(linear.dtype), is_rounded = takes_rounded(linear.dtype);
  if (!is_coded && !is_rounded && (rows == nullptr || count == 1)) return x + (rows == nullptr ? 0 : rows[0]) * width;
  for (size_t i = 0; i < (size_t)count; i++) {
    const float* row = x + (rows == nullptr ? i : rows[i]) * width;
    if (is_coded) store_codes((Codes*)buffer + i * (width / 32), row, linear.k);
    else if (is_rounded)
      for (size_t j = 0; j < width; j += 16) store((Rounded*)buffer + i * width + j, load(row + j));
    else memcpy(buffer + i * width, row, width * sizeof(float));
  }
  return buffer;
}

// Expert e's linear, from that of expert 0.
AQ_INLINE AqLinear expert_of(const AqLinear& first, int64_t num_bytes, int e) {
  AqLinear own = first;
  own.weight = (const char*)first.weight + e * num_bytes;
  if (first.bias != nullptr) own.bias = first.bias + (size_t)e * first.n;
  return own;
}

// Runs one linear of every expert over its rows. Workers share the panels of all experts, each counted once per tile of
// rows. epilogue(pair, column, width, sums) as in linear_rows.
template <class Epilogue>
static void expert_rows(const Worker& worker, const AqExperts& experts, const Routing& routing, const AqLinear& first,
                        int64_t num_bytes, const float* x, bool is_gathered, float* buffer, const Epilogue& epilogue) {
  const int blocks = first.n / 16, panels = (blocks + kPanel - 1) / kPanel;
  const Tiling tiling = tiling_of(first);
  const auto tiles_of = [&](int e) { return tiling.num_tiles(routing.begins[e + 1] - routing.begins[e]); };
  int total = 0, before = 0;
  for (int e = 0; e < experts.count; e++) total += tiles_of(e) * panels;
  const Share mine = share(worker, total);
  for (int e = 0; e < experts.count; e++) {
    const int tiles = tiles_of(e), begin = routing.begins[e], rows = routing.begins[e + 1] - begin;
    const auto panel_of = [&](int unit) {
      const int panel = unit <= before ? 0 : (unit - before + tiles - 1) / tiles;
      return panel < panels ? panel : panels;
    };
    if (rows == 0 || mine.end <= before || mine.begin >= before + tiles * panels) {
      before += tiles * panels;
      continue;
    }
    const int end = panel_of(mine.end) * kPanel;
    const Share own{panel_of(mine.begin) * kPanel, end < blocks ? end : blocks};
    before += tiles * panels;
    if (own.begin >= own.end) continue;
    const void* input = gathered(first, is_gathered ? x : x + (size_t)begin * first.k,
                                 is_gathered ? routing.rows + begin : nullptr, rows, buffer);
    part_rows(expert_of(first, num_bytes, e), own, 0, input, rows,
              [&](int row, int column, int width, const float* sums) { epilogue(begin + row, column, width, sums); });
  }
}

// hidden += the weighted sum of each row's experts.
static void add_experts(const Worker& worker, const AqExperts& experts, const Routing& routing, const float* outputs,
                        int rows, int width, float* hidden) {
  const int runs = width / 16, most = experts.per_token;
  const Share mine = share(worker, rows * runs);
  for (int i = mine.begin; i < mine.end; i++) {
    const size_t row = i / runs, column = (size_t)(i % runs) * 16;
    Vec sum = zero();
    for (int j = 0; j < most; j++) {
      const size_t place = routing.places[row * most + j];
      sum = fma(set1(routing.weights[row * most + j]), load(outputs + place * width + column), sum);
    }
    float* to = hidden + row * width + column;
    store(to, add(load(to), sum));
  }
}

// The MLP of a layer with experts, from the residual stream to the residual stream. The last barrier is the caller's.
static void mixture(const Worker& worker, const ForwardJob& job, const AqLayer& layer, int rows) {
  const AqMlp& mlp = layer.mlp;
  const AqExperts& experts = *mlp.experts;
  const int width = job.model->hidden, inner = job.model->intermediate;
  const Routing routing = routing_of(worker, job, experts, rows);
  float* buffer = job.experts.inputs + worker.index * job.experts.input_floats;
  const void* normed =
      norm_rows(worker, job.hidden, nullptr, rows, layer.post_norm, job.model->eps, experts.router, job.normed);
  linear_store(experts.router, share_blocks(worker, experts.router), normed, rows, job.experts.logits);
  worker.barrier();
  route(experts, job.experts.logits, rows, routing);
  for (int e = 0; e < experts.count && worker.index == 0; e++)
    *job.num_experts += routing.begins[e + 1] > routing.begins[e];
  expert_rows(worker, experts, routing, mlp.gate_up, experts.gate_up_bytes, (const float*)normed, true, buffer,
              [&](int pair, int column, int width, const float* sums) {
                store_activated(mlp, sums, width, job.gate_up + (size_t)pair * inner + column / 2);
              });
  worker.barrier();
  expert_rows(worker, experts, routing, mlp.down, experts.down_bytes, job.gate_up, false, buffer,
              [&](int pair, int column, int width, const float* sums) {
                memcpy(job.experts.outputs + (size_t)pair * job.model->hidden + column, sums, width * sizeof(float));
              });
  worker.barrier();
  add_experts(worker, experts, routing, job.experts.outputs, rows, width, job.hidden);
}

}  // namespace AQ_NAMESPACE
