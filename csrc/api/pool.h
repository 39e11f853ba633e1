// The persistent worker threads. The calling thread is worker 0.
#pragma once
#include "kernels/kernels.h"

namespace aq {

// One call at a time of all of these (api.cpp's lock).
// Calls fn(worker, argument) on every worker and returns when all are done. The first call starts the workers.
void run(void (*fn)(const Worker&, const void*), const void* argument);
void set_threads(int threads);
int num_threads();
// In a forked child, which has no workers: abandons those of the parent, so that the next call starts its own.
void forget_workers();

}  // namespace aq
