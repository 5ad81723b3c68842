// One call of attention: cut into tasks, run on threads, merged where keys were split.
#pragma once

#include "core/kernels.h"

namespace multihead {

// Throws std::bad_alloc, and nothing else. The plan must be valid: python/calls.cpp refuses any other.
void attend(const Plan& plan, const Isa& isa, int threads);

}  // namespace multihead
