// Dot products of rows as they lie in memory with a few rows in scratch: every row from memory is read once.
#pragma once

#include "lanes.h"
#include "plan.h"

namespace multihead {
namespace {

// W dot products: lane r * (W / R) + i is from[i] . few[r], where few[r] starts at few + r * step and is padded with
// zeros to whole vectors. `from` is read only up to `width`. What lies `ahead` numbers further is fetched meanwhile:
// rows are too short for the hardware to find out that they follow each other.
template <class A, int R>
inline __attribute__((always_inline)) typename A::F dots(const typename A::T* const (&from)[A::W / R],
                                                         const typename A::T* few, index step, index width,
                                                         index ahead) {
  using F = typename A::F;
  constexpr int W = A::W, at_once = W / R;
  F sum[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) sum[i] = F{};
  index d = 0;
  for (; d + W <= width; d += W) {
    F right[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) right[r] = A::load(few + r * step + d);
#pragma GCC unroll 16
    for (int i = 0; i < at_once; ++i) {
      const F x = A::load(from[i] + d);
      fetch(from[i] + d + ahead);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r * at_once + i] = A::fma(x, right[r], sum[r * at_once + i]);
    }
  }
  if (d < width)
    for (int i = 0; i < at_once; ++i) {
      const F x = A::load_some(from[i] + d, static_cast<int>(width - d));
      for (int r = 0; r < R; ++r) sum[r * at_once + i] = A::fma(x, A::load(few + r * step + d), sum[r * at_once + i]);
    }
  return A::sums(sum);
}

}  // namespace
}  // namespace multihead
