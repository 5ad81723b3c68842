// The one micro-kernel: C[m][L] from A(i,k) B[k][L], L = NR*W lanes. A is read number by number with any strides (keys
// and values as they lie in memory), B is a packed panel of lanes (queries or weights).
#pragma once

#include "lanes.h"
#include "plan.h"

namespace multihead {
namespace {

// Adds to the sums of MR rows, held in registers, over k in [from, to) and the vectors from First on. UnitK: A is
// contiguous along k, else along i.
template <class A, int MR, int NR, bool UnitK, int First = 0>
inline __attribute__((always_inline)) void accumulate_more(const typename A::T* a, index stride, const typename A::T* b,
                                                           index from, index to, typename A::F (&sum)[MR][NR]) {
  using F = typename A::F;
#pragma GCC unroll 4
  for (index k = from; k < to; ++k) {
    F column[NR];
#pragma GCC unroll 4
    for (int c = First; c < NR; ++c) column[c] = A::load(b + (k * NR + c) * A::W);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const F x = A::all(UnitK ? a[i * stride + k] : a[k * stride + i]);
#pragma GCC unroll 4
      for (int c = First; c < NR; ++c) sum[i][c] = A::fma(x, column[c], sum[i][c]);
    }
  }
}

template <class A, int MR, int NR, bool UnitK, int First = 0>
inline __attribute__((always_inline)) void accumulate(const typename A::T* a, index stride, const typename A::T* b,
                                                      index depth, typename A::F (&sum)[MR][NR]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int c = First; c < NR; ++c) sum[i][c] = typename A::F{};
  accumulate_more<A, MR, NR, UnitK, First>(a, stride, b, 0, depth, sum);
}

// Runs fn.template group<MR>(first) over `count` rows in groups of at most Most, the last ones evened out so that no
// group is too short to hide the latency of its sums.
template <int Most, class Fn>
inline __attribute__((always_inline)) void in_groups(index count, Fn&& fn) {
  index i = 0;
  while (count - i >= 2 * Most || count - i == Most) {
    fn.template group<Most>(i);
    i += Most;
  }
  while (i < count) {
    const index left = count - i;
    const index take = left <= Most ? left : left - Most >= (Most + 1) / 2 ? index(Most) : (left + 1) / 2;
    switch (take) {
      case 1:
        fn.template group<1>(i);
        break;
      case 2:
        fn.template group<2>(i);
        break;
      case 3:
        fn.template group<3>(i);
        break;
      case 4:
        fn.template group<(Most < 4 ? Most : 4)>(i);
        break;
      case 5:
        fn.template group<(Most < 5 ? Most : 5)>(i);
        break;
      case 6:
        fn.template group<(Most < 6 ? Most : 6)>(i);
        break;
      case 7:
        fn.template group<(Most < 7 ? Most : 7)>(i);
        break;
      default:
        fn.template group<Most>(i);
        break;
    }
    i += take;
  }
}

template <class A, int NR>
struct ProductGroups {
  const typename A::T* rows;
  index stride;
  const typename A::T* panel;
  index depth;
  typename A::T* to;

  template <int MR>
  inline __attribute__((always_inline)) void group(index i) {
    typename A::F sum[MR][NR];
    accumulate<A, MR, NR, true>(rows + i * stride, stride, panel, depth, sum);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < NR; ++c) A::store(to + ((i + r) * NR + c) * A::W, sum[r][c]);
  }
};

// to[count][lanes] = rows . panel. A function of its own: where it is inlined among other loops, the compiler gives
// registers to their constants and spills the sums, which took half as long again.
template <class A, int NR>
__attribute__((noinline)) void products(const typename A::T* rows, index stride, index count,
                                        const typename A::T* panel, index depth, typename A::T* to) {
  ProductGroups<A, NR> groups{rows, stride, panel, depth, to};
  in_groups<A::MR(NR)>(count, groups);
}

}  // namespace
}  // namespace multihead
