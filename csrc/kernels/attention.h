// Attention over paged keys, each row along its own path (ARCHITECTURE.md, decision 3).
//
// A row sees positions [low, high): below context_len through the page table, from there on through its tail. Blocks
// of 64 absolute positions are reduced to (maximum, sum, accumulator), each a function of the block's keys in position
// order alone; blocks are folded in order within spans of kSpan positions, and spans in order. Since that shape is
// fixed by absolute positions, a row gets the same bits as a tree node, a decoded token or part of a prompt, and spans
// may be computed by different workers.
//
// A block that lies wholly in the shared context is read once for all rows and heads of a tile. Any other block, at an
// edge of a row's range or in its tail, is gathered row by row.
#pragma once
#include "attention_block.h"
#include "linear.h"

namespace AQ_NAMESPACE {

using aq::AttentionJob;
using aq::kSpan;
using aq::kTileQueries;

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
    if (job.is_rounded) store((Rounded*)job.out + at + d, mean);
    else store((float*)job.out + at + d, mean);
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
      : table(page_table),
        page_size(kv.page_size),
        dim(kv.head_dim),
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
      : low(rows.key_start[row]),
        high(rows.context_len[row] + rows.tail_len[row]),
        context_len(rows.context_len[row]),
        tail(rows.tail + (size_t)row * rows.tail_stride) {
    if (window > 0 && low < high - window) low = high - window;
  }
  int index(int position) const { return position < context_len ? position : tail[position - context_len]; }
  bool shares(int block) const { return low <= block && block + AQ_BLOCK <= context_len; }
};

// Gathers the block of a row at an edge of its range or in its tail. A group of keys is read in place if every visible
// position in it equals its KV index; otherwise it is copied to `gathered` [kGroups][dim][16].
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
      : job(j),
        tile(t),
        head(kv_head),
        dim(j.kv->head_dim),
        group(j.num_heads / j.kv->num_kv_heads),
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
      for (int i = 0; j.is_dot && i < group * dim; i += 16) store((Rounded*)q + at + i, load(from + i));
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

  void dot_update(const Pair* from, int count, const Keys<Rounded>& keys, State s) {
    aq::dot_block(from, count, dim, keys, job.scale, paired, s.maximum, s.sum, s.accumulator);
  }
  template <class T> void dot_update(const Pair*, int, const Keys<T>&, State) {
  }  // not reached: is_dot has rounded keys

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

// Computes the attention of some kv heads alone, spans in order, without a barrier.
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
  with_keys(job.kv->dtype, [&](auto* element) { attention_of<ValueOf<decltype(element)>>(worker, job); });
}

}  // namespace AQ_NAMESPACE
