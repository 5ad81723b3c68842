#include "kernels.inl"
#include "portable.h"

namespace multihead {
const Isa isa_portable = {"portable", &kernels_of<Portable<float>>, &kernels_of<Portable<double>>};
}
