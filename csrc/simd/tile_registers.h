// Tile registers of AMX: eight matrices of at most 16 rows of 64 bytes, which products of bytes and of pairs of
// bfloat16 are summed in. Where the compiler is told of none, their twin computes the same in plain arrays, and traps
// where a CPU would fault.
//
//   TileRegisters t(shapes)      gives each register its shape and zeros, for as long as t lives
//   t.clear<C>()                 zeros
//   t.load<A>(p, stride)         a register's rows, `stride` bytes apart in memory
//   t.store<C>(p, stride)
//   t.add_products<C, A, B, S>() C[m][n] += A[m][4 k + j] * B[k][n][j] over k and j < 4: 32-bit words of C, bytes of A
//                                and B, of which A's are signed and B's unsigned or, if S is kWeighted, the other way
//   t.add_pairs<C, A, B>()       C[m][n] += (e + o): floats of C, bfloat16 of A and B. e is the sum of
//                                A[m][2 k] * B[k][n][0] over k in order, by fused multiply-adds, o that of
//                                A[m][2 k + 1] * B[k][n][1]. What is subnormal is 0.
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
  template <int C, int A, int B> AQ_MEMBER void add_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

// While it lives, other operations too take what is subnormal for 0, as add_pairs does.
class Flushing {
 public:
  AQ_MEMBER Flushing() {
    asm volatile("stmxcsr %0" : "=m"(before_)::"memory");
    constexpr uint32_t kToZero = 1u << 15, kAreZero = 1u << 6;
    const uint32_t flushing = before_ | kToZero | kAreZero;
    asm volatile("ldmxcsr %0" ::"m"(flushing) : "memory");
  }
  AQ_MEMBER ~Flushing() { asm volatile("ldmxcsr %0" ::"m"(before_) : "memory"); }

 private:
  uint32_t before_;
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
    const int rows = checked<C, A, B>(), words = shapes_.rows[B], lanes = shapes_.bytes[C] / 4;
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
  template <int C, int A, int B> __attribute__((noinline)) void add_pairs() {
    const int rows = checked<C, A, B>(), words = shapes_.rows[B], lanes = shapes_.bytes[C] / 4;
    for (int m = 0; m < rows; m++)
      for (int n = 0; n < lanes; n++) {
        float parts[2] = {};
        for (int k = 0; k < words; k++) {
          const uint32_t a = word_at(registers_[A][m] + 4 * k), b = word_at(registers_[B][k] + 4 * n);
          parts[0] = flushed(__builtin_fmaf(float_of(a << 16), float_of(b << 16), parts[0]));
          parts[1] = flushed(__builtin_fmaf(float_of(a & 0xffff0000u), float_of(b & 0xffff0000u), parts[1]));
        }
        const float both = flushed(parts[0] + parts[1]);
        const float sum = flushed(float_of(word_at(registers_[C][m] + 4 * n)) + both);
        memcpy(registers_[C][m] + 4 * n, &sum, sizeof sum);
      }
  }

 private:
  // The rows of a product of these registers, whose shapes have to fit.
  template <int C, int A, int B> int checked() const {
    const int rows = shapes_.rows[used(C)], words = shapes_.rows[used(B)], lanes = shapes_.bytes[C] / 4;
    if (shapes_.rows[used(A)] != rows || shapes_.bytes[A] != words * 4 || shapes_.bytes[B] != lanes * 4)
      __builtin_trap();
    return rows;
  }
  static float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
  static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return flushed(x);
  }
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

class Flushing {};  // not used: the twin is for tile registers alone
#endif

}  // namespace AQ_NAMESPACE
