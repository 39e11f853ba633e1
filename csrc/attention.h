// Attention over paged keys, each row along its own path (ARCHITECTURE.md, decision 3).
//
// In the second arithmetic queries and weights are rounded to bfloat16, and a block of keys is put in pairs for the dot
// product, channels for the scores and positions for the values, where one that is not seen counts as 0 (dot.cpp).
//
// A row sees positions [low, high): below context_len through the page table, from there on through its tail. Blocks
// of 64 absolute positions are reduced to (maximum, sum, accumulator), each a function of the block's keys in position
// order alone; blocks are folded in order within spans of kSpan positions, and spans in order. Since that shape is
// fixed by absolute positions, a row gets the same bits as a tree node, a decoded token or part of a prompt, and spans
// may be computed by different workers.
//
// A block that lies wholly in the shared context is read once for all rows and heads of a tile; the others (the edges
// of a row's range, and whatever its tail reaches) are put together row by row.
#pragma once
#include "linear.h"

namespace AQ_NAMESPACE {

using aq::AttentionJob;
using aq::Keys;
using aq::kGroups;
using aq::kSpan;
using aq::kTileQueries;

// What keys stored as S are multiplied with, how many channels or positions that takes at once, and how many S these are.
template <class S> struct Factor {
  using type = float;
  static constexpr int kCount = 1, kElements = 1;
};
template <> struct Factor<Pair> {
  using type = Pair;
  static constexpr int kCount = 2, kElements = 1;
};
template <> struct Factor<Unpaired> {
  using type = Pair;
  static constexpr int kCount = 2, kElements = 2;
};
template <class S> using FactorOf = typename Factor<S>::type;

// 16 channels of the positions of one step.
template <class S> AQ_INLINE auto values_at(const Keys<S>& keys, int step, int dim) { return load(keys.v[step] + dim); }

#if defined(AQ_DOT)
// Elements of two runs of 16, in turn.
AQ_INLINE __m512i interleave(__m512i runs) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), runs);
}
AQ_INLINE __m512i interleave(const void* first, const void* second) {
  const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first));
  return interleave(_mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)second), 1));
}
AQ_INLINE __m512bh load(const Unpaired* p) { return (__m512bh)interleave(_mm512_loadu_si512(p)); }
AQ_INLINE __m512bh values_at(const Keys<Unpaired>& keys, int step, int dim) {
  return (__m512bh)interleave(keys.v[2 * step] + dim, keys.v[2 * step + 1] + dim);
}
#endif

// Softmax state of some queries: maximum and sum [queries], accumulator [queries][dim].
struct State {
  float *maximum, *sum, *accumulator;
};

AQ_INLINE State offset(State s, int query, int dim) {
  return State{s.maximum + query, s.sum + query, s.accumulator + (size_t)query * dim};
}

static void reset(State s, int queries, int dim) {
  for (int i = 0; i < queries; i++) s.maximum[i] = -kInfinity, s.sum[i] = 0.0f;
  memset(s.accumulator, 0, (size_t)queries * dim * sizeof(float));
}

// Folds one query's (maximum, sum, accumulator) of later positions into `s`. From an empty state this copies exactly:
// the weights are 0 and 1. A part without keys (sum 0) changes nothing.
static void fold(State s, State later, int dim) {
  if (*later.sum == 0.0f) return;
  const float top = *s.maximum > *later.maximum ? *s.maximum : *later.maximum;
  const float a = exp1(*s.maximum - top), b = exp1(*later.maximum - top);
  *s.maximum = top;
  *s.sum = *s.sum * a + *later.sum * b;
  for (int d = 0; d < dim; d += 16)
    store(s.accumulator + d, fma(load(s.accumulator + d), set1(a), mul(load(later.accumulator + d), set1(b))));
}

// Writes one query's result at element `at` of the output.
static void finish(const AttentionJob& job, State s, int dim, const float* sink, size_t at) {
  if (sink != nullptr) {  // a logit without a value
    const float top = *sink > *s.maximum ? *sink : *s.maximum;
    const float a = exp1(*s.maximum - top);
    *s.sum = *s.sum * a + exp1(*sink - top);
    for (int d = 0; d < dim; d += 16) store(s.accumulator + d, mul(load(s.accumulator + d), set1(a)));
  }
  for (int d = 0; d < dim; d += 16) {
    const Vec mean = div(load(s.accumulator + d), set1(*s.sum));
    if (job.is_rounded) store((uint16_t*)job.out + at + d, mean);
    else store((float*)job.out + at + d, mean);
  }
}

template <class S, int QUERIES, int GROUPS>
AQ_INLINE void score_groups(const FactorOf<S>* q, int steps, const S* const* k, const S* const* next_k, float* scores) {
  const S *keys[GROUPS], *next[GROUPS];
  Vec sum[QUERIES][GROUPS];
#pragma GCC unroll 8
  for (int g = 0; g < GROUPS; g++) keys[g] = k[g], next[g] = next_k[g];
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) sum[m][g] = zero();
  for (int d = 0; d < steps; d++) {
    const int at = d * 16 * Factor<S>::kElements;
    decltype(load(keys[0])) key[GROUPS];
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) key[g] = load(keys[g] + at), prefetch(next[g] + at);
#pragma GCC unroll 8
    for (int m = 0; m < QUERIES; m++) {
      const auto value = set1(q[m * steps + d]);
#pragma GCC unroll 8
      for (int g = 0; g < GROUPS; g++) sum[m][g] = fma(value, key[g], sum[m][g]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) store(scores + m * AQ_BLOCK + g * 16, sum[m][g]);
}

// s.accumulator = s.accumulator * old_weight + (sum of p v) * new_weight for DIMS * 16 channels.
template <class S, int QUERIES, int DIMS>
AQ_INLINE void weigh_values(const FactorOf<S>* p, const Keys<S>& keys, int first_dim, int dim, const float* old_weight,
                            const float* new_weight, float* accumulator) {
  Vec sum[QUERIES][DIMS];
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
    for (int d = 0; d < DIMS; d++) sum[m][d] = zero();
  constexpr int kCount = Factor<S>::kCount, kSteps = AQ_BLOCK / kCount, kGroupSteps = 16 / kCount;
  for (int j = keys.from / kCount; j < (keys.to + kCount - 1) / kCount; j++) {
    constexpr int kElements = Factor<S>::kElements;
    const S* next = keys.next_v[j / kGroupSteps] + (j % kGroupSteps * dim + first_dim) * kElements;
    decltype(values_at(keys, j, 0)) value[DIMS];
#pragma GCC unroll 8
    for (int d = 0; d < DIMS; d++) value[d] = values_at(keys, j, first_dim + d * 16), prefetch(next + d * 16 * kElements);
#pragma GCC unroll 8
    for (int m = 0; m < QUERIES; m++) {
      const auto weight = set1(p[m * kSteps + j]);
#pragma GCC unroll 8
      for (int d = 0; d < DIMS; d++) sum[m][d] = fma(weight, value[d], sum[m][d]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
    for (int d = 0; d < DIMS; d++) {
      float* a = accumulator + m * dim + first_dim + d * 16;
      store(a, fma(load(a), set1(old_weight[m]), mul(sum[m][d], set1(new_weight[m]))));
    }
}

// Scales the raw scores of one query and returns their maximum; lanes outside [from, to) become -inf whatever they held. In
// pairs only the maximum is scaled.
template <class S>
static float mask_scores(float* p, int from, int to, float scale) {
  constexpr bool kScales = Factor<S>::kCount == 1;
  const bool is_whole = from == 0 && to == AQ_BLOCK;
  Vec s[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g++) {
    s[g] = load(p + g * 16);
    if (kScales) s[g] = mul(s[g], set1(scale));
    if (!is_whole) {
      const Vec position = add(to_float(iota()), set1(16.0f * g));
      const auto visible = both(less(position, set1((float)to)), less(set1((float)from - 1.0f), position));
      s[g] = select(visible, s[g], set1(-kInfinity));
    }
    if (kScales || !is_whole) store(p + g * 16, s[g]);
  }
  return max_lanes(max(max(s[0], s[1]), max(s[2], s[3]))) * (kScales ? 1.0f : scale);
}

// Turns scores into weights exp(score - maximum), in pairs rounded to bfloat16 in the same memory, and returns their sum.
AQ_INLINE float weigh_scores(float* p, float maximum, float, float* weights) {
  Vec s[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g++) {
    s[g] = exp(sub(load(p + g * 16), set1(maximum)));
    store(weights + g * 16, s[g]);
  }
  return sum_lanes(add(add(s[0], s[1]), add(s[2], s[3])));
}
#if defined(AQ_DOT)
// 2^x within 4e-6, exactly 1 at 0: a weight keeps eight bits. The polynomial is 1 and 2 at the ends of [0, 1].
AQ_INLINE Vec exp2_coarse(Vec x) {
  const Vec r = _mm512_reduce_ps(x, 1);  // from the integer below
  Vec p = set1(0.01355575f);
  p = fma(p, r, set1(0.05203237f));
  p = fma(p, r, set1(0.24137976f));
  p = fma(p, r, set1(0.69303212f));
  p = fma(p, r, set1(1.0f));
  return _mm512_scalef_ps(p, x);
}
AQ_INLINE float weigh_scores(float* p, float maximum, float scale, Pair* weights) {
  constexpr float kLog2E = 1.44269504f;
  const Vec factor = set1(scale * kLog2E), top = set1(-maximum * kLog2E);
  Vec s[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; g++) {
    s[g] = exp2_coarse(fma(load(p + g * 16), factor, top));
    _mm256_store_si256((__m256i*)(weights + g * 8), (__m256i)_mm512_cvtneps_pbh(s[g]));
  }
  return sum_lanes(add(add(s[0], s[1]), add(s[2], s[3])));
}
#endif

// Folds one block into the state of QUERIES queries q [QUERIES][dim] that see the same keys.
template <class S, int QUERIES>
static __attribute__((noinline)) void block_tile(const FactorOf<S>* q, int dim, const Keys<S>& keys, float scale, State s) {
  constexpr int kWide = blocks_for(QUERIES);
  alignas(64) float p[QUERIES * AQ_BLOCK];
  const int steps = dim / Factor<S>::kCount;
  const int last_group = (keys.to + 15) / 16;
  for (int g = keys.from / 16; g < last_group;) {
    const int left = last_group - g;
    if (kWide >= 4 && left >= 4) score_groups<S, QUERIES, kWide >= 4 ? 4 : 1>(q, steps, keys.k + g, keys.next_k + g, p + g * 16), g += 4;
    else if (kWide >= 2 && left >= 2) score_groups<S, QUERIES, kWide >= 2 ? 2 : 1>(q, steps, keys.k + g, keys.next_k + g, p + g * 16), g += 2;
    else score_groups<S, QUERIES, 1>(q, steps, keys.k + g, keys.next_k + g, p + g * 16), g += 1;
  }
  // One lane per query; lanes from QUERIES on hold values that nobody reads.
  float maximum[16] = {}, top[16], old_weight[16], new_weight[16];
  for (int m = 0; m < QUERIES; m++) maximum[m] = mask_scores<S>(p + m * AQ_BLOCK, keys.from, keys.to, scale);
  const Vec old_top = load(s.maximum), new_top = max(old_top, load(maximum));
  store(top, new_top);
  store(old_weight, exp(sub(old_top, new_top)));
  store(new_weight, exp(sub(load(maximum), new_top)));
  FactorOf<S>* weights = (FactorOf<S>*)p;
  for (int m = 0; m < QUERIES; m++) {
    FactorOf<S>* own = weights + m * (AQ_BLOCK / Factor<S>::kCount);
    s.sum[m] = s.sum[m] * old_weight[m] + weigh_scores(p + m * AQ_BLOCK, maximum[m], scale, own) * new_weight[m];
    s.maximum[m] = top[m];
  }
  for (int d = 0; d < dim;) {
    const int left = (dim - d) / 16;
    if (kWide >= 4 && left >= 4)
      weigh_values<S, QUERIES, kWide >= 4 ? 4 : 1>(weights, keys, d, dim, old_weight, new_weight, s.accumulator), d += 64;
    else if (kWide >= 2 && left >= 2)
      weigh_values<S, QUERIES, kWide >= 2 ? 2 : 1>(weights, keys, d, dim, old_weight, new_weight, s.accumulator), d += 32;
    else
      weigh_values<S, QUERIES, 1>(weights, keys, d, dim, old_weight, new_weight, s.accumulator), d += 16;
  }
}

template <class S>
static void block_update(const FactorOf<S>* q, int queries, int dim, const Keys<S>& keys, float scale, State s) {
  const int num_tiles = (queries + kTileRows - 1) / kTileRows;
  for (int t = 0; t < num_tiles; t++) {
    const int first = queries * t / num_tiles, last = queries * (t + 1) / num_tiles;
    const FactorOf<S>* from = q + (size_t)first * (dim / Factor<S>::kCount);
    const State state = offset(s, first, dim);
    switch (last - first) {
      case 1: block_tile<S, 1>(from, dim, keys, scale, state); break;
      case 2: block_tile<S, 2>(from, dim, keys, scale, state); break;
      case 3: block_tile<S, 3>(from, dim, keys, scale, state); break;
      case 4: block_tile<S, 4>(from, dim, keys, scale, state); break;
      case 5: block_tile<S, 5>(from, dim, keys, scale, state); break;
      default: block_tile<S, 6>(from, dim, keys, scale, state); break;
    }
  }
}

// Where the keys of one layer and head lie.
template <class S>
struct Pages {
  const S *k, *v;
  const int32_t* table;
  int page_size, dim;
  size_t page_stride;

  Pages(const AqKV& kv, int layer, int head, const int32_t* page_table)
      : table(page_table), page_size(kv.page_size), dim(kv.head_dim),
        page_stride((size_t)kv.num_kv_heads * kv.page_size * kv.head_dim) {
    const size_t base = (size_t)layer * kv.num_pages * page_stride + (size_t)head * page_size * dim;
    k = (const S*)kv.k + base, v = (const S*)kv.v + base;
  }
  size_t page(int index) const { return table[index / page_size] * page_stride; }
  const S* key_group(int index) const { return k + page(index) + (size_t)(index % page_size / 16) * 16 * dim; }
  const S* value(int index) const { return v + page(index) + (size_t)(index % page_size) * dim; }
};

// The range of positions a row sees, and the KV index of each.
struct Path {
  int low, high, context_len;
  const int32_t* tail;

  Path(const AqRows& rows, int row, int window)
      : low(rows.key_start[row]), high(rows.context_len[row] + rows.tail_len[row]), context_len(rows.context_len[row]),
        tail(rows.tail + (size_t)row * rows.tail_stride) {
    if (window > 0 && low < high - window) low = high - window;
  }
  int index(int position) const { return position < context_len ? position : tail[position - context_len]; }
  bool shares(int block) const { return low <= block && block + AQ_BLOCK <= context_len; }
};

// The block of a row at an edge of its range or in its tail. A group of keys is used in place where every visible
// position is its own KV index, and otherwise put together in `gathered` [kGroups][dim][16].
template <class S>
static void gather(const Pages<S>& pages, const Path& path, int block, S* gathered, Keys<S>* keys) {
  keys->from = path.low > block ? path.low - block : 0;
  keys->to = path.high < block + AQ_BLOCK ? path.high - block : AQ_BLOCK;
  const int dim = pages.dim;
  for (int g = 0; g < kGroups; g++) keys->next_k[g] = pages.k, keys->next_v[g] = pages.v;  // nothing worth fetching
  for (int g = keys->from / 16; g * 16 < keys->to; g++) {
    const int first = g * 16 > keys->from ? g * 16 : keys->from, last = g * 16 + 16 < keys->to ? g * 16 + 16 : keys->to;
    bool in_place = true;
    for (int j = first; j < last; j++) {
      const int index = path.index(block + j);
      keys->v[j] = pages.value(index);
      in_place &= index == block + j;
    }
    if (in_place) {
      keys->k[g] = pages.key_group(block + first);
      continue;
    }
    S* group = gathered + (size_t)g * 16 * dim;
    keys->k[g] = group;
    if (block + first < path.context_len) memcpy(group, pages.key_group(block + first), 16 * dim * sizeof(S));
    for (int j = first; j < last; j++) {
      const int index = path.index(block + j);
      if (block + j < path.context_len) continue;
      const S* from = pages.key_group(index) + index % 16;
      for (int d = 0; d < dim; d++) group[d * 16 + j % 16] = from[d * 16];
    }
  }
}

// A block of the shared context; `next` is the block that will be read after it.
template <class S>
static void share_block(const Pages<S>& pages, int block, int next, Keys<S>* keys) {
  keys->from = 0, keys->to = AQ_BLOCK;
  for (int g = 0; g < kGroups; g++) {
    keys->k[g] = pages.key_group(block + g * 16);
    keys->next_k[g] = pages.key_group(next + g * 16), keys->next_v[g] = pages.value(next + g * 16);
    const S* v = pages.value(block + g * 16);
    for (int j = 0; j < 16; j++) keys->v[g * 16 + j] = v + j * pages.dim;
  }
}

// One tile (rows of a slot) and kv head, spans [first_span, last_span).
template <class S>
struct TileWork {
  const AttentionJob& job;
  const aq::Tile& tile;
  const int head, dim, group, queries;
  const Pages<S> pages;
  float* q;       // [queries, dim], or pairs of the second arithmetic
  S* gathered;    // [kGroups][dim][16]
  Pair* paired;   // keys, then values of a block in pairs
  State span_state, total;

  TileWork(const AttentionJob& j, const aq::Tile& t, int kv_head, float* workspace)
      : job(j), tile(t), head(kv_head), dim(j.kv->head_dim), group(j.num_heads / j.kv->num_kv_heads),
        queries(t.num_rows * group),
        pages(*j.kv, j.layer, kv_head, j.rows->page_table + (size_t)j.rows->slots[t.row] * j.rows->table_stride) {
    q = workspace;
    gathered = (S*)(q + (size_t)kTileQueries * dim);
    float* rest = (float*)(gathered + AQ_BLOCK * dim * (sizeof(float) / sizeof(S)));
    span_state = State{rest, rest + kTileQueries, rest + 2 * kTileQueries};
    rest += (size_t)kTileQueries * (dim + 2);
    total = State{rest, rest + kTileQueries, rest + 2 * kTileQueries};
    paired = (Pair*)(rest + (size_t)kTileQueries * (dim + 2));
    for (int r = 0; r < t.num_rows; r++) {
      const float* from = j.q + (size_t)(t.row + r) * j.q_stride + (size_t)kv_head * group * dim;
      const size_t at = (size_t)r * group * dim;
      if (!j.is_dot) memcpy(q + at, from, (size_t)group * dim * sizeof(float));
      for (int i = 0; j.is_dot && i < group * dim; i += 16) store((uint16_t*)q + at + i, load(from + i));
    }
  }

  Path path(int r) const { return Path(*job.rows, tile.row + r, job.window); }

  void run_block(int block) {
    Keys<S> keys;
    int shared = 0;  // consecutive rows, ending before r, that share the block
    for (int r = 0; r <= tile.num_rows; r++) {
      if (r < tile.num_rows && path(r).shares(block)) {
        shared++;
        continue;
      }
      if (shared > 0) {
        const bool more = path(r - 1).shares(block + AQ_BLOCK);
        share_block(pages, block, more ? block + AQ_BLOCK : block, &keys);
        update(r - shared, shared, keys);
        shared = 0;
      }
      if (r == tile.num_rows) break;
      const Path own = path(r);
      if (own.high <= block || own.low >= block + AQ_BLOCK) continue;
      gather(pages, own, block, gathered, &keys);
      update(r, 1, keys);
    }
  }

  void update(int row, int rows, const Keys<S>& keys) {
    const State s = offset(span_state, row * group, dim);
    const size_t at = (size_t)row * group * dim;
    if (job.is_dot) dot_update((const Pair*)q + at / 2, rows * group, keys, s);
    else block_update(q + at, rows * group, dim, keys, job.scale, s);
  }

  void dot_update(const Pair* from, int count, const Keys<uint16_t>& keys, State s) {
    aq::dot_block(from, count, dim, keys, job.scale, paired, s.maximum, s.sum, s.accumulator);
  }
  void dot_update(const Pair*, int, const Keys<float>&, State) {}  // not reached: is_dot has keys in bfloat16

  void run_span(int span, int low, int high) {
    reset(span_state, queries, dim);
    const int begin = low > span * kSpan ? low / AQ_BLOCK * AQ_BLOCK : span * kSpan;
    for (int block = begin; block < high && block < (span + 1) * kSpan; block += AQ_BLOCK) run_block(block);
  }

  void run(int only_span) {
    int low = path(0).low, high = path(0).high;
    for (int r = 1; r < tile.num_rows; r++) {
      const Path own = path(r);
      low = own.low < low ? own.low : low, high = own.high > high ? own.high : high;
    }
    if (only_span >= 0) {
      run_span(only_span, low, high);
      for (int i = 0; i < queries; i++) put_aside(i, only_span);
      return;
    }
    reset(total, queries, dim);
    for (int span = low / kSpan; span * kSpan < high; span++) {
      run_span(span, low, high);
      for (int i = 0; i < queries; i++) fold(offset(total, i, dim), offset(span_state, i, dim), dim);
    }
    for (int i = 0; i < queries; i++) {
      const int h = head * group + i % group;
      finish(job, offset(total, i, dim), dim, job.sinks == nullptr ? nullptr : job.sinks + h,
             ((size_t)(tile.row + i / group) * job.num_heads + h) * dim);
    }
  }

  void put_aside(int query, int span) {
    const size_t row_head = (size_t)(tile.row + query / group) * job.num_heads + head * group + query % group;
    float* to = job.partials + (row_head * job.num_spans + span) * (16 + dim);
    const State from = offset(span_state, query, dim);
    to[0] = *from.maximum, to[1] = *from.sum;
    memcpy(to + 16, from.accumulator, dim * sizeof(float));
  }
};

static void merge_deferred(const AttentionJob& job, int row, int head, float* accumulator) {
  const int dim = job.kv->head_dim;
  float maximum, sum;
  const State total{&maximum, &sum, accumulator};
  reset(total, 1, dim);
  const Path own(*job.rows, row, job.window);
  const size_t row_head = (size_t)row * job.num_heads + head;
  for (int span = own.low / kSpan; span * kSpan < own.high; span++) {
    float* from = job.partials + (row_head * job.num_spans + span) * (16 + dim);
    fold(total, State{from, from + 1, from + 16}, dim);
  }
  finish(job, total, dim, job.sinks == nullptr ? nullptr : job.sinks + head, row_head * dim);
}

// All of some kv heads, spans in order; nobody else is waited for.
template <class S>
static void attend_heads(const AttentionJob& job, Share heads, float* workspace) {
  for (int t = 0; t < job.num_tiles; t++)
    for (int head = heads.begin; head < heads.end; head++) TileWork<S>(job, job.tiles[t], head, workspace).run(-1);
}

template <class S>
static void attention_of(const Worker& worker, const AttentionJob& job) {
  const int heads = job.kv->num_kv_heads, spans = job.deferred ? job.num_spans : 1;
  float* workspace = job.workspace + worker.index * job.workspace_floats;
  const int items = job.num_tiles * heads * spans;
  for (int item = worker.index; item < items; item += worker.count) {
    const int head = item % heads, span = item / heads % spans;
    TileWork<S>(job, job.tiles[item / heads / spans], head, workspace).run(job.deferred ? span : -1);
  }
  if (!job.deferred) return;
  worker.barrier();
  const Share mine = share(worker, job.rows->num_rows * job.num_heads);
  for (int i = mine.begin; i < mine.end; i++) merge_deferred(job, i / job.num_heads, i % job.num_heads, workspace);
}

static void attention(const Worker& worker, const AttentionJob& job) {
  if (job.kv->dtype == AQ_BFLOAT16) attention_of<uint16_t>(worker, job);
  else attention_of<float>(worker, job);
}

}  // namespace AQ_NAMESPACE
