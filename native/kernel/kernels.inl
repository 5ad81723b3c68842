// The function table of one instruction set, for its translation unit.
#pragma once

#include "backward_keys.inl"
#include "few.inl"
#include "forward.inl"
#include "kernels.h"
#include "linear_block.inl"
#include "linear_few.inl"
#include "look.inl"
#include "merge.inl"
#include "received.inl"

namespace multihead {
namespace {

template <class A>
index scratch_bytes(const Plan& plan) {
  const index few = Few<A>::scratch_bytes(plan), block = Forward<A>::scratch_bytes(plan);
  return few > block ? few : block;
}

template <class A>
index backward_scratch(const Plan& plan) {
  const index a = BackwardQueries<A>::scratch_bytes(plan), b = BackwardKeys<A>::scratch_bytes(plan);
  return a > b ? a : b;
}

// clang-format off
template <class A>
constexpr Kernels kernels_of = {
    Forward<A>::Lanes,
    Few<A>::most_rows,
    Forward<A>::block_rows,
    scratch_bytes<A>,
    Forward<A>::run,
    Few<A>::run,
    merge<A>,
    backward_scratch<A>,
    BackwardQueries<A>::run,
    BackwardKeys<A>::run,
    Look<A>::scratch_bytes,
    Look<A>::write,
    Look<A>::pool,
    Received<A>::scratch_bytes,
    Received<A>::run,
    LinearFew<A>::scratch_bytes,
    LinearFew<A>::run,
    LinearBlock<A>::scratch_bytes,
    LinearBlock<A>::run,
};
// clang-format on

}  // namespace
}  // namespace multihead
