// The only file of the core that knows Python.
#include <nanobind/nanobind.h>

#include "features.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
  module.doc() = "The C++ core of multihead.";
  module.def(
      "cpu_features",
      [] {
        nb::dict features;
        for (const multihead::Feature* f = multihead::cpu_features(); f->name; ++f) features[f->name] = f->present;
        return features;
      },
      "What this CPU can do, by name: {'avx2': True, ...}.");
}
