// The one micro-kernel: C[m][L] from A(i,k) B[k][L], L = NR*W lanes. A is read Item by Item with any strides (keys and
// values as they lie in memory), B is a packed panel of lanes (queries or weights), C has the accumulators' type.
#pragma once

#include "core/plan.h"
#include "isa/lanes.h"

namespace multihead {
namespace {

// What a product multiplies and sums, where all is of one type. An Item is what is read from memory at a time, and a
// lane of a panel; an instruction that adds up products of pairs has pairs of numbers for Items, and floats for sums.
template <class Arch>
struct OwnType {
  using A = Arch;
  using Item = typename A::T;
  using Vector = typename A::F;  // of Items
  static Vector load(const Item* p) { return A::load(p); }
  static Vector all(const Item* p) { return A::all(*p); }
  static typename A::F multiply_add(Vector x, Vector y, typename A::F sum) { return A::fma(x, y, sum); }
};

// Adds to the sums of MR rows, held in registers, over k in [from, to) and the vectors from First on. UnitK: the rows
// are contiguous along k, else along i. Strides and depths count Items.
template <class M, int MR, int NR, bool UnitK, int First = 0>
inline __attribute__((always_inline)) void accumulate_more(const typename M::Item* a, index stride,
                                                           const typename M::Item* b, index from, index to,
                                                           typename M::A::F (&sum)[MR][NR]) {
#pragma GCC unroll 4
  for (index k = from; k < to; ++k) {
    typename M::Vector column[NR];
#pragma GCC unroll 4
    for (int c = First; c < NR; ++c) column[c] = M::load(b + (k * NR + c) * M::A::W);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const typename M::Vector x = M::all(UnitK ? a + i * stride + k : a + k * stride + i);
#pragma GCC unroll 4
      for (int c = First; c < NR; ++c) sum[i][c] = M::multiply_add(x, column[c], sum[i][c]);
    }
  }
}

template <class M, int MR, int NR, bool UnitK, int First = 0>
inline __attribute__((always_inline)) void accumulate(const typename M::Item* a, index stride,
                                                      const typename M::Item* b, index depth,
                                                      typename M::A::F (&sum)[MR][NR]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int c = First; c < NR; ++c) sum[i][c] = typename M::A::F{};
  accumulate_more<M, MR, NR, UnitK, First>(a, stride, b, 0, depth, sum);
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

}  // namespace
}  // namespace multihead
