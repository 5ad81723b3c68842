#include "isa/avx2.h"

#include "kernel/kernels.inl"

namespace multihead {
const Isa isa_avx2 = {"avx2", &kernels_of<Avx2>, &kernels_of<Avx2Double>};
}
