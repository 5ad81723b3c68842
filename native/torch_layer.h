// A call of the layer, as torch's objects say it.
#pragma once

#include <nanobind/nanobind.h>

#include "layer.h"

namespace multihead {

struct Widths {
  index E, C, D, V;  // of x, of the context, and of a head's q and k, and v
};

// Fills in sizes, x, context and the four projections from tensors and from `children`, a dictionary with the modules
// q_proj, k_proj, v_proj and o_proj; H and G are what these put out. False where something is not plain: a tensor that
// is not torch's own, or not of fp32 rows on the CPU; a projection that is more than an nn.Linear without hooks; sizes
// that do not fit; nothing to compute; a torch that does not let its tensors be read in C (before 2.10).
bool read_layer(nanobind::handle x, nanobind::handle context, nanobind::handle children, const Widths& widths,
                Layer& layer);

}  // namespace multihead
