// The function table of one instruction set, for its translation unit.
#pragma once

#include "forward.inl"
#include "kernels.h"
#include "merge.inl"

namespace multihead {
namespace {

template <class A>
constexpr Kernels kernels_of = {
    Forward<A>::Lanes,
    Forward<A>::block_rows,
    Forward<A>::scratch_bytes,
    Forward<A>::run,
    merge<A>,
};

}  // namespace
}  // namespace multihead
