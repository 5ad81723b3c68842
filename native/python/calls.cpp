#include "python/calls.h"

#include <nanobind/stl/string.h>

#include <cmath>
#include <limits>
#include <utility>

#include "python/watchers.h"

namespace nb = nanobind;

namespace multihead {
namespace {

constexpr index most = std::numeric_limits<std::int32_t>::max() / 2;  // keys, or query rows that share them

nb::object as_tuple(const Reason& reason) { return nb::make_tuple(reason.says, reason.dispatched); }

// Names that are looked up in every call, made once.
class Name {
 public:
  explicit Name(const char* text) : text_(text) {}
  PyObject* ptr() const {
    if (!made_) made_ = PyUnicode_InternFromString(text_);
    return made_;
  }
  const char* text() const { return text_; }

 private:
  const char* text_;
  mutable PyObject* made_ = nullptr;
};

nb::object attribute(nb::handle object, const Name& name) {
  PyObject* found = PyObject_GetAttr(object.ptr(), name.ptr());
  if (!found) throw nb::python_error();
  return nb::steal(found);
}

const Name q_name("q"), k_name("k"), v_name("v"), bias_name("bias"), sinks_name("sinks"), scale_name("scale"),
    softcap_name("softcap"), dropout_name("dropout"), start_name("start"), stop_name("stop"), dense_name("dense"),
    offset_name("offset"), low_name("low"), high_name("high"), sizes_name("sizes"), modules_name("_modules"),
    E_name("E"), C_name("C"), D_name("D"), V_name("V"), q_proj_name("q_proj"), k_proj_name("k_proj"),
    v_proj_name("v_proj"), o_proj_name("o_proj");

// What a call of attention is given.
struct Given {
  nb::object q, k, v, bias, sinks, scale, softcap, dropout;

  static Given attributes_of(nb::handle call) {
    return {attribute(call, q_name),       attribute(call, k_name),      attribute(call, v_name),
            attribute(call, bias_name),    attribute(call, sinks_name),  attribute(call, scale_name),
            attribute(call, softcap_name), attribute(call, dropout_name)};
  }
};

// Reading -------------------------------------------------------------------------------------------------------------

bool number(Reader& reader, nb::handle given, const char* name, double& to) {
  const bool integer = PyLong_Check(given.ptr()) && !PyBool_Check(given.ptr());
  if (!integer && !PyFloat_Check(given.ptr())) return reader.refuse(std::string(name) + " is not a number");
  to = PyFloat_AsDouble(given.ptr());
  if (to == -1 && PyErr_Occurred()) throw nb::python_error();
  return std::isfinite(to) || reader.refuse(std::string(name) + " is not finite");
}

bool options(Reader& reader, nb::handle scale, nb::handle softcap, const index D, Plan& plan) {
  plan.scale = std::pow(static_cast<double>(D), -0.5);
  if (!scale.is_none() && !number(reader, scale, "scale", plan.scale)) return false;
  if (softcap.is_none()) return true;
  if (!number(reader, softcap, "softcap", plan.softcap)) return false;
  return plan.softcap > 0 || reader.refuse("softcap is not above 0");
}

bool sinks(Reader& reader, nb::handle given, Plan& plan) {
  if (given.is_none()) return true;
  Tensor t;
  if (!reader.floating(given, "sinks", wide(plan.type), t)) return false;
  if (t.axes != 1 || t.shape[0] != plan.sizes.H) return reader.refuse("sinks are not one number for each head");
  const nb::object kept = reader.kept.back();
  if (!t.contiguous_from(0) && !reader.rows(kept, "sinks", t)) return false;
  plan.sinks = t.data;
  return true;
}

bool heads(Reader& reader, nb::handle given, const char* name, Tensor& t, View& view) {
  if (!reader.rows(given, name, t)) return false;
  if (t.axes != 4) return reader.refuse(std::string(name) + " has not four axes");
  view = {t.data, t.strides[0], t.strides[1], t.strides[2]};
  return true;
}

bool attention(Reader& reader, const Given& call, Plan& plan) {
  Tensor q, k, v;
  const nb::handle values = call.v;
  if (!heads(reader, call.q, "q", q, plan.q) || !heads(reader, call.k, "k", k, plan.k)) return false;
  if (!values.is_none() && !heads(reader, values, "v", v, plan.v)) return false;
  if (values.is_none()) v.number = q.number, v.shape[0] = k.shape[0], v.shape[1] = k.shape[1], v.shape[2] = k.shape[2];
  if (q.number > Number::f16) return reader.refuse("q is not floating");
  if (k.number != q.number || v.number != q.number) return reader.refuse("q, k and v differ in dtype");
  plan.type = static_cast<Type>(q.number);
  Sizes& s = plan.sizes;
  s = {q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]};
  if (k.shape[0] != s.B || v.shape[0] != s.B || k.shape[3] != s.D || v.shape[1] != s.G || v.shape[2] != s.K)
    return reader.refuse("q, k and v do not fit each other");
  if (s.D < 1 || s.G < 1 || s.H % s.G) return reader.refuse("D is 0, or G does not divide H");
  if (s.K > most || s.rows() > most) return reader.refuse("more than 2**30 keys, or query rows that share them");
  plan.start.low = plan.start.high = 0;
  plan.stop.low = plan.stop.high = s.K;
  if (!call.bias.is_none()) {
    Tensor t;
    const index shape[] = {s.B, s.H, s.Q, s.K};
    index at[4];
    if (!reader.floating(call.bias, "bias", wide(plan.type), t)) return false;
    if (!broadcast(t, shape, 4, at)) return reader.refuse("bias does not broadcast to (B,H,Q,K)");
    plan.bias = {t.data, at[0], at[1], at[2], at[3]};
  }
  if (!sinks(reader, call.sinks, plan) || !options(reader, call.scale, call.softcap, s.D, plan)) return false;
  if (!number(reader, call.dropout, "dropout", plan.dropout)) return false;
  return (plan.dropout >= 0 && plan.dropout <= 1) || reader.refuse("dropout is not a probability");
}

// A ramp has an offset, a low and a high; anything else is a tensor that broadcasts to (B, H, Q).
bool bound(Reader& reader, nb::handle given, const char* name, const Sizes& s, Bound& to) {
  if (PyObject* offset = PyObject_GetAttr(given.ptr(), offset_name.ptr())) {
    to = {};
    to.offset = nb::cast<index>(nb::steal(offset));
    to.low = nb::cast<index>(attribute(given, low_name)), to.high = nb::cast<index>(attribute(given, high_name));
    return true;
  }
  PyErr_Clear();
  Tensor t;
  const index shape[] = {s.B, s.H, s.Q};
  index at[3];
  if (!reader.tensor(given, name, t)) return false;
  if (t.number != Number::i32 && t.number != Number::i64)
    return reader.refuse(std::string(name) + " is not int32 or int64");
  if (!broadcast(t, shape, 3, at)) return reader.refuse(std::string(name) + " does not broadcast to (B,H,Q)");
  to.data = t.data, to.wide = t.number == Number::i64;
  to.batch = at[0], to.head = at[1], to.query = at[2];
  return true;
}

bool visible(Reader& reader, nb::handle given, Plan& plan) {
  const Sizes& s = plan.sizes;
  if (!bound(reader, attribute(given, start_name), "the mask's start", s, plan.start)) return false;
  if (!bound(reader, attribute(given, stop_name), "the mask's stop", s, plan.stop)) return false;
  const nb::object dense = attribute(given, dense_name);
  if (dense.is_none()) return true;
  Tensor t;
  const index shape[] = {s.B, s.H, s.Q, s.K};
  index at[4];
  if (!reader.tensor(dense, "the mask", t)) return false;
  if (t.number != Number::boolean) return reader.refuse("the mask is not bool");
  if (!broadcast(t, shape, 4, at)) return reader.refuse("the mask does not broadcast to (B,H,Q,K)");
  plan.allowed = {t.data, at[0], at[1], at[2], at[3]};
  return true;
}

// Whether numbers are float32 or half precision, which is what products are made for.
bool multiplied(Number number) { return number <= Number::f16 && number != Number::f64; }

// Rows (N, width) or (B, N, width).
bool tokens(Reader& reader, nb::handle given, const char* name, index width, Tensor& t) {
  if (!reader.tensor(given, name, t)) return false;
  if (!multiplied(t.number)) return reader.refuse(std::string(name) + " is not float32, bfloat16 or float16");
  if ((t.axes != 2 && t.axes != 3) || t.shape[t.axes - 1] != width || t.count() < 1)
    return reader.refuse(std::string(name) + " is not rows of the width that the projection takes");
  return t.contiguous_from(t.axes - 1) || reader.refuse(std::string(name) + " is not contiguous along its rows");
}

bool projection(Reader& reader, PyObject* weight, PyObject* bias, index inputs, Projection& to, Tensor& matrix) {
  Tensor shift;
  if (!reader.tensor(weight, "a projection's weight", matrix)) return false;
  if (!multiplied(matrix.number) || matrix.axes != 2 || matrix.shape[1] != inputs || matrix.count() < 1 ||
      !matrix.contiguous_from(1))
    return reader.refuse("a projection's weight is not rows of float32, bfloat16 or float16 that fit");
  to = {matrix.data, matrix.strides[0], nullptr};
  if (!bias) return true;
  if (!reader.tensor(bias, "a projection's bias", shift)) return false;
  if (shift.number != matrix.number || shift.axes != 1 || shift.shape[0] != matrix.shape[0] ||
      !shift.contiguous_from(0))
    return reader.refuse("a projection's bias is not numbers of the weight's dtype that fit, one behind the other");
  to.bias = shift.data;
  return true;
}

bool layer(Reader& reader, nb::handle of, nb::handle x, nb::handle context, Layer& to) {
  const nb::object sizes = attribute(of, sizes_name), children = attribute(of, modules_name);
  const auto width = [&](const Name& name) { return nb::cast<index>(attribute(sizes, name)); };
  const index E = width(E_name), C = width(C_name), D = width(D_name), V = width(V_name);
  if (!PyDict_Check(children.ptr())) return reader.refuse("the layer's children are not in a dictionary");
  Tensor from_x, from_context;
  if (!tokens(reader, x, "x", E, from_x)) return false;
  if (context.is_none()) {
    if (C != E) return reader.refuse("the layer takes a context, and none is given");
    from_context = from_x;
  } else if (!tokens(reader, context, "context", C, from_context)) {
    return false;
  }
  if (from_context.axes != from_x.axes) return reader.refuse("x and context differ in their axes");
  const bool batched = from_x.axes == 3;
  const int row = from_x.axes - 2;  // the axis of positions
  const index B = batched ? from_x.shape[0] : 1, Q = from_x.shape[row], K = from_context.shape[row];
  if (batched && from_context.shape[0] != B) return reader.refuse("x and context differ in B");
  if (from_context.number != from_x.number) return reader.refuse("x and context differ in dtype");
  to.plan.type = static_cast<Type>(from_x.number);
  to.x = from_x.data, to.context = from_context.data;
  to.x_batch = batched ? from_x.strides[0] : 0, to.x_row = from_x.strides[row];
  to.context_batch = batched ? from_context.strides[0] : 0, to.context_row = from_context.strides[row];
  to.E = E, to.C = C;
  const auto child = [&](const Name& name, index inputs, Projection& p, index& outputs) {
    PyObject *weight, *bias;
    if (!held_by(PyDict_GetItemWithError(children.ptr(), name.ptr()), weight, bias))
      return reader.refuse(std::string(name.text()) + " does more than multiply and add");
    Tensor matrix;
    if (!projection(reader, weight, bias, inputs, p, matrix)) return false;
    outputs = matrix.shape[0];
    return matrix.number == from_x.number || reader.refuse(std::string(name.text()) + " is not of the dtype of x");
  };
  index q, k, v, o;  // what the projections put out
  if (!child(q_proj_name, E, to.q, q) || !child(k_proj_name, C, to.k, k) || !child(v_proj_name, C, to.v, v))
    return false;
  const index H = q / D, G = k / D;
  if (H < 1 || G < 1 || H * D != q || G * D != k || H % G || v != G * V)
    return reader.refuse("the projections' widths do not fit each other");
  if (!child(o_proj_name, H * V, to.o, o)) return false;
  if (o != E) return reader.refuse("o_proj does not put out the width of the model");
  Plan& plan = to.plan;
  plan.sizes = {B, H, G, Q, K, D, V};
  if (K > most || plan.sizes.rows() > most) return reader.refuse("more than 2**30 keys, or query rows that share them");
  plan.start.low = plan.start.high = 0;
  plan.stop.low = plan.stop.high = K;
  return sinks(reader, attribute(of, sinks_name), plan) &&
         options(reader, attribute(of, scale_name), attribute(of, softcap_name), D, plan);
}

bool linear(Reader& reader, nb::handle x, PyObject* weight, PyObject* bias, Linear& to) {
  Tensor from;
  if (!reader.tensor(x, "x", from)) return false;
  if (from.axes != 2 && from.axes != 3) return reader.refuse("x has not two or three axes");
  Projection p;
  Tensor matrix;
  const int last = from.axes - 1;
  if (!projection(reader, weight, bias, from.shape[last], p, matrix)) return false;
  if (!multiplied(from.number) || from.count() < 1 || !from.contiguous_from(last))
    return reader.refuse("x is not rows of float32, bfloat16 or float16, or has none");
  if (matrix.number != from.number && from.number != Number::f32)
    return reader.refuse("x and the weight differ in dtype");
  const index outputs = matrix.shape[0];
  const bool batched = last == 2;
  const index N = from.shape[last - 1];
  to.x = from.data, to.x_batch = batched ? from.strides[0] : 0, to.x_row = from.strides[last - 1];
  to.batch_rows = N, to.rows = (batched ? from.shape[0] : 1) * N;
  to.weight = p.weight, to.weight_row = p.row, to.bias = p.bias;
  to.inputs = from.shape[last], to.outputs = outputs;
  to.y = nullptr, to.y_batch = N * outputs, to.y_head = 0, to.y_row = outputs, to.y_width = outputs;
  to.x_type = static_cast<Type>(from.number), to.type = static_cast<Type>(matrix.number);
  return true;
}

}  // namespace

nb::object read_attention(nb::handle call, bool gradients) {
  Reader reader(gradients);
  AttentionCall read;
  if (!attention(reader, Given::attributes_of(call), read.plan)) return as_tuple(reader.reason);
  read.kept = std::move(reader.kept);
  return nb::cast(std::move(read));
}

nb::object attend_now(const nb::tuple& call, nb::handle mask, const nb::callable& lower) {
  nb::object watcher = watched(false);
  if (!watcher.is_none()) return watcher;
  if (nb::len(call) != 8) throw nb::value_error("a call is q, k, v, bias, sinks, scale, softcap and dropout");
  const Given given{call[0], call[1], call[2], call[3], call[4], call[5], call[6], call[7]};
  Reader reader(records_gradients());
  Plan plan;
  if (!attention(reader, given, plan)) return as_tuple(reader.reason);
  if (plan.dropout > 0) throw nb::value_error("dropout needs a seed, which such a call has not");
  if (!mask.is_none()) {
    const Sizes& s = plan.sizes;
    const nb::object seen = lower(mask, s.B, s.H, s.Q, s.K);
    Reader bounds(false);
    if (!visible(bounds, seen, plan)) return as_tuple(bounds.reason);
    nb::object out = heads_like(given.q, plan.sizes);
    run_into(plan, out, torch_threads());  // what was read of the mask is kept alive until here
    return out;
  }
  nb::object out = heads_like(given.q, plan.sizes);
  run_into(plan, out, torch_threads());
  return out;
}

nb::object read_layer(nb::handle of, nb::handle x, nb::handle context, bool gradients) {
  Reader reader(gradients);
  LayerCall read;
  if (!layer(reader, of, x, context, read.layer)) return as_tuple(reader.reason);
  read.kept = std::move(reader.kept);
  return nb::cast(std::move(read));
}

nb::object read_linear(nb::handle x, nb::handle weight, nb::handle bias, bool gradients) {
  Reader reader(gradients);
  LinearCall read;
  if (!linear(reader, x, weight.ptr(), bias.is_none() ? nullptr : bias.ptr(), read.linear))
    return as_tuple(reader.reason);
  read.kept = std::move(reader.kept);
  return nb::cast(std::move(read));
}

nb::object read_projection(nb::handle module, nb::handle x, bool gradients, bool called) {
  PyObject *weight, *bias;
  if (!held_by(module.ptr(), weight, bias, called))
    return as_tuple({"the projection does more than multiply and add", true});
  return read_linear(x, weight, bias ? bias : Py_None, gradients);
}

nb::object see(Plan& plan, std::vector<nb::object>& kept, nb::handle given) {
  Reader reader(false);
  if (!visible(reader, given, plan)) return as_tuple(reader.reason);
  kept.insert(kept.end(), reader.kept.begin(), reader.kept.end());
  return nb::none();
}

}  // namespace multihead
