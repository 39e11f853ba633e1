// The persistent worker threads. The calling thread is worker 0.
#pragma once
#include "kernels/kernels.h"

namespace aq {

// Only one thread at a time may call any of these functions; the lock of api.cpp sees to it.
// Calls fn(worker, argument) on every worker and returns when all are done. The first call starts the workers.
void run(void (*fn)(const Worker&, const void*), const void* argument);
// The same as a call of its own: takes the lock of api.cpp.
void run_alone(void (*fn)(const Worker&, const void*), const void* argument);
void set_threads(int threads);
int num_threads();
// For a forked child, which has no worker threads: forgets those of the parent, so that the next call starts new ones.
void forget_workers();

}  // namespace aq
