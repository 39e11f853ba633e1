// How every function of a header that several instruction sets compile is declared: in the namespace of one instruction
// set, and inlined. An inline function with a shared name would be merged by the linker, which may keep the copy that
// an older CPU cannot run. For the same reason nothing in such a header comes from std::.
#pragma once

#define AQ_INLINE static inline __attribute__((always_inline))
#define AQ_MEMBER inline __attribute__((always_inline))  // of a member function

// The build names the instruction set (setup.py). Without a name this is the library's own side of the interface: it
// packs and checks weights, for which any instruction set will do.
#ifndef AQ_NAMESPACE
#define AQ_NAMESPACE host
#define AQ_SIMD "portable.h"
#endif
