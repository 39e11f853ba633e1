// The interface of a storage format. Each header of this folder defines one format, a struct derived from Format, and
// gives it a code by AQ_FORMAT. formats.h lists the headers, and every switch over formats comes from that list.
//
// A linear weight [n, k] is packed in blocks of 16 outputs, zero-padded. A block is a run of steps. A step holds the
// weights of kChannels channels in units, which the tile reads one after the other. A unit holds what 16 outputs
// multiply kRun inputs with. A format defines
//   kName                   as Python names it
//   Step, kChannels         the packed layout
//   kParts, kUnits, kRun    a step has kParts * kUnits units, and the tile unrolls kUnits of them; inputs of a unit
//   unit(step, i)           unit i: its address, or its words in a register
//   weight(unit, j)         its 16 weights for input j, as a Vec
//   kAlignment              of a packed weight
//   kSourceBytes            of one weight before it is packed; aq_pack's weight is aligned to it
//   check_source(source)    whether the source can be packed: 0, or -1 after fail()
//   pack(source, packed)    aq_pack's work for the source's outputs
// and where they differ from below
//   Sum                     how products become sums (sums.h)
//   Input                   what the weights multiply
//   Element                 one number, where rows of numbers (embeddings) are stored so: load(const Element*) exists;
//                           void for linears only
//   Key                     what keys and values are stored as: a float with store(Key*, Vec) and narrow(float, Key*),
//                           or Code (kernels/attention_codes.h); void for weights only
#pragma once
#include "api/aquiline.h"
#include "api/check.h"
#include "simd/types.h"
#include "sums.h"

namespace AQ_NAMESPACE {

// The arguments of aq_pack, and which outputs [first, last) are to be packed; first is a multiple of 16.
struct Source {
  const void *weight, *scales;
  int n, k, first, last;
};

struct Format {
  using Sum = InOrder;
  using Input = float;
  using Element = void;
  using Key = void;
  static constexpr int kParts = 1;
  static constexpr int kRows = 6;  // rows of a tile
  static constexpr int kScaleBytes = 0;  // per output, behind all steps
  static constexpr size_t kUnitsFrom = 0;  // bytes of a step before its units
  static constexpr bool kIsApart = false;  // its tiles need instructions of their own: dot.cpp
  static constexpr bool kIsTiled = false;  // its tiles need tile registers: pair_tiles.h
  static constexpr bool kIsUnpacked = false;  // its weights are unpacked to float32 and then multiplied: unpack.h
  // What the sums are multiplied with, [n]; NULL for nothing.
  AQ_INLINE const float* output_scale(const AqLinear&) { return nullptr; }
  // Whether this CPU can compute with it: 0, or -1 after fail(). `name` is the linear's.
  static int check_cpu(const char*) { return 0; }
  static int check_source(const Source&) { return 0; }
};

template <class A, class B> constexpr bool kIsSame = false;
template <class A> constexpr bool kIsSame<A, A> = true;

// T of a const T*.
template <class P> struct Pointee;
template <class T> struct Pointee<const T*> {
  using Type = T;
};
template <class P> using ValueOf = typename Pointee<P>::Type;

// Packs [n, k] as [ceil(n / 16)][k / run][16][run].
template <class T> static void pack_runs(const T* weight, const Source& from, int run, T* packed) {
  const int n = from.n, k = from.k, last = from.last;
  packed += (size_t)from.first * k;
  for (int block = from.first; block < last; block += 16)
    for (int i = 0; i < k; i += run)
      for (int lane = 0; lane < 16; lane++)
        for (int j = i; j < i + run; j++) *packed++ = block + lane < n ? weight[((size_t)block + lane) * k + j] : T{};
}
// Packs a float32 scale per output, [n], as [ceil(n / 16)][16].
static void pack_scales(const Source& from, const float* packed) {
  for (int i = from.first; i < (from.last + 15) / 16 * 16; i++)
    ((float*)packed)[i] = i < from.n ? ((const float*)from.scales)[i] : 0.0f;
}

constexpr int kMaxFormats = 32;  // codes are below
template <int code> struct FormatOf {
  using Type = void;
};
#define AQ_FORMAT(code, type)         \
  template <> struct FormatOf<code> { \
    using Type = type;                \
  };                                  \
  constexpr int code_of(type) { return code; }

}  // namespace AQ_NAMESPACE
