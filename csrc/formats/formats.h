// The storage formats there are: one line each. Every switch over them is made here.
#pragma once
#include "bfloat16.h"
#include "bfloat16_dot.h"
#include "bfloat16_tiles.h"
#include "float16.h"
#include "float32.h"
#include "gguf256.h"
#include "gguf32.h"
#include "int4.h"
#include "int8.h"
#include "integer_dot.h"
#include "mxfp4.h"

namespace AQ_NAMESPACE {

// Calls f(format) with the format of a code; false if there is none.
template <int code = 0, class F> AQ_INLINE bool with_format(int dtype, const F& f) {
  if constexpr (code == kMaxFormats) {
    return false;
  } else {
    using Type = typename FormatOf<code>::Type;
    if constexpr (!kIsSame<Type, void>)
      if (dtype == code) return f(Type{}), true;
    return with_format<code + 1>(dtype, f);
  }
}

// Calls f with a null pointer to the element type of dtype; false if dtype has none. with_elements: for rows of numbers
// such as embeddings; with_keys: for keys and values.
template <class F> AQ_INLINE bool with_elements(int dtype, const F& f) {
  bool found = false;
  with_format(dtype, [&](auto format) {
    using Element = typename decltype(format)::Element;
    if constexpr (!kIsSame<Element, void>) f((const Element*)nullptr), found = true;
  });
  return found;
}
template <class F> AQ_INLINE bool with_keys(int dtype, const F& f) {
  bool found = false;
  with_format(dtype, [&](auto format) {
    using Key = typename decltype(format)::Key;
    if constexpr (!kIsSame<Key, void>) f((const Key*)nullptr), found = true;
  });
  return found;
}

// Calls f(format) for a format of blocks whose rows can be unpacked (kernels/unpack.h): for embeddings.
template <class F> AQ_INLINE bool with_blocks(int dtype, const F& f) {
  bool found = false;
  with_format(dtype, [&](auto format) {
    if constexpr (decltype(format)::kIsUnpacked) f(format), found = true;
  });
  return found;
}

AQ_INLINE bool is_in_blocks(int dtype) {
  return with_blocks(dtype, [](auto) {});
}

// What linears stored as dtype multiply: float32, inputs rounded to bfloat16 as in the second and fourth arithmetic, or
// to integers as in the third.
template <class Input> AQ_INLINE bool takes(int dtype) {
  bool same = false;
  with_format(dtype, [&](auto format) { same = kIsSame<typename decltype(format)::Input, Input>; });
  return same;
}
AQ_INLINE bool takes_rounded(int dtype) { return takes<Pair>(dtype); }
AQ_INLINE bool takes_codes(int dtype) { return takes<Codes>(dtype); }
// Whether linears stored as dtype are of the second arithmetic, or of the fourth.
AQ_INLINE bool is_dot(int dtype) {
  bool is = false;
  with_format(dtype, [&](auto format) { is = format.kIsApart; });
  return is;
}
AQ_INLINE bool is_tiled(int dtype) {
  bool is = false;
  with_format(dtype, [&](auto format) { is = format.kIsTiled; });
  return is;
}
// Whether keys and values of dtype are stored as Key.
template <class Key> AQ_INLINE bool holds(int dtype) {
  bool same = false;
  with_keys(dtype, [&](auto* element) { same = kIsSame<decltype(element), const Key*>; });
  return same;
}
// Whether keys stored as dtype can be multiplied in the second arithmetic.
AQ_INLINE bool holds_rounded(int dtype) { return holds<Rounded>(dtype); }
AQ_INLINE bool holds_codes(int dtype) { return holds<aq::Code>(dtype); }

}  // namespace AQ_NAMESPACE
