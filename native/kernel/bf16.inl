// The functions of a table for half-precision tensors, where an instruction multiplies their pairs.
#pragma once

#include "core/kernels.h"
#include "kernel/backward_keys.inl"
#include "kernel/few.inl"
#include "kernel/forward.inl"
#include "kernel/linear_few.inl"
#include "kernel/look.inl"
#include "kernel/merge.inl"
#include "kernel/pair_operands.inl"
#include "kernel/received.inl"

namespace multihead {
namespace {

template <class Pairs>
index half_scratch_bytes(const Plan& plan) {
  const index few = Few<Pairs>::scratch_bytes(plan);
  const index block = Forward<PairOperands<Pairs>>::scratch_bytes(plan);
  return few > block ? few : block;
}

template <class Pairs>
constexpr Kernels make_half_kernels() {
  using A = typename Pairs::A;
  Kernels k{};
  k.lanes = A::NR * A::W;
  k.few = Few<Pairs>::most_rows;
  k.block_rows = block_rows<A>;
  k.scratch_bytes = half_scratch_bytes<Pairs>;
  k.attend_block = Forward<PairOperands<Pairs>>::run;
  k.attend_few = Few<Pairs>::run;
  k.merge = merge<A>;
  k.backward_scratch = backward_scratch<PairRows<Pairs>>;
  k.backward_queries = BackwardQueries<PairRows<Pairs>>::run;
  k.backward_keys = BackwardKeys<PairRows<Pairs>>::run;
  k.look_scratch = Look<PairRows<Pairs>>::scratch_bytes;
  k.look_weights = Look<PairRows<Pairs>>::write;
  k.look_map = Look<PairRows<Pairs>>::pool;
  k.received_scratch = Received<PairRows<Pairs>>::scratch_bytes;
  k.received = Received<PairRows<Pairs>>::run;
  k.linear_few_scratch = LinearFew<Pairs>::scratch_bytes;
  k.linear_few = LinearFew<Pairs>::run;
  k.linear_block_scratch = LinearBlock<PairFactors<Pairs>>::scratch_bytes;
  k.linear_block = LinearBlock<PairFactors<Pairs>>::run;
  return k;
}

template <class Pairs>
constexpr Kernels half_kernels_of = make_half_kernels<Pairs>();

}  // namespace
}  // namespace multihead
