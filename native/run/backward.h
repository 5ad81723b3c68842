// The backward pass of one call of attention.
#pragma once

#include "core/kernels.h"

namespace multihead {

// Fills d_q, d_k and d_v; a row that sees nothing has gradient 0. Throws std::bad_alloc, and nothing else.
void backward(const Gradients& gradients, const Isa& isa, int threads);

}  // namespace multihead
