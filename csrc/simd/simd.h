// Vec, 16 floats, and IVec, 16 uint32, for the instruction set that a file is compiled for: AQ_SIMD names its header.
//
// Every operation is exact or correctly rounded, so all instruction sets give the same bits. Each header defines
//   kAccumulators            the Vecs that an inner loop may keep as sums in registers
//   kIntegerRows kIntegerSums    the rows of a tile of integers, and its IVecs of sums that are kept in registers
//   set1 load store          floats; load also takes 16 signed bytes
//   load_half                floats of 16 IEEE half-precision numbers (binary16)
//   add sub mul div fma max  a op b; fma(a, b, c) = a * b + c, rounded once
//   less is_nan both any select          comparisons and what is done with them
//   iset1 iload istore       uint32, or 16-bit words in memory (load extends with zeros, store drops the upper half);
//                            iload also takes bytes
//   iadd isub imul iand ixor shl shr iselect sign_bit
//   to_float as_float as_int             conversion of signed integers; the same bits
//   low_halves high_halves   of 16 words of 32 bits: floats whose upper 16 bits are the lower or the upper half
//   ior ishr                 a | b; a >> n for an n that is known once loops are unrolled
//   bstore                   the lowest bytes of 16 words, as 16 bytes
//   lookup                   table[byte] for every byte; the bytes are below 16
//   dot dot_bytes            integer dot products of four bytes a lane with the four signed bytes of a word x: sum plus
//                            code * x for unsigned codes below 128 (dot), plus (code - 128 + kByteBias) * x for all
//                            (dot_bytes). avx512.h has them only where it is compiled with AVX512_VNNI.
//   dot_signed               the other way round: sum plus code * x for signed codes and a word of unsigned x below 128
//   nibble                   the i-th four bits of each lane, two's complement, as a float
//   sum_lanes max_lanes      of 16 lanes by one merge tree: halves with halves
//   sum_rows max_rows        of rows [count][16]: lane i is what sum_lanes or max_lanes gives for row i; the lanes from
//                            count on hold anything. rows has memory for 4 or, above that, a multiple of 16 rows.
#pragma once
#include <stdint.h>
#include <string.h>

#include "inline.h"

#include AQ_SIMD

namespace AQ_NAMESPACE {

// Into L2: a core has few slots for lines on their way to L1 (about 10 GB/s' worth at the latency of memory), but many
// for L2. Measured on Zen 4: attention at 2K keys reads 24 GB/s a core so, 10 with a prefetch into L1.
AQ_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
AQ_INLINE Vec zero() { return set1(0.0f); }
AQ_INLINE IVec iota() {
  static const uint32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return iload(lanes);
}

}  // namespace AQ_NAMESPACE
