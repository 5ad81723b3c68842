// The whole layer: projections, attention and output in one call, over the weights as they lie.
#pragma once

#include "core/kernels.h"

namespace multihead {

struct Projection {
  const void* weight = nullptr;  // (outputs, inputs), rows `row` numbers apart
  index row = 0;
  const void* bias = nullptr;  // (outputs,) or null
  index column = 1;            // other than 1: outputs lie side by side, inputs so many numbers apart
};

// The rows that a product reads, (B, N, width), as they lie.
struct Rows {
  const void* data;
  index batch, row, B, N, width;
  Type type;

  index count() const { return B * N; }
};

// x W^T + b into y (B, N, outputs), contiguous; its weights are of the type `weights`.
Linear linear_of(const Rows& x, const Projection& p, Type weights, index outputs, void* y);

// Keys and values of earlier tokens, (B, G, room, width), which those of this call join: token n of batch row b as row
// n + first. Rows beyond are not read, and nothing is written before them.
struct Store {
  View k, v;                // no address: none
  View k_scales, v_scales;  // (B, G, room) floats, where k and v are of i8
  index first = 0;
  const std::int64_t* firsts = nullptr;  // (B,), added to `first`; or null
  const std::int64_t* real = nullptr;    // (B,): how many tokens of each batch row join; null: all
};

// x (B, Q, E) and context (B, N, C), rows contiguous, `*_batch` and `*_row` numbers apart; y (B, Q, outputs)
// contiguous. `plan` says sizes, mask and options; its q, k, v and out are filled in here. Its K is N, or where there
// is a store what is visible of that, and its kv_type is the store's; N is 0 where the store has all keys already. The
// projections are of the type `weights`, all else is of the plan's; where they differ the plan's is float32, and
// neither is float64.
struct Layer {
  Plan plan;
  index E = 0, C = 0, outputs = 0, N = 0;
  const void *x = nullptr, *context = nullptr;
  index x_batch = 0, x_row = 0, context_batch = 0, context_row = 0;
  Projection q, k, v, o;
  Type weights = Type::f32;
  Norm q_norm, k_norm;
  Rotation q_rotation, k_rotation;
  Store store;
  void* y = nullptr;
};

// These throw std::bad_alloc, and nothing else.
void run_layer(Layer layer, const Isa& isa, int threads);
void run_linear(const Linear& linear, const Isa& isa, int threads);            // y in one head; not float64
void run_pair(const Linear& a, const Linear& b, const Isa& isa, int threads);  // two products of the same rows
void run_heads(const Heads& heads, index tokens, const Isa& isa, int threads);

}  // namespace multihead
