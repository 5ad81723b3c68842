#include "isa/neon.h"

#include "kernel/kernels.inl"

namespace multihead {
const Kernels neon_f32 = kernels_of<Neon>, neon_f64 = kernels_of<NeonDouble>;
const Isa isa_neon = {"neon", &neon_f32, &neon_f64};
}  // namespace multihead
