// Attention over paged keys, each row along its own path (docs/decisions, 3).
//
// A row sees positions [low, high): below context_len through the page table, from there on through its tail. Blocks
// of 64 absolute positions are reduced to (maximum, sum, accumulator), each a function of the block's keys in position
// order alone; blocks are folded in order within spans of kSpan positions, and spans in order. Since that shape is
// fixed by absolute positions, a row gets the same bits as a tree node, a decoded token or part of a prompt, and spans
// may be computed by different workers.
//
// A block in the context is read in place, and once for all rows and heads of a tile that see the same of its
// positions. A block that reaches into tails is gathered row by row (attention_keys.h). Keys in eight bits are
// multiplied as integers (attention_codes.h), in one tile for rows that see different positions of a block.
#pragma once
#include "attention_block.h"
#include "attention_keys.h"
#include "linear.h"
#include "round.h"

namespace AQ_NAMESPACE {

using aq::kTileQueries;

static void reset(const State& s, int queries, int dim) {
  for (int i = 0; i < queries; i++) s.maximum[i] = -kInfinity, s.sum[i] = 0.0f;
  memset(s.accumulator, 0, (size_t)queries * dim * sizeof(float));
}

// Folds (maximum, sum, accumulator) of later positions into `s`. From an empty state this copies exactly: the weights
// are 0 and 1. A part without keys (sum 0) changes nothing. Maxima are read 16 at a time.
static void fold(const State& s, const State& later, int queries, int dim) {
  for (int first = 0; first < queries; first += 16) {
    const Vec old_top = load(s.maximum + first), later_top = load(later.maximum + first);
    const Vec new_top = max(old_top, later_top);
    float top[16], a[16], b[16];
    store(top, new_top);
    store(a, exp(sub(old_top, new_top)));
    store(b, exp(sub(later_top, new_top)));
    for (int i = first; i < queries && i < first + 16; i++) {
      if (later.sum[i] == 0.0f) continue;
      s.maximum[i] = top[i - first];
      s.sum[i] = s.sum[i] * a[i - first] + later.sum[i] * b[i - first];
      float *to = s.accumulator + (size_t)i * dim, *from = later.accumulator + (size_t)i * dim;
      const Vec weight = set1(a[i - first]), later_weight = set1(b[i - first]);
      for (int d = 0; d < dim; d += 16) store(to + d, fma(load(to + d), weight, mul(load(from + d), later_weight)));
    }
  }
}

// Writes one query's result at element `at` of the output.
static void finish(const AttentionJob& job, const State& s, int dim, const float* sink, size_t at) {
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

// One tile (rows of a slot) and kv head, spans [first_span, last_span).
template <class S>
struct TileWork {
  const AttentionJob& job;
  const aq::Tile& tile;
  const int head, dim, group, queries;
  static constexpr bool kIsCoded = kIsSame<S, Code>;
  const Pages<S> pages;
  float* q;       // [queries, dim], or pairs of the second arithmetic, or what `coded` points to
  aq::CodedQueries coded;
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
    coded.words = (uint32_t*)q, coded.scales = q + (size_t)kTileQueries * dim / 4;
    coded.minus = (int32_t*)coded.scales + kTileQueries;
    coded.from = coded.minus + kTileQueries, coded.to = coded.from + kTileQueries;
    gathered = (S*)(q + (size_t)kTileQueries * dim);
    float* rest = (float*)(gathered + AQ_BLOCK * dim * (sizeof(float) / sizeof(S)));
    span_state = State{rest, rest + kTileQueries, rest + 2 * kTileQueries};
    rest += (size_t)kTileQueries * (dim + 2);
    total = State{rest, rest + kTileQueries, rest + 2 * kTileQueries};
    paired = (Pair*)(rest + (size_t)kTileQueries * (dim + 2));
    for (int r = 0; r < t.num_rows; r++) {
      const float* from = j.q + (size_t)(t.row + r) * j.q_stride + (size_t)kv_head * group * dim;
      const size_t at = (size_t)r * group * dim;
      if constexpr (kIsCoded) {
        for (int i = 0; i < group; i++) round_query(r * group + i, from + (size_t)i * dim);
        continue;
      }
      if (!j.is_dot) memcpy(q + at, from, (size_t)group * dim * sizeof(float));
      for (int i = 0; j.is_dot && i < group * dim; i += 16) store((Rounded*)q + at + i, load(from + i));
    }
  }

  void round_query(int query, const float* from) {
    int8_t* codes = (int8_t*)(coded.words + (size_t)query * (dim / 4));
    coded.scales[query] = head_codes(from, dim, codes) * job.scale;
    int32_t sum = 0;
    for (int d = 0; d < dim; d++) sum += codes[d];
    coded.minus[query] = -sum;
  }

  Path path(int r) const { return Path(*job.rows, tile.row + r, job.window); }

  bool is_in_place(int r, int block) const {
    const Path own = path(r);
    return own.is_in_place(block) || (kIsCoded && own.is_in_order(block));
  }

  void run_block(int block) {
    for (int r = 0; r < tile.num_rows;) {
      int end = r;
      while (end < tile.num_rows && is_in_place(end, block)) end++;
      if (end > r) run_in_place(block, r, end);
      else run_gathered(block, end++);
      r = end;
    }
  }

  void run_gathered(int block, int row) {
    const Path own = path(row);
    if (own.from(block) >= own.to(block)) return;
    Keys<S> keys;
    gather(pages, own, block, gathered, &keys);
    update(row, 1, keys, block);
  }

  // Whether a row is computed together with the rows before it, of which `keys` says what they see: if it sees the same
  // positions or, of codes, any.
  bool joins(const Path& own, int block, Keys<S>* keys) const {
    const int from = own.from(block), to = own.to(block);
    if (!kIsCoded || keys->from >= keys->to) return from == keys->from && to == keys->to;
    if (from >= to) return false;
    keys->from = from < keys->from ? from : keys->from, keys->to = to > keys->to ? to : keys->to;
    return true;
  }

  // Rows [first, end) read the block in place.
  void run_in_place(int block, int first, int end) {
    Keys<S> keys;
    int from = AQ_BLOCK, to = 0;
    for (int r = first; r < end; r++) {
      const Path own = path(r);
      from = own.from(block) < from ? own.from(block) : from, to = own.to(block) > to ? own.to(block) : to;
    }
    const Path last = path(end - 1);
    const bool more = last.is_in_place(block + AQ_BLOCK) && last.sees_all(block + AQ_BLOCK);
    read_in_place(pages, block, from, to, more ? block + AQ_BLOCK : block, &keys);
    for (int r = first; r < end;) {
      keys.from = path(r).from(block), keys.to = path(r).to(block);
      int rows = 1;
      while (r + rows < end && joins(path(r + rows), block, &keys)) rows++;
      if (keys.from < keys.to) update(r, rows, keys, block);
      r += rows;
    }
  }

  void update(int row, int rows, const Keys<S>& keys, int block) {
    const State s = offset(span_state, row * group, dim);
    const size_t at = (size_t)row * group * dim;
    if constexpr (kIsCoded) {
      const int first = row * group;
      for (int r = row; r < row + rows; r++) {
        const Path own = path(r);
        for (int i = r * group; i < (r + 1) * group; i++) coded.from[i] = own.from(block), coded.to[i] = own.to(block);
      }
      const aq::CodedQueries own{coded.words + at / 4, coded.scales + first, coded.minus + first, coded.from + first,
                                 coded.to + first};
      aq::integer_tiles->attention(own, rows * group, dim, keys, s.maximum, s.sum, s.accumulator);
    } else if (job.is_dot) {
      dot_update((const Pair*)q + at / 2, rows * group, keys, s);
    } else {
      block_update(q + at, rows * group, dim, keys, job.scale, s);
    }
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
      fold(total, span_state, queries, dim);
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
  float maximum[16], sum[16];
  const State total{maximum, sum, accumulator};
  reset(total, 1, dim);
  const Path own(*job.rows, row, job.window);
  const size_t row_head = (size_t)row * job.num_heads + head;
  for (int span = own.low / kSpan; span * kSpan < own.high; span++) {
    float* from = job.partials + (row_head * job.num_spans + span) * (16 + dim);
    fold(total, State{from, from + 1, from + 16}, 1, dim);
  }
  finish(job, total, dim, job.sinks == nullptr ? nullptr : job.sinks + head, row_head * dim);
}

// The attention of one tile and kv head, and of one span if spans are computed apart.
struct Item {
  int tile, head, span;
};

// Item `index` of those that a worker computes: with heads of its own all tiles of these heads, otherwise its part of
// all tiles, heads and spans.
struct Items {
  Share heads;
  int spans, first, step, count;

  Items(const AttentionJob& job, Share own) : heads(own), spans(1), first(0), step(1) {
    count = job.num_tiles * (own.end - own.begin);
  }
  Items(const AttentionJob& job, const Worker& worker)
      : heads{0, job.kv->num_kv_heads},
        spans(job.deferred ? job.num_spans : 1),
        first(worker.index),
        step(worker.count) {
    count = (job.num_tiles * heads.end * spans - first + step - 1) / step;
  }
  Item operator[](int index) const {
    const int item = first + index * step, num_heads = heads.end - heads.begin;
    return Item{item / num_heads / spans, heads.begin + item % num_heads, item / num_heads % spans};
  }
};

// Items whose keys are on their way to L2 while one is computed. Every slot and head has pages of its own, so nothing
// else brings them into the cache in time, and in a batch of short texts they are most of what attention reads.
constexpr int kItemsAhead = 4;

// Fetches what item `index` reads first. The rows of a prompt read so much that this would not help them.
template <class S>
static void fetch(const AttentionJob& job, const Items& items, int index) {
  if (index >= items.count) return;
  const Item item = items[index];
  const aq::Tile& tile = job.tiles[item.tile];
  const AqRows& rows = *job.rows;
  if (tile.num_rows > aq::kOwnRows) return;
  const Pages<S> pages(*job.kv, job.layer, item.head,
                       rows.page_table + (size_t)rows.slots[tile.row] * rows.table_stride);
  pages.fetch(Path(rows, tile.row, job.window), item.span * kSpan);
}

static void fetch_first(const AttentionJob& job, const Items& items) {
  with_keys(job.kv->dtype, [&](auto* element) {
    for (int i = 0; i < kItemsAhead; i++) fetch<ValueOf<decltype(element)>>(job, items, i);
  });
}

// Computes items, of which fetch_first has fetched the first ones.
template <class S>
static void run_items(const AttentionJob& job, const Items& items, float* workspace) {
  for (int i = 0; i < items.count; i++) {
    fetch<S>(job, items, i + kItemsAhead);
    const Item item = items[i];
    TileWork<S>(job, job.tiles[item.tile], item.head, workspace).run(job.deferred ? item.span : -1);
  }
}

static void run_items(const Worker& worker, const AttentionJob& job, const Items& items) {
  float* workspace = job.workspace + worker.index * job.workspace_floats;
  with_keys(job.kv->dtype, [&](auto* element) { run_items<ValueOf<decltype(element)>>(job, items, workspace); });
}

static void attention(const Worker& worker, const AttentionJob& job) {
  run_items(worker, job, Items(job, worker));
  if (!job.deferred) return;
  worker.barrier();
  const Share mine = share(worker, job.rows->num_rows * job.num_heads);
  float* accumulator = job.workspace + worker.index * job.workspace_floats;
  for (int i = mine.begin; i < mine.end; i++) merge_deferred(job, i / job.num_heads, i % job.num_heads, accumulator);
}

}  // namespace AQ_NAMESPACE
