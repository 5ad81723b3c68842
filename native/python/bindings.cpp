// The Python module multihead._native: what is there, and what a call can be asked. See native/README.md.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "core/dispatch.h"
#include "core/features.h"
#include "core/threads.h"
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
  module.def(
      "patience",
      [] {
        const Patience p = patience();
        return nb::make_tuple(p.adapts, p.alone, p.retreats);
      },
      "Whether threads that come late are given up, whether they are now, and how often they were.");
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
      .def_prop_ro("kv_heads", [](const LayerCall& call) { return call.layer.plan.sizes.G; })
      .def_prop_ro("outputs", [](const LayerCall& call) { return call.layer.outputs; })
      .def_prop_ro("widens", [](const LayerCall& call) { return call.layer.weights != call.layer.plan.type; })
      .def(
          "rotate",
          [](LayerCall& call, nb::handle cos, nb::handle sin, nb::handle positions, bool counted, bool interleaved,
             multihead::index pairs, bool queries,
             bool keys) { return rotate(call, {cos, sin, positions, counted, interleaved, pairs}, queries, keys); },
          nb::arg("cos"), nb::arg("sin"), nb::arg("positions").none() = nb::none(), nb::kw_only(),
          nb::arg("counted") = false, nb::arg("interleaved") = false, nb::arg("pairs") = -1, nb::arg("queries") = true,
          nb::arg("keys") = true,
          "RoPE, by the cosines and sines of its angles: a table (rows, pairs), of which `positions` says each token's "
          "row: a number for the first token of every batch row, tokens counted on; with `counted` a tensor (B,), the "
          "same for each batch row; else a tensor that broadcasts to (B,N). Without positions a row for each token: "
          "(N,pairs), (1,N,pairs) or (B,N,pairs). `pairs`: use only so many numbers of each row.")
      .def(
          "join",
          [](LayerCall& call, nb::handle k, nb::handle v, nb::handle first, multihead::index K, nb::handle real,
             nb::handle k_scales,
             nb::handle v_scales) { return join(call, {k, v, k_scales, v_scales}, first, K, real); },
          nb::arg("k"), nb::arg("v"), nb::arg("first"), nb::arg("K"), nb::arg("real").none() = nb::none(),
          nb::arg("k_scales").none() = nb::none(), nb::arg("v_scales").none() = nb::none(),
          "Keys and values of this call join the cache k (B,G,room,D), v (B,G,room,V) behind its first `first` tokens, "
          "a number or one for each batch row (B,), `real` (B,) of them; the first K are visible then. Of int8 a row "
          "is "
          "its numbers times its scale, (B,G,room,1) float32.")
      .def("recall", recall, nb::arg("k"), nb::arg("v"), nb::arg("K"),
           "The keys and values to be attended to, of which no new ones are made.")
      .def("see", [](LayerCall& call, nb::handle visible) { return see(call.layer.plan, call.kept, visible); })
      .def("put_out", put_out, nb::arg("x"), "What the layer puts out of x, in a tensor that is made for it.")
      .def("run", run_whole_layer, nb::arg("y"), nb::arg("threads"), nb::arg("isa") = "");
  nb::class_<FeedForwardCall>(module, "FeedForward", "A call of a gated feed-forward part, read and kept alive.")
      .def_prop_ro("rows", [](const FeedForwardCall& call) { return call.mlp.rows; })
      .def_prop_ro("width", [](const FeedForwardCall& call) { return call.mlp.width; })
      .def_prop_ro("outputs", [](const FeedForwardCall& call) { return call.mlp.outputs; })
      .def("run", run_feed_forward, nb::arg("y"), nb::arg("middle"), nb::arg("threads"), nb::arg("isa") = "");
  nb::class_<LinearCall>(module, "Linear", "A product with the weights of an nn.Linear, read and kept alive.")
      .def_prop_ro("rows", [](const LinearCall& call) { return call.linear.rows; })
      .def_prop_ro("outputs", [](const LinearCall& call) { return call.linear.outputs; })
      .def_prop_ro("widens", [](const LinearCall& call) { return call.linear.type != call.linear.x_type; })
      .def("run", run_product, nb::arg("y"), nb::arg("threads"), nb::arg("isa") = "");

  module.def("attention", read_attention, nb::arg("call"), nb::arg("gradients") = false,
             "An Attention, or (reason, dispatched).");
  module.def("attend", attend_now, nb::arg("call").none(), nb::arg("mask").none(), nb::arg("lower"),
             "The output of attention, or (reason, dispatched).");
  module.def("watched", watched, nb::arg("modules") = false,
             "Who would notice that a call leaves torch: (reason, dispatched), or None.");
  module.def("layer", read_layer, nb::arg("layer"), nb::arg("x").none(), nb::arg("context").none(),
             nb::arg("gradients") = false, nb::arg("recalls") = false, "A Layer, or (reason, dispatched).");
  module.def("parts", read_parts, nb::arg("parts"), nb::arg("x").none(), nb::arg("context").none() = nb::none(),
             nb::arg("gradients") = false, "The Layer of any four projections, or (reason, dispatched).");
  module.def(
      "feed_forward",
      [](nb::handle gate, nb::handle up, nb::handle down, bool tanh, nb::handle x, bool gradients) {
        return read_feed_forward({gate, up, down, tanh}, x, gradients);
      },
      nb::arg("gate").none(), nb::arg("up").none(), nb::arg("down").none(), nb::arg("tanh"), nb::arg("x").none(),
      nb::arg("gradients") = false, "A FeedForward, or (reason, dispatched).");
  module.def("norm", norm_rows, nb::arg("x").none(), nb::arg("weight").none(), nb::arg("eps"), nb::arg("y"),
             nb::arg("gradients"), nb::arg("threads"), "RMS norm of x into y: None, or (reason, dispatched).");
  module.def("linear", read_linear, nb::arg("x").none(), nb::arg("weight").none(), nb::arg("bias").none(),
             nb::arg("gradients") = false, "A Linear, or (reason, dispatched).");
  module.def("projection", read_projection, nb::arg("module").none(), nb::arg("x").none(), nb::arg("gradients") = false,
             nb::arg("called") = false, "The Linear of a plain nn.Linear, or (reason, dispatched).");
}
