#include "isa/avx512.h"

#include "kernel/kernels.inl"

namespace multihead {
const Kernels avx512_f32 = kernels_of<Avx512>, avx512_f64 = kernels_of<Avx512Double>;
const Isa isa_avx512 = {"avx512", &avx512_f32, &avx512_f64};
}  // namespace multihead
