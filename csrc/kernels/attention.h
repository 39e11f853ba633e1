// Attention over paged keys, each row along its own path (docs/decisions, 3).
//
// A row sees positions [low, high): below context_len through the page table, from there on through its tail. Blocks
// of 64 absolute positions are reduced to (maximum, sum, accumulator), each a function of the block's keys in position
// order alone; blocks are folded in order within spans of kSpan positions, and spans in order. Since that shape is
// fixed by absolute positions, a row gets the same bits as a tree node, a decoded token or part of a prompt, and blocks
// may be computed by different workers (attention_items.h).
//
// A block in the context is read in place, and once for all rows and heads of a tile that see the same of its
// positions. A block that reaches into tails is gathered row by row (attention_keys.h). Keys in eight bits are
// multiplied as integers (attention_codes.h), in one tile for rows that see different positions of a block.
#pragma once
#include "attention_block.h"
#include "attention_items.h"
#include "round.h"

namespace AQ_NAMESPACE {

using aq::kTileQueries;

// Empties a state. A sum that is then added to accumulators of minus zero stays as it is, a minus zero too.
static void reset(const State& s, int queries, int dim, float start = 0.0f) {
  for (int i = 0; i < queries; i++) s.maximum[i] = -kInfinity, s.sum[i] = 0.0f;
  for (size_t i = 0; i < (size_t)queries * dim; i += 16) store(s.accumulator + i, set1(start));
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

// The sink of a head for one row. Where keys are stored less a shift, every score lacks query * shift, and so must it.
static float sink_of(const AttentionJob& job, int row, int head) {
  if (job.key_shift == nullptr) return job.sinks[head];
  const int dim = job.kv->head_dim, kv_head = head / (job.num_heads / job.kv->num_kv_heads);
  const float* q = job.q + (size_t)row * job.q_stride + (size_t)head * dim;
  const float* shift = job.key_shift + (size_t)kv_head * dim;
  Vec sum = zero();
  for (int d = 0; d < dim; d += 16) sum = fma(load(q + d), load(shift + d), sum);
  return job.sinks[head] - sum_lanes(sum) * job.scale;
}

// Writes the result of a row and head.
static void finish(const AttentionJob& job, const State& s, int dim, int row, int head) {
  const size_t at = ((size_t)row * job.num_heads + head) * dim;
  if (job.sinks != nullptr) {  // a logit without a value
    const float sink = sink_of(job, row, head);
    const float top = sink > *s.maximum ? sink : *s.maximum;
    const float a = exp1(*s.maximum - top);
    *s.sum = *s.sum * a + exp1(sink - top);
    for (int d = 0; d < dim; d += 16) store(s.accumulator + d, mul(load(s.accumulator + d), set1(a)));
  }
  for (int d = 0; d < dim; d += 16) {
    const Vec mean = div(load(s.accumulator + d), set1(*s.sum));
    if (job.is_rounded) store((Rounded*)job.out + at + d, mean);
    else store((float*)job.out + at + d, mean);
  }
}

static int end_of_span(int block, int end) {
  const int next = (block / kSpanBlocks + 1) * kSpanBlocks;
  return next < end ? next : end;
}

// Where the part of a row and head that begins with `block` is put aside: maximum, sum, number of blocks, ...,
// accumulator.
static float* partial(const AttentionJob& job, int row, int head, int block) {
  const size_t row_head = (size_t)row * job.num_heads + head;
  return job.partials + (row_head * job.num_blocks + block) * (16 + job.kv->head_dim);
}

// One tile (rows of a slot) and kv head.
template <class S>
struct TileWork {
  const AttentionJob& job;
  const aq::Tile& tile;
  const int head, dim, group, queries;
  static constexpr bool kIsCoded = kIsSame<S, Code>;
  const Pages<S> pages;
  float* q;  // [queries, dim], or pairs of the second arithmetic, or what `coded` points to
  aq::CodedQueries coded;
  S* gathered;  // [kGroups][dim][16]
  Pair* paired;  // keys, then values of a block in pairs
  State span_state, total;
  int common_from = 0, common_to = 1 << 30;  // positions of the context that every row sees

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
      const Path own = path(r);
      common_from = own.low > common_from ? own.low : common_from;
      common_to = own.context_len < common_to ? own.context_len : common_to;
      const float* from = j.q + (size_t)(t.row + r) * j.q_stride + (size_t)kv_head * group * dim;
      const size_t at = (size_t)r * group * dim;
      if constexpr (kIsCoded) {
        for (int i = 0; i < group; i++) round_query(r * group + i, from + (size_t)i * dim);
        continue;
      }
      if (j.pair_block == nullptr) memcpy(q + at, from, (size_t)group * dim * sizeof(float));
      for (int i = 0; j.pair_block != nullptr && i < group * dim; i += 16) store((Rounded*)q + at + i, load(from + i));
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
    if (common_from <= block && block + AQ_BLOCK <= common_to) return run_common(block);
    for (int r = 0; r < tile.num_rows;) {
      int end = r;
      while (end < tile.num_rows && is_in_place(end, block)) end++;
      if (end > r) run_in_place(block, r, end);
      else run_gathered(block, end++);
      r = end;
    }
  }

  // A block that every row sees all of, in the context.
  void run_common(int block) {
    Keys<S> keys;
    keys.from = 0, keys.to = AQ_BLOCK;
    const int next = block + 2 * AQ_BLOCK <= common_to ? block + AQ_BLOCK : block;
    read_in_place(pages, block, keys.from, keys.to, next, &keys);
    update(0, tile.num_rows, keys, block);
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
    } else if (job.pair_block != nullptr) {
      pair_update((const Pair*)q + at / 2, rows * group, keys, s);
    } else {
      block_update(q + at, rows * group, dim, keys, job.scale, s);
    }
  }

  void pair_update(const Pair* from, int count, const Keys<Rounded>& keys, State s) {
    job.pair_block(from, count, dim, keys, job.scale, paired, s.maximum, s.sum, s.accumulator);
  }
  template <class T> void pair_update(const Pair*, int, const Keys<T>&, State) {
  }  // not reached: a pair_block has rounded keys

  // Blocks of one span, in order.
  void run_blocks(int block, int end, float start = 0.0f) {
    reset(span_state, queries, dim, start);
    for (; block < end; block++) run_block(block * AQ_BLOCK);
  }

  void run(const Item& item) {
    if (item.is_cut) return run_part(item);
    reset(total, queries, dim);
    for (int block = item.blocks.begin, next; block < item.blocks.end; block = next) {
      next = end_of_span(block, item.blocks.end);
      run_blocks(block, next);
      fold(total, span_state, queries, dim);
    }
    for (int i = 0; i < queries; i++) {
      finish(job, offset(total, i, dim), dim, tile.row + i / group, head * group + i % group);
    }
  }

  // Puts every span aside. A span that another worker begins is folded block by block into what that worker puts aside,
  // so its blocks here are put aside one by one.
  void run_part(const Item& item) {
    for (int block = item.blocks.begin, next; block < item.blocks.end; block = next) {
      const bool is_begun = block % kSpanBlocks != 0 && block > item.first;
      next = is_begun ? block + 1 : end_of_span(block, item.blocks.end);
      run_blocks(block, next, is_begun ? -0.0f : 0.0f);
      for (int i = 0; i < queries; i++) {
        float* to = partial(job, tile.row + i / group, head * group + i % group, block);
        const State from = offset(span_state, i, dim);
        to[0] = *from.maximum, to[1] = *from.sum, to[2] = (float)(next - block);
        memcpy(to + 16, from.accumulator, dim * sizeof(float));
      }
    }
  }
};

// Folds the parts of a row and head, whose tile sees `blocks`, in order.
static void merge_parts(const AttentionJob& job, int row, int head, BlockRange blocks, float* accumulator) {
  const int dim = job.kv->head_dim;
  const auto state_at = [&](int block) {
    float* from = partial(job, row, head, block);
    return State{from, from + 1, from + 16};
  };
  float maximum[16], sum[16];
  const State total{maximum, sum, accumulator};
  reset(total, 1, dim);
  for (int block = blocks.begin, next; block < blocks.end; block = next) {
    next = end_of_span(block, blocks.end);
    const State span = state_at(block);
    for (int later = block + (int)span.maximum[2]; later < next; later++) fold(span, state_at(later), 1, dim);
    fold(total, span, 1, dim);
  }
  finish(job, total, dim, row, head);
}

// Merges the items that are cut, of each of them this worker's part.
static void merge_items(const Worker& worker, const AttentionJob& job) {
  const int heads = job.kv->num_kv_heads, group = job.num_heads / heads;
  for (int w = 1, last = -1; w < worker.count; w++) {
    const Cut cut = cut_before(job, w, worker.count);
    if (cut.item == job.num_tiles * heads || cut.item == last) continue;
    const aq::Tile& tile = job.tiles[cut.item / heads];
    const BlockRange blocks = blocks_of(job, tile);
    if (cut.block == blocks.begin) continue;
    last = cut.item;
    const Share mine = share(worker, tile.num_rows * group);
    float* accumulator = job.workspace + worker.index * job.workspace_floats;
    for (int i = mine.begin; i < mine.end; i++)
      merge_parts(job, tile.row + i / group, cut.item % heads * group + i % group, blocks, accumulator);
  }
}

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
  pages.fetch(Path(rows, tile.row, job.window), item.blocks.begin * AQ_BLOCK);
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
    TileWork<S>(job, job.tiles[item.tile], item.head, workspace).run(item);
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
  merge_items(worker, job);
}

}  // namespace AQ_NAMESPACE
