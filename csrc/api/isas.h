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

// The best first, and behind them those that are chosen by name only.
const std::vector<Isa>& isas();
const Isa* best_isa();
// Asks the operating system to save the contents of AMX's tile registers, for all threads of the process.
bool request_tile_registers();

}  // namespace aq
