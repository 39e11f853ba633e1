// The instruction sets that the library has kernels for, and which of them this CPU has.
#pragma once
#include <vector>

#include "kernels/kernels.h"

namespace aq {

struct Isa {
  const char* name;
  const Kernels* kernels;
  const IntegerTiles* integer_tiles;
  bool available;
};

// The best first, and behind them the registers' twin, which is chosen by name only.
const std::vector<Isa>& isas();
const Isa* best_isa();

}  // namespace aq
