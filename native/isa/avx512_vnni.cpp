#include "isa/avx512_vnni.h"

#include "kernel/few_bytes.inl"

namespace multihead {
const Kernels avx512_bytes = byte_kernels_of<Vnni>;
const Isa isa_avx512_vnni = {"avx512_vnni", &avx512_f32, &avx512_f64, nullptr, &avx512_bytes};
}  // namespace multihead
