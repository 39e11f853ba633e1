// Tile registers of AMX: eight matrices of at most 16 rows of 64 bytes, which integer products of bytes are summed in.
// Where the compiler is told of none, their twin computes the same in plain arrays, and traps where a CPU would fault.
//
//   TileRegisters t(shapes)      gives each register its shape and zeros, for as long as t lives
//   t.clear<C>()                 zeros
//   t.load<A>(p, stride)         a register's rows, `stride` bytes apart in memory
//   t.store<C>(p, stride)
//   t.add_products<C, A, B, S>() C[m][n] += A[m][4 k + j] * B[k][n][j] over k and j < 4: 32-bit words of C, bytes of A
//                                and B, of which A's are signed and B's unsigned or, if S is kWeighted, the other way
#pragma once
#include <stdint.h>
#include <string.h>

#include "inline.h"

namespace AQ_NAMESPACE {

constexpr int kTileRegisters = 8, kTileBytes = 64, kTileRegisterRows = 16;

enum Signs { kCodes, kWeighted };

// The memory that `ldtilecfg` reads. A register that is not used has no rows and no bytes.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
  void set(int index, int num_rows, int num_bytes) {
    rows[index] = (uint8_t)num_rows, bytes[index] = (uint16_t)(num_rows == 0 ? 0 : num_bytes);
  }
};
static_assert(sizeof(TileShapes) == 64, "as the CPU reads it");

#if defined(__AMX_INT8__)
constexpr bool kHasTileRegisters = true;

// Written out, since GCC's intrinsics take no number that comes from a template, and do not say that they read memory.
class TileRegisters {
 public:
  AQ_MEMBER explicit TileRegisters(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  AQ_MEMBER ~TileRegisters() { asm volatile("tilerelease"); }
  template <int T> AQ_MEMBER void clear() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
  template <int T> AQ_MEMBER void load(const void* p, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T> AQ_MEMBER void store(void* p, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int C, int A, int B, Signs S> AQ_MEMBER void add_products() {
    if (S == kCodes) asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    else asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};
#else
constexpr bool kHasTileRegisters = false;

class TileRegisters {
 public:
  explicit TileRegisters(const TileShapes& shapes) : shapes_(shapes) { memset(registers_, 0, sizeof registers_); }
  template <int T> void clear() { memset(registers_[used(T)], 0, sizeof registers_[T]); }
  template <int T> void load(const void* p, size_t stride) {
    clear<T>();
    for (int r = 0; r < shapes_.rows[T]; r++) memcpy(registers_[T][r], (const char*)p + r * stride, shapes_.bytes[T]);
  }
  template <int T> void store(void* p, size_t stride) {
    for (int r = 0; r < shapes_.rows[used(T)]; r++) memcpy((char*)p + r * stride, registers_[T][r], shapes_.bytes[T]);
  }
  template <int C, int A, int B, Signs S> __attribute__((noinline)) void add_products() {
    const int rows = shapes_.rows[used(C)], words = shapes_.rows[used(B)], lanes = shapes_.bytes[C] / 4;
    if (shapes_.rows[used(A)] != rows || shapes_.bytes[A] != words * 4 || shapes_.bytes[B] != lanes * 4)
      __builtin_trap();
    for (int m = 0; m < rows; m++)
      for (int k = 0; k < words; k++)
        for (int n = 0; n < lanes; n++) {
          const uint8_t *a = registers_[A][m] + 4 * k, *b = registers_[B][k] + 4 * n;
          uint32_t sum = word_at(registers_[C][m] + 4 * n);
          for (int j = 0; j < 4; j++)
            sum += (uint32_t)(S == kCodes ? (int8_t)a[j] * (int)b[j] : (int)a[j] * (int8_t)b[j]);
          memcpy(registers_[C][m] + 4 * n, &sum, sizeof sum);
        }
  }

 private:
  static uint32_t word_at(const uint8_t* p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return word;
  }
  int used(int index) const {
    if (shapes_.rows[index] == 0) __builtin_trap();
    return index;
  }
  const TileShapes shapes_;
  alignas(64) uint8_t registers_[kTileRegisters][kTileRegisterRows][kTileBytes];
};
#endif

}  // namespace AQ_NAMESPACE
