// What integer.cpp has, over tile registers where rows are many, and the tile of the fourth arithmetic: compiled for
// AMX, and for the registers' twin.
#include "attention_pairs.h"
#include "attention_tiles.h"
#include "integer_tiles.h"
#include "pair_tiles.h"

namespace AQ_NAMESPACE {

static aq::TileFunction tile_of(int dtype) {
  if (is_tiled(dtype)) return pair_tile;
  return integer_tile_of(dtype, [](auto format) { return wide_tile<decltype(format)>; });
}

extern const aq::IntegerTiles kIntegerTiles;
const aq::IntegerTiles kIntegerTiles = {tile_of, kIntegerRows, kWideRows, wide_update, pair_update, kHasTileRegisters};

}  // namespace AQ_NAMESPACE
