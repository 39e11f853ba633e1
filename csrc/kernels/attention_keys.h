// Which keys a row sees, and where they lie in the pages.
#pragma once
#include "attention_block.h"

namespace AQ_NAMESPACE {

using aq::AttentionJob;
using aq::Code;
using aq::kSpan;

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
  // The positions of a block that the row sees are [from, to) of it, none if from >= to.
  int from(int block) const { return low > block ? low - block : 0; }
  int to(int block) const { return high < block + AQ_BLOCK ? high - block : AQ_BLOCK; }
  bool sees_all(int block) const { return low <= block && block + AQ_BLOCK <= high; }
  // Whether what the row sees of a block lies in the context.
  bool is_in_place(int block) const { return block + AQ_BLOCK <= context_len || high == context_len; }
  // Whether what the row sees of a block lies where the context would have it: rows of a chain do.
  bool is_in_order(int block) const {
    const int end = high < block + AQ_BLOCK ? high : block + AQ_BLOCK;
    for (int position = context_len > block ? context_len : block; position < end; position++)
      if (tail[position - context_len] != position) return false;
    return true;
  }
};

// Where the keys of one layer and head lie.
template <class S>
struct Pages {
  const S *k, *v;
  const int32_t* table;
  int page_size, dim;
  size_t page_stride;  // of all layers
  const float *k_scales, *v_scales;  // of keys in eight bits

  Pages(const AqKV& kv, int layer, int head, const int32_t* page_table)
      : table(page_table),
        page_size(kv.page_size),
        dim(kv.head_dim),
        page_stride((size_t)kv.num_layers * kv.num_kv_heads * kv.page_size * kv.head_dim) {
    const size_t base = ((size_t)layer * kv.num_kv_heads + head) * page_size * dim;
    k = (const S*)kv.k + base, v = (const S*)kv.v + base;
    k_scales = v_scales = nullptr;
    if constexpr (kIsSame<S, Code>) k_scales = kv.k_scales + base / dim, v_scales = kv.v_scales + base / dim;
  }
  size_t page(int index) const { return table[index / page_size] * page_stride; }
  const S* key_group(int index) const { return k + page(index) + (size_t)(index % page_size / 16) * 16 * dim; }
  // Of floats: the values of an index. Of codes: fours of indices, [4][dim][4], from a multiple of 16 on.
  const S* value(int index) const { return v + page(index) + (size_t)(index % page_size) * dim; }

  // The place of an index among scales.
  size_t scale(int index) const { return page(index) / dim + index % page_size; }

  // Fetches the first keys and values of a path from position `first` on, as many as two blocks have.
  void fetch(const Path& path, int first) const {
    const int from = (first > path.low ? first : path.low) / 16 * 16;
    const int end = path.high < path.context_len ? path.high : path.context_len;
    for (int at = from; at < end && at < from + 2 * AQ_BLOCK; at += 16) {
      const char *keys = (const char*)key_group(at), *values = (const char*)value(at);
      for (size_t i = 0; i < 16 * dim * sizeof(S); i += 64) prefetch(keys + i), prefetch(values + i);
    }
  }
};

// Gathers a block that reaches into the tail of a row. A group of keys is read in place if every visible position in it
// equals its KV index; otherwise it is copied to `gathered` [kGroups][dim][16].
template <class S>
static void gather(const Pages<S>& pages, const Path& path, int block, S* gathered, Keys<S>* keys) {
  keys->from = path.from(block), keys->to = path.to(block);
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

// Positions [from, to) of a block in the context; `next` is the block that will be read after it.
template <class S>
static void read_in_place(const Pages<S>& pages, int block, int from, int to, int next, Keys<S>* keys) {
  for (int g = from / 16; g * 16 < to; g++) {
    keys->k[g] = pages.key_group(block + g * 16);
    keys->next_k[g] = pages.key_group(next + g * 16), keys->next_v[g] = pages.value(next + g * 16);
    const S* v = pages.value(block + g * 16);
    for (int j = 0; j < 16; j++) keys->v[g * 16 + j] = v + j * pages.dim;
  }
}

// A block of codes that reaches into the tail of a row is copied to `gathered`, keys, values and their scales, each as
// [kGroups][16] of them.
static void gather(const Pages<Code>& pages, const Path& path, int block, Code* gathered, Keys<Code>* keys) {
  keys->from = path.from(block), keys->to = path.to(block);
  const size_t size = (size_t)16 * pages.dim;
  Code* values = gathered + kGroups * size;
  float *k_scales = (float*)(values + kGroups * size), *v_scales = k_scales + AQ_BLOCK;
  for (int g = 0; g < kGroups; g++) {
    keys->k[g] = gathered + g * size, keys->v[g] = values + g * size;
    keys->k_scales[g] = k_scales + g * 16, keys->v_scales[g] = v_scales + g * 16;
    keys->next_k[g] = pages.k, keys->next_v[g] = pages.v;  // nothing worth fetching
  }
  for (int j = keys->from; j < keys->to; j++) {
    const int index = path.index(block + j), group = index / 16 * 16;
    const uint32_t* k = (const uint32_t*)pages.key_group(index) + index % 16;
    uint32_t* new_k = (uint32_t*)(gathered + j / 16 * size) + j % 16;
    for (int d = 0; d < pages.dim / 4; d++) new_k[d * 16] = k[d * 16];
    const Code* v = pages.value(group) + (size_t)(index % 16 / 4 * 4) * pages.dim + index % 4;
    Code* new_v = values + (size_t)(j / 4 * 4) * pages.dim + j % 4;
    for (int d = 0; d < pages.dim; d++) new_v[d * 4] = v[d * 4];
    k_scales[j] = pages.k_scales[pages.scale(index)], v_scales[j] = pages.v_scales[pages.scale(index)];
  }
}

static void read_in_place(const Pages<Code>& pages, int block, int from, int to, int next, Keys<Code>* keys) {
  for (int g = from / 16; g * 16 < to; g++) {
    const int index = block + g * 16, later = next + g * 16;
    keys->k[g] = pages.key_group(index), keys->v[g] = pages.value(index);
    keys->k_scales[g] = pages.k_scales + pages.scale(index), keys->v_scales[g] = pages.v_scales + pages.scale(index);
    keys->next_k[g] = pages.key_group(later), keys->next_v[g] = pages.value(later);
    prefetch(pages.k_scales + pages.scale(later)), prefetch(pages.v_scales + pages.scale(later));
  }
}

}  // namespace AQ_NAMESPACE
