#include "avx512.h"
#include "kernels.inl"

namespace multihead {
const Isa isa_avx512 = {"avx512", &kernels_of<Avx512>, &kernels_of<Avx512Double>};
}
