// The feed-forward part of a layer in one call, over the weights as they lie.
#pragma once

#include "run/layer.h"

namespace multihead {

// y = down(act(gate(x)) * up(x)): x (B, N, inputs), `gate` and `up` (width, inputs), `down` (outputs, width); y and
// `middle` (rows, 2 * width) contiguous. All of one type, which is not float64.
struct Mlp {
  Type type = Type::f32;
  const void* x = nullptr;
  index x_batch = 0, x_row = 0, batch_rows = 0, rows = 0, inputs = 0, width = 0, outputs = 0;
  Projection gate, up, down;
  bool tanh = false;  // GELU by tanh instead of SiLU
  void *middle = nullptr, *y = nullptr;
};

void run_mlp(const Mlp& mlp, const Isa& isa, int threads);  // throws std::bad_alloc, and nothing else

}  // namespace multihead
