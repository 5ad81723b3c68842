// Dot products of rows as they lie in memory with a few rows in scratch: every row from memory is read once.
#pragma once

#include "kernel/readers.inl"

namespace multihead {
namespace {

// What to prefetch meanwhile, because it is read next: while number d of row i is read, from + d * along + i * across.
template <class T>
struct Ahead {
  const T* from;
  index along, across;
};

// to[r * N + i] = from[i] . few[r], where few[r] starts at few + r * step and is padded with zeros to whole vectors.
// `from` is read only up to `width`.
template <class Reader, int N, int R>
inline __attribute__((always_inline)) void dots(const typename Reader::Number* const (&from)[N],
                                                const typename Reader::Kept* few, index step, index width,
                                                const Ahead<typename Reader::Number>& ahead,
                                                typename Reader::A::T* to) {
  using A = typename Reader::A;
  using F = typename A::F;
  constexpr int W = A::W, groups = (N * R + W - 1) / W;
  constexpr index near = 64 / static_cast<index>(sizeof(typename Reader::Number)), line = Reader::step;
  F sum[groups][W];
#pragma GCC unroll 16
  for (int i = 0; i < groups * W; ++i) sum[i / W][i % W] = F{};
  index d = 0;
  for (; d + Reader::step <= width; d += Reader::step) {
    typename Reader::Vector left[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      left[i] = Reader::load(from[i] + d);
      if (line >= near || d % near == 0) prefetch(ahead.from + d * ahead.along + i * ahead.across);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename Reader::Vector right = Reader::load_kept(few + r * step + d);
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        F& at = sum[(r * N + i) / W][(r * N + i) % W];
        at = Reader::multiply_add(left[i], right, at);
      }
    }
  }
  if (d < width)
    for (int i = 0; i < N; ++i) {
      const typename Reader::Vector left = Reader::load_some(from[i] + d, static_cast<int>(width - d));
      for (int r = 0; r < R; ++r) {
        F& at = sum[(r * N + i) / W][(r * N + i) % W];
        at = Reader::multiply_add(left, Reader::load_kept(few + r * step + d), at);
      }
    }
#pragma GCC unroll 4
  for (int g = 0; g < groups; ++g) {
    const F sums = A::sums(sum[g]);
    if ((g + 1) * W <= N * R)
      A::store(to + g * W, sums);
    else
      A::store_some(to + g * W, sums, N * R - g * W);
  }
}

}  // namespace
}  // namespace multihead
