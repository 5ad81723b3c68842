// One case of the table run on the core: every result that it names.
#pragma once

#include "core/kernels.h"
#include "driver/cases.h"

namespace multihead {

// By name, as the case expects them. Throws std::runtime_error for a kind or a name that is unknown.
std::map<std::string, Tensor> run(const Case& the, const Isa& isa, int threads);

}  // namespace multihead
