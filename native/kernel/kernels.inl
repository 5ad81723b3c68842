// The function table of one instruction set, for its translation unit.
#pragma once

#include "core/kernels.h"
#include "kernel/backward_keys.inl"
#include "kernel/few.inl"
#include "kernel/forward.inl"
#include "kernel/gates.inl"
#include "kernel/heads.inl"
#include "kernel/linear_block.inl"
#include "kernel/linear_few.inl"
#include "kernel/look.inl"
#include "kernel/merge.inl"
#include "kernel/received.inl"

namespace multihead {
namespace {

template <class A>
index scratch_bytes(const Plan& plan) {
  const index few = Few<OwnReader<A>>::scratch_bytes(plan), block = Forward<OwnOperands<A>>::scratch_bytes(plan);
  return few > block ? few : block;
}

template <class A>
constexpr Kernels make_kernels() {
  Kernels k{};
  k.lanes = A::NR * A::W;
  k.few = Few<OwnReader<A>>::most_rows;
  k.block_rows = block_rows<A>;
  k.scratch_bytes = scratch_bytes<A>;
  k.attend_block = Forward<OwnOperands<A>>::run;
  k.attend_few = attend_few<A>;
  k.merge = merge<A>;
  k.backward_scratch = backward_scratch<OwnRows<A>>;
  k.backward_queries = BackwardQueries<OwnRows<A>>::run;
  k.backward_keys = BackwardKeys<OwnRows<A>>::run;
  k.look_scratch = Look<OwnRows<A>>::scratch_bytes;
  k.look_weights = Look<OwnRows<A>>::write;
  k.look_map = Look<OwnRows<A>>::pool;
  k.received_scratch = Received<OwnRows<A>>::scratch_bytes;
  k.received = Received<OwnRows<A>>::run;
  if constexpr (sizeof(typename A::T) == 4) k.prepare_heads = PrepareHeads<A>::run;
  if constexpr (sizeof(typename A::T) == 4) k.gate_rows = GateRows<A>::run;
  k.linear_few_scratch = LinearWidened<A>::scratch_bytes;
  k.linear_few = linear_few<A>;
  k.linear_block_scratch = LinearBlock<OwnFactors<A>>::scratch_bytes;
  k.linear_block = LinearBlock<OwnFactors<A>>::run;
  return k;
}

template <class A>
constexpr Kernels kernels_of = make_kernels<A>();

}  // namespace
}  // namespace multihead
