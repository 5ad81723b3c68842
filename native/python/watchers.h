// Who would notice that a call leaves torch.
#pragma once

#include <nanobind/nanobind.h>

namespace multihead {

// None, or (reason, dispatched): see Reason in tensors.h. A compiler that traces the call must be asked in Python,
// which is what it reads. `modules`: that modules are not called, autocast would notice too.
nanobind::object watched(bool modules);

// Whether torch records gradients, and how many threads it may use.
bool records_gradients();
int torch_threads();

}  // namespace multihead
