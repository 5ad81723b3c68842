// The products of attention, a group of rows at a time: scores from keys and queries, sums of values from weights.
#pragma once

#include "kernel/prefetch.inl"
#include "kernel/product.inl"

namespace multihead {
namespace {

// Scores of the vectors from First on.
template <class M, int NR, int First = 0>
struct ScoreGroups {
  using A = typename M::A;
  using Item = typename M::Item;
  using T = typename A::T;
  using F = typename A::F;
  const Item* k;
  index stride;
  const Item* q;
  index depth;
  T* scores;
  F top[NR];
  Prefetcher<A::NR * A::W, false>* prefetcher = nullptr;  // queries of the next rows

  template <int MR>
  inline __attribute__((always_inline)) void group(index i) {
    if (prefetcher) prefetcher->prefetch_some();
    F sum[MR][NR];
    accumulate<M, MR, NR, true, First>(k + i * stride, stride, q, depth, sum);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int c = First; c < NR; ++c) {
        A::store(scores + ((i + r) * NR + c) * A::W, sum[r][c]);
        top[c] = A::max(sum[r][c], top[c]);
      }
  }
};

// `Clipped`: a vector's sums end where the keys that it sees end.
template <class M, int NR, bool Clipped = false>
struct MixGroups {
  using A = typename M::A;
  using Item = typename M::Item;
  using T = typename A::T;
  using F = typename A::F;
  const Item* v;
  index stride;
  const Item* weights;
  index depth;
  T* mixed;
  F decay[NR];
  index until[NR] = {};                                  // if Clipped: where each vector's Items end
  Prefetcher<A::NR * A::W, true>* prefetcher = nullptr;  // rows of the output

  template <int MR>
  inline __attribute__((always_inline)) void group(index i) {
    if (prefetcher) prefetcher->prefetch_some();
    F sum[MR][NR];
    accumulate<M, MR, NR, false>(v + i, stride, weights, Clipped ? until[0] : depth, sum);
    if constexpr (Clipped && NR > 1)
      accumulate_more<M, MR, NR, false, 1>(v + i, stride, weights, until[0], until[1], sum);
    if constexpr (Clipped && NR > 2)
      accumulate_more<M, MR, NR, false, 2>(v + i, stride, weights, until[1], until[2], sum);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < NR; ++c) {
        T* at = mixed + ((i + r) * NR + c) * A::W;
        A::store(at, A::fma(A::load(at), decay[c], sum[r][c]));
      }
  }
};

// to[count][lanes] = rows . panel. A function of its own: where it is inlined among other loops, the compiler gives
// registers to their constants and spills the sums, which took half as long again.
template <class M, int NR>
__attribute__((noinline)) void products(const typename M::Item* rows, index stride, index count,
                                        const typename M::Item* panel, index depth, typename M::A::T* to) {
  ScoreGroups<M, NR> groups{rows, stride, panel, depth, to, {}};
  in_groups<M::A::MR(NR)>(count, groups);
}

}  // namespace
}  // namespace multihead
