// Weights computed again from the state of an earlier pass: written out, summed for each key, or pooled.
#pragma once

#include "core/kernels.h"

namespace multihead {

// Each thing that is wanted is one pass over the scores. Throws std::bad_alloc, and nothing else.
void look(const Recompute& recompute, const Isa& isa, int threads);

}  // namespace multihead
