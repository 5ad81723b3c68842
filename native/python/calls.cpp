#include "python/calls.h"

#include <nanobind/stl/string.h>

#include <utility>

#include "python/reading.h"
#include "python/watchers.h"

namespace nb = nanobind;

namespace multihead {
namespace {

const Name q_name("q"), k_name("k"), v_name("v"), bias_name("bias"), sinks_name("sinks"), scale_name("scale"),
    softcap_name("softcap"), dropout_name("dropout"), start_name("start"), stop_name("stop"), dense_name("dense"),
    offset_name("offset"), low_name("low"), high_name("high");

// What a call of attention is given.
struct Given {
  nb::object q, k, v, bias, sinks, scale, softcap, dropout;

  static Given attributes_of(nb::handle call) {
    return {attribute(call, q_name),       attribute(call, k_name),      attribute(call, v_name),
            attribute(call, bias_name),    attribute(call, sinks_name),  attribute(call, scale_name),
            attribute(call, softcap_name), attribute(call, dropout_name)};
  }
};

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
  plan.type = plan.kv_type = static_cast<Type>(q.number);
  Sizes& s = plan.sizes;
  s = {q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]};
  if (k.shape[0] != s.B || v.shape[0] != s.B || k.shape[3] != s.D || v.shape[1] != s.G || v.shape[2] != s.K)
    return reader.refuse("q, k and v do not fit each other");
  if (s.D < 1 || s.G < 1 || s.H % s.G) return reader.refuse("D is 0, or G does not divide H");
  if (s.K > most_rows || s.rows() > most_rows)
    return reader.refuse("more than 2**30 keys, or query rows that share them");
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
  if (given.v.is_none()) return as_tuple({"v is None", false});  // only who asks for no output has no values
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
  if (!parameters_of_linear(module.ptr(), weight, bias, called))
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
