// A call of a whole layer, read part by part: projections and norms, RoPE, the cache.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <utility>

#include "python/reading.h"

namespace nb = nanobind;

namespace multihead {
namespace {

const Name sinks_name("sinks"), scale_name("scale"), softcap_name("softcap"), sizes_name("sizes"),
    modules_name("_modules"), E_name("E"), C_name("C"), D_name("D"), V_name("V"), q_name("q"), k_name("k"), v_name("v"),
    o_name("o"), q_norm_name("q_norm"), k_norm_name("k_norm"), q_proj_name("q_proj"), k_proj_name("k_proj"),
    v_proj_name("v_proj"), o_proj_name("o_proj");

// What a layer is made of: each projection an nn.Linear or (weight, bias), each norm None, an nn.RMSNorm or
// (weight, eps). Without k and v the rows of q's weight are those of q, of k and of v, one behind the other.
struct Parts {
  nb::handle q, k, v, o, q_norm, k_norm;
  index D, V;
  bool recalls;  // keys and values are there already: k and v are not looked at
};

bool is_pair(nb::handle given) { return PyTuple_Check(given.ptr()) && PyTuple_GET_SIZE(given.ptr()) == 2; }

bool tensors_of(Reader& reader, nb::handle part, const char* name, PyObject*& weight, PyObject*& bias) {
  if (!is_pair(part))
    return parameters_of_linear(part.ptr(), weight, bias) ||
           reader.refuse(std::string(name) + " does more than multiply and add");
  weight = PyTuple_GET_ITEM(part.ptr(), 0), bias = PyTuple_GET_ITEM(part.ptr(), 1);
  if (bias == Py_None) bias = nullptr;
  return true;
}

// The weights of a layer are all of one dtype: that of x, or where x is float32 a smaller one. The first says which.
struct Dtypes {
  Number x;
  Number weights = Number::f64;  // until it is known

  bool fit(Number number) {
    if (weights == Number::f64 && multiplied(number) && (number == x || x == Number::f32)) weights = number;
    return number == weights;
  }
};

bool product(Reader& reader, nb::handle part, const char* name, index inputs, Dtypes& dtypes, Projection& to,
             index& outputs) {
  PyObject *weight = nullptr, *bias = nullptr;
  Tensor matrix;
  if (!tensors_of(reader, part, name, weight, bias)) return false;
  if (!projection(reader, weight, bias, inputs, to, matrix, true)) return false;
  outputs = matrix.shape[0];
  if (matrix.number != Number::f64 && dtypes.fit(matrix.number)) return true;
  const bool narrower = dtypes.weights != Number::f64 && dtypes.weights != dtypes.x;
  return reader.refuse(std::string(name) + " is not of the dtype of " + (narrower ? "q_proj" : "x"));
}

bool norm(Reader& reader, nb::handle part, const char* name, index D, Norm& to) {
  if (!part.is_valid() || part.is_none()) return true;
  PyObject* weight = nullptr;
  nb::object eps;
  if (is_pair(part)) {
    weight = PyTuple_GET_ITEM(part.ptr(), 0), eps = nb::borrow(PyTuple_GET_ITEM(part.ptr(), 1));
  } else if (!parameters_of_norm(part.ptr(), D, weight, eps)) {
    return reader.refuse(std::string(name) + " is not an nn.RMSNorm of each head that nobody watches");
  }
  if (!number(reader, eps, "a norm's eps", to.eps)) return false;
  to.wanted = true;
  if (!weight || weight == Py_None) return true;
  Tensor t;
  if (!reader.floating(weight, "a norm's weight", Number::f32, t)) return false;
  if (t.axes != 1 || t.shape[0] != D || !t.contiguous_from(0))
    return reader.refuse("a norm's weight is not D numbers, one behind the other");
  to.weight = static_cast<const float*>(t.data);
  return true;
}

// The rows of one weight from `row` on.
Projection from_row(const Projection& whole, Type type, index row) {
  Projection part = whole;
  part.weight = static_cast<const char*>(whole.weight) + row * whole.row * bytes(type);
  if (whole.bias) part.bias = static_cast<const char*>(whole.bias) + row * bytes(type);
  return part;
}

bool whole(Reader& reader, const Parts& parts, nb::handle x, nb::handle context, Layer& to) {
  Tensor from_x, from_context;
  if (!tokens(reader, x, "x", from_x)) return false;
  if (context.is_none())
    from_context = from_x;
  else if (!tokens(reader, context, "context", from_context))
    return false;
  if (from_context.axes != from_x.axes) return reader.refuse("x and context differ in their axes");
  const bool batched = from_x.axes == 3;
  const int row = from_x.axes - 2;  // the axis of positions
  const index B = batched ? from_x.shape[0] : 1, Q = from_x.shape[row], D = parts.D, V = parts.V;
  if (batched && from_context.shape[0] != B) return reader.refuse("x and context differ in B");
  if (from_context.number != from_x.number) return reader.refuse("x and context differ in dtype");
  if (D < 1 || V < 1) return reader.refuse("D or V is not above 0");
  Dtypes dtypes{from_x.number};
  const Type type = static_cast<Type>(from_x.number);
  to.x = from_x.data, to.context = from_context.data;
  to.x_batch = batched ? from_x.strides[0] : 0, to.x_row = from_x.strides[row];
  to.context_batch = batched ? from_context.strides[0] : 0, to.context_row = from_context.strides[row];
  to.E = from_x.shape[row + 1], to.C = from_context.shape[row + 1], to.N = from_context.shape[row];
  index q, k = D, v = V, H, G;  // what the projections put out, and for how many heads
  if (!product(reader, parts.q, "q_proj", to.E, dtypes, to.q, q)) return false;
  to.weights = static_cast<Type>(dtypes.weights);
  if (parts.recalls) {
    H = q / D, G = 1, to.N = 0;
  } else if (parts.k.is_none() && parts.v.is_none()) {
    PyObject *weight = nullptr, *bias = nullptr;
    Tensor out;
    if (!tensors_of(reader, parts.o, "o_proj", weight, bias) || !reader.tensor(weight, "a projection's weight", out))
      return false;
    H = out.axes == 2 ? out.shape[1] / V : 0, G = (q - H * D) / (D + V);
    if (q != H * D + G * (D + V)) return reader.refuse("the rows of q, k and v in one weight do not fit its heads");
    if (to.context != to.x || to.C != to.E) return reader.refuse("q, k and v in one weight are all of x");
    q = H * D, k = G * D, v = G * V;
    to.k = from_row(to.q, to.weights, q), to.v = from_row(to.q, to.weights, q + k);
  } else {
    if (!product(reader, parts.k, "k_proj", to.C, dtypes, to.k, k) ||
        !product(reader, parts.v, "v_proj", to.C, dtypes, to.v, v))
      return false;
    H = q / D, G = k / D;
  }
  if (H < 1 || G < 1 || H * D != q || G * D != k || H % G || v != G * V)
    return reader.refuse("the projections' widths do not fit each other");
  if (!product(reader, parts.o, "o_proj", H * V, dtypes, to.o, to.outputs)) return false;
  if (!norm(reader, parts.q_norm, "q_norm", D, to.q_norm) || !norm(reader, parts.k_norm, "k_norm", D, to.k_norm))
    return false;
  Plan& plan = to.plan;
  plan.type = plan.kv_type = type;
  plan.sizes = {B, H, G, Q, to.N, D, V};
  if (to.N > most_rows || plan.sizes.rows() > most_rows)
    return reader.refuse("more than 2**30 keys, or query rows that share them");
  plan.start.low = plan.start.high = 0;
  plan.stop.low = plan.stop.high = to.N;
  return true;
}

nb::object read_parts_of(const Parts& parts, nb::handle of, nb::handle x, nb::handle context, bool gradients) {
  Reader reader(gradients);
  LayerCall read;
  read.gradients = gradients;
  if (!whole(reader, parts, x, context, read.layer) || !sinks(reader, attribute(of, sinks_name), read.layer.plan) ||
      !options(reader, attribute(of, scale_name), attribute(of, softcap_name), parts.D, read.layer.plan))
    return as_tuple(reader.reason);
  read.kept = std::move(reader.kept);
  return nb::cast(std::move(read));
}

index integer(nb::handle of, const Name& name) { return nb::cast<index>(attribute(of, name)); }

// Integers that broadcast to `shape`, copied, so that what was checked is what is used.
bool read_integers(Reader& reader, nb::handle given, const char* name, std::initializer_list<index> shape,
                   std::vector<std::int64_t>& to) {
  Tensor t;
  if (!reader.tensor(given, name, t)) return false;
  if (t.number != Number::i64 && t.number != Number::i32)
    return reader.refuse(std::string(name) + " is not int32 or int64");
  index at[2] = {0, 0}, sizes[2] = {1, 1};
  const int axes = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), sizes + 2 - axes);
  if (!broadcast(t, sizes + 2 - axes, axes, at + 2 - axes)) return reader.refuse(std::string(name) + " does not fit x");
  to.clear();
  to.reserve(static_cast<std::size_t>(sizes[0] * sizes[1]));
  for (index i = 0; i < sizes[0]; ++i)
    for (index j = 0; j < sizes[1]; ++j) {
      const index place = i * at[0] + j * at[1];
      to.push_back(t.number == Number::i64 ? static_cast<const std::int64_t*>(t.data)[place]
                                           : static_cast<const std::int32_t*>(t.data)[place]);
    }
  return true;
}

bool rotation(Reader& reader, LayerCall& call, const Angles& angles, bool of_context, Rotation& to,
              std::vector<std::int64_t>& positions) {
  const Layer& layer = call.layer;
  const index B = layer.plan.sizes.B, N = of_context ? layer.N : layer.plan.sizes.Q, D = layer.plan.sizes.D;
  Tensor cos, sin;
  if (!reader.floating(angles.cos, "cos", Number::f32, cos) || !reader.floating(angles.sin, "sin", Number::f32, sin))
    return false;
  const bool table = !angles.positions.is_none();
  const int last = cos.axes - 1;
  if (cos.axes < 2 || cos.axes > (table ? 2 : 3) || cos.axes != sin.axes || !cos.contiguous_from(last) ||
      !sin.contiguous_from(last))
    return reader.refuse("cos and sin are not rows of numbers, one behind the other");
  for (int i = 0; i < cos.axes; ++i)
    if (cos.shape[i] != sin.shape[i] || (cos.strides[i] != sin.strides[i] && cos.shape[i] > 1))
      return reader.refuse("cos and sin differ in shape or layout");
  to = {};
  to.pairs = angles.pairs < 0 ? cos.shape[last] : angles.pairs;
  if (to.pairs < 1 || to.pairs > cos.shape[last] || 2 * to.pairs > D)
    return reader.refuse("cos and sin are of more pairs than a head has");
  to.cos = static_cast<const float*>(cos.data), to.sin = static_cast<const float*>(sin.data);
  to.interleaved = angles.interleaved;
  if (!table) {  // a row for each token
    const index shape[] = {B, N};
    index at[2];
    Tensor rows = cos;
    rows.axes = last;
    if (!broadcast(rows, shape, 2, at)) return reader.refuse("cos and sin are not a row for each token");
    to.row = 1, to.batch = at[0], to.token = at[1];
    return true;
  }
  const index rows = cos.shape[0];
  to.row = cos.strides[0];
  index low = 0, high = -1;  // of no positions
  if (PyLong_Check(angles.positions.ptr())) {
    to.first = nb::cast<index>(angles.positions), to.token = 1;
    low = to.first, high = to.first + N - 1;
  } else if (angles.counted) {
    if (!read_integers(reader, angles.positions, "positions", {B}, positions)) return false;
    to.positions_batch = 1, to.token = 1;
  } else {
    if (!read_integers(reader, angles.positions, "positions", {B, N}, positions)) return false;
    to.positions_batch = N, to.positions_token = 1;
  }
  if (!PyLong_Check(angles.positions.ptr()) && !positions.empty()) {
    const auto [lowest, highest] = std::minmax_element(positions.begin(), positions.end());
    low = *lowest, high = *highest + (angles.counted ? N - 1 : 0);
  }
  return (low >= 0 && high < rows) || reader.refuse("a position is beyond the rows of cos and sin");
}

bool cache_of(Reader& reader, nb::handle given, const char* name, const Sizes& s, index width, Tensor& t, View& view) {
  if (!reader.tensor(given, name, t)) return false;
  if (t.axes != 4 || t.shape[0] != s.B || t.shape[3] != width || !t.contiguous_from(3))
    return reader.refuse(std::string(name) + " is not (B,G,K,width) of this call, rows contiguous");
  if (!multiplied(t.number) && t.number != Number::i8)
    return reader.refuse(std::string(name) + " is not float32, bfloat16, float16 or int8");
  view = {t.data, t.strides[0], t.strides[1], t.strides[2]};
  return true;
}

// What rows of integers are to be multiplied by, (B,G,room,1).
bool scales(Reader& reader, nb::handle given, const Tensor& rows, View& view) {
  Tensor t;
  if (!reader.tensor(given, "the scales of k or v", t)) return false;
  if (t.number != Number::f32 || t.axes != 4 || !std::equal(t.shape, t.shape + 3, rows.shape) || t.shape[3] != 1)
    return reader.refuse("the scales of k or v are not float32 of shape (B,G,room,1)");
  view = {t.data, t.strides[0], t.strides[1], t.strides[2]};
  return true;
}

// Keys and values that are kept, (B,G,room,·), of which K are visible.
bool store(Reader& reader, LayerCall& call, nb::handle k, nb::handle v, nb::handle k_scales, nb::handle v_scales,
           index K, index& room) {
  Plan& plan = call.layer.plan;
  Sizes& s = plan.sizes;
  Store& to = call.layer.store;
  Tensor keys, values;
  if (!cache_of(reader, k, "k", s, s.D, keys, to.k) || !cache_of(reader, v, "v", s, s.V, values, to.v)) return false;
  if (keys.number != values.number) return reader.refuse("k and v differ in dtype");
  const bool integers = keys.number == Number::i8;
  if (integers != !k_scales.is_none() || integers != !v_scales.is_none())
    return reader.refuse("k and v of int8 come with scales, and others without");
  if (integers && (!scales(reader, k_scales, keys, to.k_scales) || !scales(reader, v_scales, values, to.v_scales)))
    return false;
  if (call.layer.N == 0) s.G = keys.shape[1];
  room = std::min(keys.shape[2], values.shape[2]);
  if (keys.shape[1] != s.G || values.shape[1] != s.G || s.G < 1 || s.H % s.G)
    return reader.refuse("k and v are not of the heads of this layer");
  if (K < 1 || K > room || K > most_rows) return reader.refuse("k and v have not the room for all tokens");
  s.K = K;
  plan.kv_type = integers ? Type::i8 : static_cast<Type>(keys.number);
  plan.stop.low = plan.stop.high = K;
  return true;
}

}  // namespace

nb::object read_layer(nb::handle of, nb::handle x, nb::handle context, bool gradients, bool recalls) {
  const nb::object sizes = attribute(of, sizes_name), children = attribute(of, modules_name);
  if (!PyDict_Check(children.ptr())) return as_tuple({"the layer's children are not in a dictionary", false});
  const auto child = [&](const Name& name) { return nb::handle(PyDict_GetItemWithError(children.ptr(), name.ptr())); };
  const index E = integer(sizes, E_name);
  const Parts parts{child(q_proj_name),     child(k_proj_name),     child(v_proj_name),
                    child(o_proj_name),     child(q_norm_name),     child(k_norm_name),
                    integer(sizes, D_name), integer(sizes, V_name), recalls};
  if (!parts.q || !parts.k || !parts.v || !parts.o) return as_tuple({"the layer has not all of its projections", true});
  if (!recalls && context.is_none() && integer(sizes, C_name) != E)
    return as_tuple({"the layer takes a context, and none is given", false});
  const nb::object read = read_parts_of(parts, of, x, context, gradients);
  if (PyTuple_Check(read.ptr())) return read;
  const Layer& layer = nb::cast<LayerCall&>(read).layer;
  if (layer.outputs != E || layer.E != E)
    return as_tuple({"x, or what o_proj puts out, is not of the width of the model", true});
  return read;
}

nb::object read_parts(nb::handle of, nb::handle x, nb::handle context, bool gradients) {
  const nb::object q = attribute(of, q_name), k = attribute(of, k_name), v = attribute(of, v_name),
                   o = attribute(of, o_name), q_norm = attribute(of, q_norm_name), k_norm = attribute(of, k_norm_name);
  return read_parts_of({q, k, v, o, q_norm, k_norm, integer(of, D_name), integer(of, V_name), false}, of, x, context,
                       gradients);
}

nb::object rotate(LayerCall& call, const Angles& angles, bool queries, bool keys) {
  Reader reader(call.gradients);
  if (queries && !rotation(reader, call, angles, false, call.layer.q_rotation, call.q_positions))
    return as_tuple(reader.reason);
  if (keys && call.layer.N > 0 && !rotation(reader, call, angles, true, call.layer.k_rotation, call.k_positions))
    return as_tuple(reader.reason);
  call.kept.insert(call.kept.end(), reader.kept.begin(), reader.kept.end());
  return nb::none();
}

nb::object join(LayerCall& call, const Buffers& cache, nb::handle first, index K, nb::handle real) {
  Reader reader(call.gradients);
  index room;
  const index B = call.layer.plan.sizes.B, N = call.layer.N;
  if (N == 0) return as_tuple({"the call has no tokens that could join", false});
  if (!store(reader, call, cache.k, cache.v, cache.k_scales, cache.v_scales, K, room)) return as_tuple(reader.reason);
  Store& to = call.layer.store;
  to.first = 0;
  if (PyLong_Check(first.ptr()))
    to.first = nb::cast<index>(first);
  else if (!read_integers(reader, first, "first", {B}, call.firsts))
    return as_tuple(reader.reason);
  if (!real.is_none() && !read_integers(reader, real, "lengths", {B}, call.real)) return as_tuple(reader.reason);
  for (index b = 0; b < B; ++b) {
    const index from = to.first + (call.firsts.empty() ? 0 : call.firsts[static_cast<std::size_t>(b)]);
    const index count = call.real.empty() ? N : call.real[static_cast<std::size_t>(b)];
    if (from < 0 || count < 0 || count > N || from > room - count)
      return as_tuple({"k and v have not the room for all tokens", false});
  }
  call.kept.insert(call.kept.end(), reader.kept.begin(), reader.kept.end());
  return nb::none();
}

nb::object recall(LayerCall& call, nb::handle k, nb::handle v, index K) {
  Reader reader(call.gradients);
  index room;
  if (call.layer.N > 0) return as_tuple({"the call makes keys and values of its own", false});
  if (!store(reader, call, k, v, nb::none(), nb::none(), K, room)) return as_tuple(reader.reason);
  call.kept.insert(call.kept.end(), reader.kept.begin(), reader.kept.end());
  return nb::none();
}

}  // namespace multihead
