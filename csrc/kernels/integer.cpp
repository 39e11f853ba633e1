// What integer dot products compute, compiled once per instruction set that has them (setup.py): the tiles of the third
// arithmetic, and attention over keys in eight bits. The fourth is left to the twin of tile registers.
#include "integer.h"
#include "attention_codes.h"

namespace AQ_NAMESPACE {

static aq::TileFunction tile_of(int dtype) {
  if (is_tiled(dtype)) return amx_twin::kIntegerTiles.of(dtype);
  return integer_tile_of(dtype, [](auto format) { return any_integer_tile<decltype(format)>; });
}

static void pair_update(const aq::Pair* q, int queries, int dim, const aq::Keys<aq::Rounded>& keys, float scale,
                        aq::Pair* paired, float* maximum, float* sum, float* accumulator) {
  amx_twin::kIntegerTiles.pair_attention(q, queries, dim, keys, scale, paired, maximum, sum, accumulator);
}

extern const aq::IntegerTiles kIntegerTiles;
const aq::IntegerTiles kIntegerTiles = {tile_of, kIntegerRows, kIntegerRows, coded_update, pair_update, false};

}  // namespace AQ_NAMESPACE
