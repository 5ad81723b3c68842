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
  const Kernels* bf16 = nullptr;  // attention with outputs, and products, of bfloat16 tensors; null: by f32
};

extern const Isa isa_portable;
#if defined(__x86_64__)
extern const Isa isa_avx2, isa_avx512, isa_avx512_bf16;
extern const Kernels avx512_f32, avx512_f64, avx512_bf16;
#elif defined(__aarch64__)
extern const Isa isa_neon, isa_neon_bf16;
extern const Kernels neon_f32, neon_f64, neon_bf16;
#endif

}  // namespace multihead
