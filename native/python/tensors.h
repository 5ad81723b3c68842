// A call of the layer, or of one of its projections, as torch's objects say it.
#pragma once

#include <nanobind/nanobind.h>

#include "layer.h"

namespace multihead {

// Remembers torch's types, to be called once before the functions below: until then, and with a torch that does not let
// its tensors be read in C (before 2.10), nothing is plain.
void meet_torch();

struct Widths {
  index E, C, D, V;  // of x, of the context, and of a head's q and k, and v
};

// Fills in sizes, x, context and the four projections from tensors and from `children`, a dictionary with the modules
// q_proj, k_proj, v_proj and o_proj; H and G are what these put out. False where something is not plain: a tensor that
// is not torch's own, or not of fp32 rows on the CPU; a projection that is more than an nn.Linear without hooks; sizes
// that do not fit; nothing to compute.
bool read_layer(nanobind::handle x, nanobind::handle context, nanobind::handle children, const Widths& widths,
                Layer& layer);

// The weight and the bias, or None, of a module that is plain as above; None for any other.
nanobind::object held_by(nanobind::handle module);

// y = x W^T + b with x (..., inputs) of two or three axes and y contiguous; false where something is not plain.
bool read_linear(nanobind::handle x, nanobind::handle weight, nanobind::handle bias, nanobind::handle y,
                 Linear& linear);

}  // namespace multihead
