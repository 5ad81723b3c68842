// Weights that exist nowhere: seen, added up for each key, or pooled, from the state of a pass that came before.
#pragma once

#include "kernels.h"

namespace multihead {

// Each thing that is wanted is one pass over the scores. Throws std::bad_alloc, and nothing else.
void look(const Looking& looking, const Isa& isa, int threads);

}  // namespace multihead
