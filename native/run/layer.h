// The whole layer: projections, attention and output in one call, over the weights as they lie.
#pragma once

#include "kernels.h"

namespace multihead {

struct Projection {
  const float* weight = nullptr;  // (outputs, inputs), rows `row` numbers apart
  index row = 0;
  const float* bias = nullptr;  // (outputs,) or null
};

// x (B, Q, E) and context (B, K, C), rows contiguous, `*_batch` and `*_row` numbers apart; y (B, Q, E) contiguous.
// `plan` says sizes, mask and options; its q, k, v and out are filled in here. fp32 only.
struct Layer {
  Plan plan;
  index E, C;
  const float *x, *context;
  index x_batch, x_row, context_batch, context_row;
  Projection q, k, v, o;
  float* y;
};

// These throw std::bad_alloc, and nothing else.
void run_layer(Layer layer, const Isa& isa, int threads);
void run_linear(const Linear& linear, const Isa& isa, int threads);  // fp32, y in one head

}  // namespace multihead
