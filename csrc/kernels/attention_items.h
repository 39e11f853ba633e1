// Which worker computes the attention of which tiles, kv heads and blocks.
#pragma once
#include "attention_keys.h"
#include "linear.h"

namespace AQ_NAMESPACE {

constexpr int kSpanBlocks = kSpan / AQ_BLOCK;

// Blocks [begin, end).
struct BlockRange {
  int begin, end;
};

// Blocks of one tile and kv head. `first` is the first block that the tile sees. is_cut: other workers compute other
// blocks of them.
struct Item {
  int tile, head, first;
  BlockRange blocks;
  bool is_cut;
};

// The blocks that rows of a tile see.
static BlockRange blocks_of(const AttentionJob& job, const aq::Tile& tile) {
  BlockRange blocks{job.num_blocks, 0};
  for (int r = tile.row; r < tile.row + tile.num_rows; r++) {
    const Path path(*job.rows, r, job.window);
    const int begin = path.low / AQ_BLOCK, end = (path.high + AQ_BLOCK - 1) / AQ_BLOCK;
    blocks.begin = begin < blocks.begin ? begin : blocks.begin, blocks.end = end > blocks.end ? end : blocks.end;
  }
  return blocks;
}

// Where a worker begins if tiles are cut: the number of a tile and head, and the block.
struct Cut {
  int item, block;
};

// Tiles, the heads of a tile and their blocks lie in a line, in which a block is as long as its tile has rows. Each of
// `count` workers has as much of it, cut between blocks.
static Cut cut_before(const AttentionJob& job, int worker, int count) {
  const int heads = job.kv->num_kv_heads;
  const auto length = [&](int tile, BlockRange blocks) {
    return (int64_t)job.tiles[tile].num_rows * (blocks.end - blocks.begin);
  };
  int64_t at = 0;
  for (int t = 0; t < job.num_tiles; t++) at += heads * length(t, blocks_of(job, job.tiles[t]));
  at = at * worker / count;
  for (int t = 0; t < job.num_tiles; t++) {
    const BlockRange blocks = blocks_of(job, job.tiles[t]);
    const int64_t own = length(t, blocks);
    if (at < heads * own)
      return Cut{t * heads + (int)(at / own), blocks.begin + (int)(at % own) / job.tiles[t].num_rows};
    at -= heads * own;
  }
  return Cut{job.num_tiles * heads, 0};
}

// The items that a worker computes: with heads of its own all tiles of these heads, otherwise its part of all tiles and
// heads.
struct Items {
  const AttentionJob& job;
  Share heads;
  int first, step, count;
  Cut from, to;

  Items(const AttentionJob& j, Share own)
      : job(j), heads(own), first(0), step(1), count(j.num_tiles * (own.end - own.begin)) {}
  Items(const AttentionJob& j, const Worker& worker)
      : job(j), heads{0, j.kv->num_kv_heads}, first(worker.index), step(worker.count) {
    const int all = job.num_tiles * heads.end;
    count = (all - first + step - 1) / step;
    if (!job.deferred) return;
    from = cut_before(job, worker.index, worker.count), to = cut_before(job, worker.index + 1, worker.count);
    first = from.item, step = 1, count = to.item - from.item;
    if (to.item < all && to.block > blocks_of(job, job.tiles[to.item / heads.end]).begin) count++;
  }
  Item operator[](int index) const {
    const int item = first + index * step, num_heads = heads.end - heads.begin, tile = item / num_heads;
    const BlockRange all = blocks_of(job, job.tiles[tile]);
    Item found{tile, heads.begin + item % num_heads, all.begin, all, false};
    if (job.deferred && item == from.item) found.blocks.begin = from.block;
    if (job.deferred && item == to.item) found.blocks.end = to.block;
    found.is_cut = found.blocks.begin > all.begin || found.blocks.end < all.end;
    return found;
  }
};

}  // namespace AQ_NAMESPACE
