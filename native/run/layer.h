// The whole layer: projections, attention and output in one call, over the weights as they lie.
#pragma once

#include "core/kernels.h"

namespace multihead {

struct Projection {
  const void* weight = nullptr;  // (outputs, inputs), rows `row` numbers apart
  index row = 0;
  const void* bias = nullptr;  // (outputs,) or null
};

// x (B, Q, E) and context (B, K, C), rows contiguous, `*_batch` and `*_row` numbers apart; y (B, Q, E) contiguous.
// `plan` says sizes, mask and options; its q, k, v and out are filled in here. All is of the plan's type, which is
// not float64.
struct Layer {
  Plan plan;
  index E, C;
  const void *x, *context;
  index x_batch, x_row, context_batch, context_row;
  Projection q, k, v, o;
  void* y;
};

// These throw std::bad_alloc, and nothing else.
void run_layer(Layer layer, const Isa& isa, int threads);
void run_linear(const Linear& linear, const Isa& isa, int threads);  // y in one head; not float64

}  // namespace multihead
