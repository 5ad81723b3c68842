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

// The same with one row in scratch, to[i] = from[i] . x, where rows lie `row` numbers apart: a few of them at a time,
// each in two sums. More rows at once are more streams than the caches follow, and what is prefetched for them, whole
// pages apart, evicts itself: 16 rows of 1024 floats were read at 100 GB/s, four at 165 (third-level cache, two
// threads, Zen 4). A first-level cache of 48 KB has room for the 8 KB that are prefetched beside x; read so (`Near`), a
// layer of one row in bfloat16 took 0.86 of the time, and from memory as long as before (Zen 5).
template <class Reader, int N, bool Near>
inline __attribute__((always_inline)) void dots_of_one(const typename Reader::Number* const (&from)[N],
                                                       const typename Reader::Kept* x, index width, index row,
                                                       typename Reader::A::T* to) {
  using A = typename Reader::A;
  using F = typename A::F;
  using Number = typename Reader::Number;
  constexpr int W = A::W, together = N < 4 ? N : 4, step = Reader::step;
  static_assert(N <= W && N % together == 0, "one vector of sums");
  constexpr index size = static_cast<index>(sizeof(Number)), near = 64 / size, distance = 8192 / size;
  const bool dense = row == width;  // what is read next is prefetched in the order it lies in memory
  const index along = dense ? together : 1, across = dense ? 2 * step : row;
  F sum[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) sum[i] = F{};
#pragma GCC unroll 4
  for (int first = 0; first < N; first += together) {
    const Number* next = from[first] + (dense ? distance : together * row);
    F part[together][2];
#pragma GCC unroll 4
    for (int i = 0; i < together; ++i) part[i][0] = part[i][1] = F{};
    index d = 0;
    for (; d + 2 * step <= width; d += 2 * step)
#pragma GCC unroll 4
      for (int i = 0; i < together; ++i)
#pragma GCC unroll 2
        for (int u = 0; u < 2; ++u) {
          if (u == 0 || step >= near) prefetch<Near>(next + d * along + i * across + u * step);
          const index at = d + u * step;
          part[i][u] = Reader::multiply_add(Reader::load(from[first + i] + at), Reader::load_kept(x + at), part[i][u]);
        }
    for (int i = 0; i < together; ++i) {
      index at = d;
      if (at + step <= width) {
        part[i][0] = Reader::multiply_add(Reader::load(from[first + i] + at), Reader::load_kept(x + at), part[i][0]);
        at += step;
      }
      if (at < width) {
        const auto last = Reader::load_some(from[first + i] + at, static_cast<int>(width - at));
        part[i][1] = Reader::multiply_add(last, Reader::load_kept(x + at), part[i][1]);
      }
      sum[first + i] = part[i][0] + part[i][1];
    }
  }
  const F sums = A::sums(sum);
  if (N == W)
    A::store(to, sums);
  else
    A::store_some(to, sums, N);
}

}  // namespace
}  // namespace multihead
