// With torch_layer.cpp, the only file of the core that knows Python. Tensors come as addresses, shapes and strides: at
// small sizes the call is the cost, and an exchange of array objects takes longer than the work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <string>

#include "attend.h"
#include "backward.h"
#include "dispatch.h"
#include "features.h"
#include "layer.h"
#include "look.h"
#include "torch_layer.h"

namespace nb = nanobind;

namespace multihead {
namespace {

using Address = std::uintptr_t;

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

// Integers of a tuple, in order.
template <int N>
struct Integers {
  index at[N];
  Integers(nb::handle tuple, const char* name) {
    if (!PyTuple_Check(tuple.ptr()) || PyTuple_GET_SIZE(tuple.ptr()) != N)
      refuse(std::string(name) + " must be a tuple of " + std::to_string(N) + " integers");
    for (int i = 0; i < N; ++i) {
      at[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
      if (at[i] == -1 && PyErr_Occurred()) throw nb::python_error();
    }
  }
  index operator[](int i) const { return at[i]; }
};

View view(Address data, const Integers<4>& shape, const Integers<4>& strides, const char* name) {
  if (strides[3] != 1 && shape[3] > 1) refuse(std::string(name) + " must be contiguous along its last axis");
  return {reinterpret_cast<void*>(data), strides[0], strides[1], strides[2]};
}

// None | (offset, low, high) | (address, bits, batch stride, head stride, query stride)
Bound bound(nb::handle given, index otherwise, const char* name) {
  Bound result;
  result.low = result.high = otherwise;
  if (given.is_none()) return result;
  if (PyTuple_Check(given.ptr()) && PyTuple_GET_SIZE(given.ptr()) == 3) {
    const Integers<3> ramp(given, name);
    result.offset = ramp[0], result.low = ramp[1], result.high = ramp[2];
    return result;
  }
  const Integers<5> tensor(given, name);
  if (tensor[1] != 32 && tensor[1] != 64) refuse(std::string(name) + " must be int32 or int64");
  result.data = reinterpret_cast<const void*>(tensor[0]);
  result.wide = tensor[1] == 64;
  result.batch = tensor[2], result.head = tensor[3], result.query = tensor[4];
  return result;
}

Dense dense(nb::handle given, const char* name) {
  if (given.is_none()) return {};
  const Integers<5> tensor(given, name);
  return {reinterpret_cast<const void*>(tensor[0]), tensor[1], tensor[2], tensor[3], tensor[4]};
}

Type type_of(const std::string& name) {
  if (name == "float32") return Type::f32;
  if (name == "float64") return Type::f64;
  if (name == "bfloat16") return Type::bf16;
  if (name == "float16") return Type::f16;
  refuse("dtype '" + name + "' is not one of float32, float64, bfloat16, float16");
}

Sizes sizes_of(const Integers<4>& q, const Integers<4>& k, const Integers<4>& v) {
  const Sizes s{q[0], q[1], k[1], q[2], k[2], q[3], v[3]};
  for (int i = 0; i < 4; ++i)
    if (q[i] < 0 || k[i] < 0 || v[i] < 0) refuse("a size is negative");
  if (k[0] != s.B || v[0] != s.B) refuse("q, k and v differ in B");
  if (v[1] != s.G) refuse("k and v differ in G");
  if (v[2] != s.K) refuse("k and v differ in K");
  if (k[3] != s.D) refuse("q and k differ in D");
  if (s.H && (!s.G || s.H % s.G)) refuse("G=" + std::to_string(s.G) + " does not divide H=" + std::to_string(s.H));
  constexpr index most = std::numeric_limits<std::int32_t>::max() / 2;
  if (s.K > most || (s.G && s.rows() > most)) refuse("more than 2**30 keys, or query rows of a group");
  return s;
}

// What attend and backward share: tensors, mask and options.
Plan plan_of(Address q, nb::handle q_shape, nb::handle q_strides, Address k, nb::handle k_shape, nb::handle k_strides,
             Address v, nb::handle v_shape, nb::handle v_strides, Address out, nb::handle out_strides,
             const std::string& dtype, double scale, nb::handle start, nb::handle stop, nb::handle allowed,
             nb::handle bias, double softcap, double dropout, std::uint64_t seed) {
  const Integers<4> qs(q_shape, "q_shape"), ks(k_shape, "k_shape"), vs(v_shape, "v_shape");
  Plan plan;
  plan.sizes = sizes_of(qs, ks, vs);
  plan.type = type_of(dtype);
  plan.q = view(q, qs, Integers<4>(q_strides, "q_strides"), "q");
  plan.k = view(k, ks, Integers<4>(k_strides, "k_strides"), "k");
  plan.v = view(v, vs, Integers<4>(v_strides, "v_strides"), "v");
  plan.out = view(out, vs, Integers<4>(out_strides, "out_strides"), "out");
  plan.start = bound(start, 0, "start");
  plan.stop = bound(stop, plan.sizes.K, "stop");
  plan.allowed = dense(allowed, "allowed");
  plan.bias = dense(bias, "bias");
  plan.scale = scale, plan.softcap = softcap, plan.dropout = dropout, plan.seed = seed;
  if (!(softcap >= 0)) refuse("softcap must be positive, or 0 for none");
  if (!(dropout >= 0 && dropout <= 1)) refuse("dropout must lie in [0, 1]");
  return plan;
}

// Where weights go: (address, strides of B, H, Q)
View rows_at(nb::handle weights) {
  const Integers<4> at(weights, "weights");
  return {reinterpret_cast<void*>(at[0]), at[1], at[2], at[3]};
}

// The scores of so many keys are kept until a row ends, where its weights are wanted beside the output.
constexpr index most_weighed_keys = 1024;

void attend_raw(Address q, nb::handle q_shape, nb::handle q_strides, Address k, nb::handle k_shape,
                nb::handle k_strides, Address v, nb::handle v_shape, nb::handle v_strides, Address out,
                nb::handle out_strides, const std::string& dtype, double scale, int threads, Address lse,
                nb::handle start, nb::handle stop, nb::handle allowed, nb::handle bias, Address sinks, double softcap,
                double dropout, std::uint64_t seed, Address state, Address entropy, nb::handle top, Address mass,
                Address given, nb::handle weights, const std::string& isa) {
  Plan plan = plan_of(q, q_shape, q_strides, k, k_shape, k_strides, v, v_shape, v_strides, out, out_strides, dtype,
                      scale, start, stop, allowed, bias, softcap, dropout, seed);
  plan.lse = reinterpret_cast<void*>(lse);
  plan.state = reinterpret_cast<void*>(state);
  plan.sinks = reinterpret_cast<const void*>(sinks);
  plan.given = reinterpret_cast<const void*>(given);
  if (given && (plan.sizes.V || lse || state || dropout != 0))
    refuse("with a given state there are statistics only: no v, lse, state or dropout");
  plan.statistics.entropy = reinterpret_cast<void*>(entropy);
  plan.statistics.mass = reinterpret_cast<void*>(mass);
  if (!top.is_none()) {
    const Integers<3> wanted(top, "top");  // (address of weights, address of keys, how many)
    if (wanted[2] < 1) refuse("top must ask for at least one key");
    plan.statistics.weights = reinterpret_cast<void*>(wanted[0]);
    plan.statistics.keys = reinterpret_cast<std::int64_t*>(wanted[1]);
    plan.statistics.count = wanted[2];
  }
  if (!weights.is_none()) {
    if (plan.sizes.K > most_weighed_keys || given)
      refuse("weights beside out: at most " + std::to_string(most_weighed_keys) + " keys, and no given state");
    plan.weights = rows_at(weights);
  }
  const Isa& chosen = choose(isa);
  nb::gil_scoped_release release;
  attend(plan, chosen, threads);
}

void backward_raw(Address q, nb::handle q_shape, nb::handle q_strides, Address k, nb::handle k_shape,
                  nb::handle k_strides, Address v, nb::handle v_shape, nb::handle v_strides, Address d_out,
                  nb::handle d_out_strides, Address d_q, nb::handle d_q_strides, Address d_k, nb::handle d_k_strides,
                  Address d_v, nb::handle d_v_strides, Address state, Address delta, const std::string& dtype,
                  double scale, int threads, Address d_lse, nb::handle start, nb::handle stop, nb::handle allowed,
                  nb::handle bias, Address sinks, double softcap, double dropout, std::uint64_t seed,
                  const std::string& isa) {
  Gradients g;
  g.plan = plan_of(q, q_shape, q_strides, k, k_shape, k_strides, v, v_shape, v_strides, 0, v_strides, dtype, scale,
                   start, stop, allowed, bias, softcap, dropout, seed);
  const Integers<4> qs(q_shape, "q_shape"), ks(k_shape, "k_shape"), vs(v_shape, "v_shape");
  g.d_out = view(d_out, vs, Integers<4>(d_out_strides, "d_out_strides"), "d_out");
  g.d_q = view(d_q, qs, Integers<4>(d_q_strides, "d_q_strides"), "d_q");
  g.d_k = view(d_k, ks, Integers<4>(d_k_strides, "d_k_strides"), "d_k");
  g.d_v = view(d_v, vs, Integers<4>(d_v_strides, "d_v_strides"), "d_v");
  g.plan.state = reinterpret_cast<void*>(state);
  g.plan.sinks = reinterpret_cast<const void*>(sinks);
  g.delta = reinterpret_cast<void*>(delta);
  g.d_lse = reinterpret_cast<const void*>(d_lse);
  const Isa& chosen = choose(isa);
  nb::gil_scoped_release release;
  backward(g, chosen, threads);
}

void look_raw(Address q, nb::handle q_shape, nb::handle q_strides, Address k, nb::handle k_shape, nb::handle k_strides,
              Address given, const std::string& dtype, double scale, int threads, nb::handle weights, Address received,
              nb::handle map, nb::handle start, nb::handle stop, nb::handle allowed, nb::handle bias, double softcap,
              const std::string& isa) {
  Looking looking;
  const Integers<4> ks(k_shape, "k_shape");
  const nb::tuple none = nb::make_tuple(0, 0, 0, 1), v_shape = nb::make_tuple(ks[0], ks[1], ks[2], 0);
  looking.plan = plan_of(q, q_shape, q_strides, k, k_shape, k_strides, 0, v_shape, none, 0, none, dtype, scale, start,
                         stop, allowed, bias, softcap, 0, 0);
  looking.plan.given = reinterpret_cast<const void*>(given);
  if (!weights.is_none()) {
    looking.weights = rows_at(weights);
  }
  looking.received = reinterpret_cast<void*>(received);
  if (!map.is_none()) {
    const Integers<4> at(map, "map");  // (address, height, width, 1 for the largest or 0 for the mean)
    if (at[1] < 1 || at[2] < 1) refuse("a map needs a height and a width of at least 1");
    looking.map = reinterpret_cast<void*>(at[0]);
    looking.height = at[1], looking.width = at[2], looking.largest = at[3] != 0;
  }
  const Isa& chosen = choose(isa);
  nb::gil_scoped_release release;
  look(looking, chosen, threads);
}

// The mask and the options of a layer's call.
void set_options(Plan& plan, double scale, nb::handle start, nb::handle stop, nb::handle allowed, nb::handle bias,
                 Address sinks, double softcap) {
  plan.start = bound(start, 0, "start");
  plan.stop = bound(stop, plan.sizes.K, "stop");
  plan.allowed = dense(allowed, "allowed");
  plan.bias = dense(bias, "bias");
  plan.sinks = reinterpret_cast<const void*>(sinks);
  plan.scale = scale, plan.softcap = softcap;
  if (!(softcap >= 0)) refuse("softcap must be positive, or 0 for none");
}

// (address, row stride, bias address or 0)
Projection projection(nb::handle given, const char* name) {
  const Integers<3> at(given, name);
  return {reinterpret_cast<const float*>(at[0]), at[1], reinterpret_cast<const float*>(at[2])};
}

void layer_raw(Address x, nb::handle x_shape, nb::handle x_strides, Address context, nb::handle context_shape,
               nb::handle context_strides, nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle heads,
               Address y, double scale, int threads, nb::handle start, nb::handle stop, nb::handle allowed,
               nb::handle bias, Address sinks, double softcap, const std::string& isa) {
  const Integers<3> xs(x_shape, "x_shape"), cs(context_shape, "context_shape");
  const Integers<3> x_at(x_strides, "x_strides"), c_at(context_strides, "context_strides");
  const Integers<4> sizes(heads, "heads");  // H, G, D, V
  if ((x_at[2] != 1 && xs[2] > 1) || (c_at[2] != 1 && cs[2] > 1)) refuse("x must be contiguous along its last axis");
  for (int i = 0; i < 4; ++i)
    if (sizes[i] < 1) refuse("heads must be four positive sizes: H, G, D, V");
  if (xs[0] != cs[0]) refuse("x and context differ in B");
  if (sizes[0] % sizes[1]) refuse("G does not divide H");
  Layer layer;
  layer.plan.sizes = {xs[0], sizes[0], sizes[1], xs[1], cs[1], sizes[2], sizes[3]};
  set_options(layer.plan, scale, start, stop, allowed, bias, sinks, softcap);
  layer.E = xs[2], layer.C = cs[2];
  layer.x = reinterpret_cast<const float*>(x), layer.context = reinterpret_cast<const float*>(context);
  layer.x_batch = x_at[0], layer.x_row = x_at[1];
  layer.context_batch = c_at[0], layer.context_row = c_at[1];
  layer.q = projection(q, "q"), layer.k = projection(k, "k");
  layer.v = projection(v, "v"), layer.o = projection(o, "o");
  layer.y = reinterpret_cast<float*>(y);
  const Isa& chosen = choose(isa);
  nb::gil_scoped_release release;
  run_layer(layer, chosen, threads);
}

// A Layer without its mask, its options and y.
nb::object plain_layer(nb::handle x, nb::handle context, nb::handle children, nb::handle widths) {
  const Integers<4> w(widths, "widths");  // E, C, D, V
  for (int i = 0; i < 4; ++i)
    if (w[i] < 1) refuse("widths must be four positive sizes: E, C, D, V");
  Layer layer;
  if (!read_layer(x, context, children, {w[0], w[1], w[2], w[3]}, layer)) return nb::none();
  return nb::cast(layer);
}

bool linear_of_tensors(nb::handle x, nb::handle weight, nb::handle bias, nb::handle y, int threads,
                       const std::string& isa) {
  Linear linear;
  if (!read_linear(x, weight, bias, y, linear)) return false;
  const Isa& chosen = choose(isa);
  nb::gil_scoped_release release;
  run_linear(linear, chosen, threads);
  return true;
}

void run_plain_layer(const Layer& read, Address y, double scale, int threads, nb::handle start, nb::handle stop,
                     nb::handle allowed, Address sinks, double softcap) {
  Layer layer = read;
  set_options(layer.plan, scale, start, stop, allowed, nb::none(), sinks, softcap);
  layer.y = reinterpret_cast<float*>(y);
  const Isa& chosen = choose("");
  nb::gil_scoped_release release;
  run_layer(layer, chosen, threads);
}

}  // namespace
}  // namespace multihead

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
      [] {
        nb::list names;
        for (const Isa* isa : available()) names.append(isa->name);
        return names;
      },
      "The builds of the kernel that this CPU can run, best last.");
  module.def(
      "instruction_set", [](const std::string& name) { return std::string(choose(name).name); }, nb::arg("name") = "",
      "The build that runs: the one named, or MULTIHEAD_ISA's, or the best.");
  module.attr("most_weighed_keys") = most_weighed_keys;
  module.def("attend", attend_raw, nb::arg("q"), nb::arg("q_shape"), nb::arg("q_strides"), nb::arg("k"),
             nb::arg("k_shape"), nb::arg("k_strides"), nb::arg("v"), nb::arg("v_shape"), nb::arg("v_strides"),
             nb::arg("out"), nb::arg("out_strides"), nb::arg("dtype"), nb::arg("scale"), nb::arg("threads"),
             nb::arg("lse") = 0, nb::arg("start") = nb::none(), nb::arg("stop") = nb::none(),
             nb::arg("allowed") = nb::none(), nb::arg("bias") = nb::none(), nb::arg("sinks") = 0,
             nb::arg("softcap") = 0.0, nb::arg("dropout") = 0.0, nb::arg("seed") = 0, nb::arg("state") = 0,
             nb::arg("entropy") = 0, nb::arg("top") = nb::none(), nb::arg("mass") = 0, nb::arg("given") = 0,
             nb::arg("weights") = nb::none(), nb::arg("isa") = "",
             "Attention over raw addresses: see native/README.md.");
  module.def("backward", backward_raw, nb::arg("q"), nb::arg("q_shape"), nb::arg("q_strides"), nb::arg("k"),
             nb::arg("k_shape"), nb::arg("k_strides"), nb::arg("v"), nb::arg("v_shape"), nb::arg("v_strides"),
             nb::arg("d_out"), nb::arg("d_out_strides"), nb::arg("d_q"), nb::arg("d_q_strides"), nb::arg("d_k"),
             nb::arg("d_k_strides"), nb::arg("d_v"), nb::arg("d_v_strides"), nb::arg("state"), nb::arg("delta"),
             nb::arg("dtype"), nb::arg("scale"), nb::arg("threads"), nb::arg("d_lse") = 0,
             nb::arg("start") = nb::none(), nb::arg("stop") = nb::none(), nb::arg("allowed") = nb::none(),
             nb::arg("bias") = nb::none(), nb::arg("sinks") = 0, nb::arg("softcap") = 0.0, nb::arg("dropout") = 0.0,
             nb::arg("seed") = 0, nb::arg("isa") = "", "The gradients of attend: see native/README.md.");
  module.def("look", look_raw, nb::arg("q"), nb::arg("q_shape"), nb::arg("q_strides"), nb::arg("k"), nb::arg("k_shape"),
             nb::arg("k_strides"), nb::arg("given"), nb::arg("dtype"), nb::arg("scale"), nb::arg("threads"),
             nb::arg("weights") = nb::none(), nb::arg("received") = 0, nb::arg("map") = nb::none(),
             nb::arg("start") = nb::none(), nb::arg("stop") = nb::none(), nb::arg("allowed") = nb::none(),
             nb::arg("bias") = nb::none(), nb::arg("softcap") = 0.0, nb::arg("isa") = "",
             "Weights from a given state, or what they add up to: see native/README.md.");
  module.def("layer", layer_raw, nb::arg("x"), nb::arg("x_shape"), nb::arg("x_strides"), nb::arg("context"),
             nb::arg("context_shape"), nb::arg("context_strides"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
             nb::arg("o"), nb::arg("heads"), nb::arg("y"), nb::arg("scale"), nb::arg("threads"),
             nb::arg("start") = nb::none(), nb::arg("stop") = nb::none(), nb::arg("allowed") = nb::none(),
             nb::arg("bias") = nb::none(), nb::arg("sinks") = 0, nb::arg("softcap") = 0.0, nb::arg("isa") = "",
             "The whole layer, fp32: see native/README.md.");
  nb::class_<Layer>(module, "Layer", "A call of the layer, read off torch's objects: see native/README.md.")
      .def_prop_ro(
          "sizes",
          [](const Layer& layer) {
            const Sizes& s = layer.plan.sizes;
            return nb::make_tuple(s.B, s.H, s.Q, s.K);
          },
          "B, H, Q, K")
      .def("run", run_plain_layer, nb::arg("y"), nb::arg("scale"), nb::arg("threads"), nb::arg("start").none(),
           nb::arg("stop").none(), nb::arg("allowed").none(), nb::arg("sinks"), nb::arg("softcap"));
  module.def("meet_torch", meet_torch, "To be called once before the functions below.");
  module.def("held", held_by, nb::arg("module").none(),
             "Weight and bias of a plain nn.Linear, or None: see native/README.md.");
  module.def("linear", linear_of_tensors, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("y"),
             nb::arg("threads"), nb::arg("isa") = "",
             "y = x W^T + b; False where something is not plain: see native/README.md.");
  module.def("plain_layer", plain_layer, nb::arg("x").none(), nb::arg("context").none(), nb::arg("children"),
             nb::arg("widths"), "A Layer, or None where something is not plain: see native/README.md.");
}
