// The Python module multihead._native: what is there, and what a call can be asked. See native/README.md.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "core/dispatch.h"
#include "core/features.h"
#include "python/calls.h"
#include "python/watchers.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
  using namespace multihead;
  module.doc() = "The C++ core of multihead.";
  module.def(
      "cpu_features",
      [] {
        nb::dict features;
        for (const Feature* f = cpu_features(); f->name; ++f) features[f->name] = f->present;
        return features;
      },
      "What this CPU can do, by name: {'avx2': True, ...}.");
  module.def("cpu_is_intel", cpu_is_intel, "Whether Intel has made this CPU.");
  module.def(
      "instruction_sets",
      [](nb::object features) {
        std::vector<std::string> given;
        if (!features.is_none())
          for (nb::handle name : features) given.push_back(nb::cast<std::string>(name));
        nb::list names;
        for (const Isa* isa : features.is_none() ? available() : available_with(given)) names.append(isa->name);
        return names;
      },
      nb::arg("features") = nb::none(),
      "The builds of the kernel that this CPU, or one with these features, can run, best last.");
#ifdef _OPENMP
  module.attr("openmp") = true;
#else
  module.attr("openmp") = false;
#endif
  module.def(
      "instruction_set", [](const std::string& name) { return std::string(choose(name).name); }, nb::arg("name") = "",
      "The build that runs: the one named, or MULTIHEAD_ISA's, or the best.");
  module.attr("most_weighed_keys") = most_weighed_keys;
  module.def("remember_torch", remember_torch, nb::arg("in_c") = true,
             "Read torch's tensors by its C functions, or by their attributes.");

  module.def("remember_forward", remember_forward, nb::arg("type"),
             "The type of a forward that an nn.Linear may have of its own and still be plain.");

  nb::class_<AttentionCall>(module, "Attention", "A call of attention, read and kept alive.")
      .def_prop_ro(
          "sizes",
          [](const AttentionCall& call) {
            const Sizes& s = call.plan.sizes;
            return nb::make_tuple(s.B, s.H, s.G, s.Q, s.K, s.D, s.V);
          },
          "B, H, G, Q, K, D, V")
      .def_prop_ro("is_plain", [](const AttentionCall& call) { return call.plan.plain(); })
      .def_prop_ro("scale", [](const AttentionCall& call) { return call.plan.scale; })
      .def_prop_rw(
          "seed", [](const AttentionCall& call) { return call.plan.seed; },
          [](AttentionCall& call, std::uint64_t seed) { call.plan.seed = seed; })
      .def("see", [](AttentionCall& call, nb::handle visible) { return see(call.plan, call.kept, visible); })
      .def("attend", run_attend, nb::arg("threads"), nb::arg("isa") = "", nb::arg("into"))
      .def("backward", run_backward, nb::arg("threads"), nb::arg("isa") = "", nb::arg("into"))
      .def("look", run_look, nb::arg("threads"), nb::arg("isa") = "", nb::arg("into"));
  nb::class_<LayerCall>(module, "Layer", "A call of the layer, read and kept alive.")
      .def_prop_ro(
          "sizes",
          [](const LayerCall& call) {
            const Sizes& s = call.layer.plan.sizes;
            return nb::make_tuple(s.B, s.H, s.Q, s.K);
          },
          "B, H, Q, K")
      .def("see", [](LayerCall& call, nb::handle visible) { return see(call.layer.plan, call.kept, visible); })
      .def("run", run_whole_layer, nb::arg("y"), nb::arg("threads"), nb::arg("isa") = "");
  nb::class_<LinearCall>(module, "Linear", "A product with the weights of an nn.Linear, read and kept alive.")
      .def_prop_ro("rows", [](const LinearCall& call) { return call.linear.rows; })
      .def_prop_ro("outputs", [](const LinearCall& call) { return call.linear.outputs; })
      .def("run", run_product, nb::arg("y"), nb::arg("threads"), nb::arg("isa") = "");

  module.def("attention", read_attention, nb::arg("call"), nb::arg("gradients") = false,
             "An Attention, or (reason, dispatched).");
  module.def("attend", attend_now, nb::arg("call").none(), nb::arg("mask").none(), nb::arg("lower"),
             "The output of attention, or (reason, dispatched).");
  module.def("watched", watched, nb::arg("modules") = false,
             "Who would notice that a call leaves torch: (reason, dispatched), or None.");
  module.def("layer", read_layer, nb::arg("layer"), nb::arg("x").none(), nb::arg("context").none(),
             nb::arg("gradients") = false, "A Layer, or (reason, dispatched).");
  module.def("linear", read_linear, nb::arg("x").none(), nb::arg("weight").none(), nb::arg("bias").none(),
             nb::arg("gradients") = false, "A Linear, or (reason, dispatched).");
  module.def("projection", read_projection, nb::arg("module").none(), nb::arg("x").none(), nb::arg("gradients") = false,
             nb::arg("called") = false, "The Linear of a plain nn.Linear, or (reason, dispatched).");
}
