// What integer dot products compute, compiled once per instruction set that has them (setup.py): the tiles of the third
// arithmetic, and attention over keys in eight bits.
#include "integer.h"
#include "attention_codes.h"

namespace AQ_NAMESPACE {

// The tile of a format that takes Codes.
template <int code = 0> static aq::TileFunction integer_tile_of(int dtype) {
  if constexpr (code == kMaxFormats) {
    return nullptr;
  } else {
    using F = typename FormatOf<code>::Type;
    if constexpr (!kIsSame<F, void>)
      if constexpr (kIsSame<typename F::Input, Codes>)
        if (dtype == code) return any_integer_tile<F>;
    return integer_tile_of<code + 1>(dtype);
  }
}

extern const aq::IntegerTiles kIntegerTiles;
const aq::IntegerTiles kIntegerTiles = {integer_tile_of<>, kIntegerRows, coded_update};

}  // namespace AQ_NAMESPACE
