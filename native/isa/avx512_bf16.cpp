#include "isa/avx512_bf16.h"

#include "kernel/bf16.inl"

namespace multihead {
const Kernels avx512_bf16 = half_kernels_of<Bf16Pairs>;
const Isa isa_avx512_bf16 = {"avx512_bf16", &avx512_f32, &avx512_f64, &avx512_bf16, &avx512_bytes};
}  // namespace multihead
