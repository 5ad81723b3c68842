#include "isa/portable.h"

#include "kernel/kernels.inl"

namespace multihead {
const Isa isa_portable = {"portable", &kernels_of<Portable<float>>, &kernels_of<Portable<double>>};
}
