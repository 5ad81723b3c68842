// What an instruction set offers: the same functions, compiled for it.
#pragma once

#include "core/plan.h"

namespace multihead {

// y = x W^T + b. Row i of x is row i % batch_rows of batch row i / batch_rows, and so it is in y, where outputs lie in
// heads of `y_width`, `y_head` numbers apart.
struct Linear {
  const void* x;
  index x_batch, x_row, batch_rows, rows;
  const void* weight;
  index weight_row;
  const void* bias;  // or null
  index inputs, outputs;
  void* y;
  index y_batch, y_head, y_row, y_width;
  Type x_type = Type::f32;  // of x and y
  Type type = Type::f32;    // of weight and bias
  index weight_column = 1;  // numbers from one input's weight to the next; other than 1 only where weight_row is 1
};

// RoPE by the cosines and sines of its angles: rows of `pairs` floats, for each token of (B, N) or by its position.
struct Rotation {
  const float *cos = nullptr, *sin = nullptr;  // null: none
  index pairs = 0;                             // of the first 2 * pairs numbers of a head; the others stay
  bool interleaved = false;                    // numbers 2p and 2p + 1 are a pair, instead of p and p + pairs
  index row = 0;                               // numbers from one row to the next
  index batch = 0, token = 0;                  // rows from one batch row, or token, to the next, where no position says
  const std::int64_t* positions = nullptr;     // the row of each token, or of the first token of each batch row
  index positions_batch = 0, positions_token = 0;
  index first = 0;  // the row of the first token of all

  index offset(index b, index n) const {
    const index at = positions ? positions[b * positions_batch + n * positions_token] : 0;
    return (at + first + b * batch + n * token) * row;
  }
};

// RMS norm of each head: x / sqrt(mean(x^2) + eps) * weight.
struct Norm {
  bool wanted = false;
  const float* weight = nullptr;  // (width,) or null
  double eps = 0;
};

// Heads of q, k or v, (B, heads, N, width), between their projection and attention: normed, turned, and put where
// attention reads them. Token n of batch row b becomes row n + first of `to`.
struct Heads {
  View from, to;  // may be the same
  Type from_type = Type::f32, to_type = Type::f32;
  index heads = 0, N = 0, width = 0;
  Norm norm;
  Rotation rotation;
  index first = 0;
  const std::int64_t* firsts = nullptr;  // (B,), added to `first`; or null
  const std::int64_t* real = nullptr;    // (B,): tokens of batch row b from here on are left out; or null
  View scales{};  // (B, heads, rows) floats, where `to` is of i8: a row is its numbers times its scale
};

// act(gate) * up, row by row; `to` may be `gate`.
struct Gates {
  const void *gate, *up;
  index row;  // numbers from one row of both to the next
  void* to;
  index to_row, width;
  Type type;
  bool tanh;  // GELU by tanh instead of SiLU
};

// Filled by name: see kernel/kernels.inl.
struct Kernels {
  index lanes = 0;                      // query rows side by side in vectors
  index few = 0;                        // at most this many rows go to attend_few
  index (*block_rows)(const Sizes&);    // rows a task of attend_block may have
  index (*scratch_bytes)(const Plan&);  // what a thread needs to run a task of this plan
  void (*attend_block)(const Plan&, const Task&, void* scratch);
  void (*attend_few)(const Plan&, const Task&, void* scratch);
  void (*merge)(const Plan&, const Task&, const void* const* parts, index count);
  index (*backward_scratch)(const Plan&);
  void (*backward_queries)(const Gradients&, const Task&, void* scratch);
  void (*backward_keys)(const Gradients&, const Task&, void* scratch);
  index (*look_scratch)(const Recompute&, index bins);
  void (*look_weights)(const Recompute&, const Task&, void* scratch);
  void (*look_map)(const Recompute&, const Task&, void* scratch);  // a task's rows are bins of queries
  index (*received_scratch)(const Recompute&);
  void (*received)(const Recompute&, const Task&, void* scratch);
  // Tokens [from, to), of which b * N + n is token n of batch row b. Scratch for `width` floats; not in the table of
  // f64.
  void (*prepare_heads)(const Heads&, index from, index to, void* scratch);
  // Scratch for twice `width` floats, rounded up to whole vectors; not in the table of f64.
  void (*gate_rows)(const Gates&, index from, index to, void* scratch);
  // Outputs [first, last) of a few rows, whose y lie one behind the other in one head, or of `lanes` rows from `row`
  // on. `packed`: the call before, in the same scratch, was of the same rows of x.
  index (*linear_few_scratch)(const Linear&);
  void (*linear_few)(const Linear&, index row, index first, index last, bool packed, void* scratch);
  index (*linear_block_scratch)(const Linear&);
  void (*linear_block)(const Linear&, index row, index first, index last, bool packed, void* scratch);
};

struct Isa {
  const char* name;
  const Kernels* f32;  // fp32, and the half types converted to it
  const Kernels* f64;
  const Kernels* bf16 = nullptr;   // attention, and products, of bfloat16 tensors; null: by f32
  const Kernels* bytes = nullptr;  // attention of a few rows to keys and values of i8; null: by f32
};

extern const Isa isa_portable;
#if defined(__x86_64__)
extern const Isa isa_avx2, isa_avx512, isa_avx512_vnni, isa_avx512_bf16;
extern const Kernels avx512_f32, avx512_f64, avx512_bytes, avx512_bf16;
#elif defined(__aarch64__)
extern const Isa isa_neon, isa_neon_bf16;
extern const Kernels neon_f32, neon_f64, neon_bf16;
#endif

}  // namespace multihead
