#include "isa/neon_bf16.h"

#include "kernel/bf16.inl"

namespace multihead {
const Kernels neon_bf16 = half_kernels_of<NeonPairs>;
const Isa isa_neon_bf16 = {"neon_bf16", &neon_f32, &neon_f64, &neon_bf16};
}  // namespace multihead
