// Sums and maxima of rows one by one, for instruction sets that gain nothing by merging several rows at once.
#pragma once
#include "inline.h"

namespace AQ_NAMESPACE {

template <class Merge> AQ_INLINE Vec merge_rows(const float* rows, int count, Merge merge) {
  float lane[16] = {};
  for (int i = 0; i < count && i < 16; i++) lane[i] = merge(load(rows + i * 16));
  return load(lane);
}
AQ_INLINE Vec sum_rows(const float* rows, int count) {
  return merge_rows(rows, count, [](Vec a) { return sum_lanes(a); });
}
AQ_INLINE Vec max_rows(const float* rows, int count) {
  return merge_rows(rows, count, [](Vec a) { return max_lanes(a); });
}

}  // namespace AQ_NAMESPACE
