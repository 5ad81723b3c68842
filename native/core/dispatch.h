// Which instruction set runs: the best this CPU has, or the one that is named.
#pragma once

#include <string>
#include <vector>

#include "core/kernels.h"

namespace multihead {

// Those this build has and this CPU can run, best last.
std::vector<const Isa*> available();

// The same for a CPU with these features, by the names in features.cpp.
std::vector<const Isa*> available_with(const std::vector<std::string>& features);

// `name` empty: what MULTIHEAD_ISA says, else the best. Throws std::invalid_argument for one that is unknown, or that
// this CPU or this build does not have.
const Isa& choose(const std::string& name);

}  // namespace multihead
