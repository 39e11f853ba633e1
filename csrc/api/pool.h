// The persistent worker threads. The calling thread is worker 0.
#pragma once
#include "kernels/kernels.h"

namespace aq {

// Calls fn(worker, argument) on every worker and returns when all are done. One call at a time (api.cpp's lock).
void run(void (*fn)(const Worker&, const void*), const void* argument);
void set_threads(int threads);
int num_threads();

}  // namespace aq
