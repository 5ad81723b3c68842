// A call that was read, run into tensors that are named.
#include <algorithm>
#include <initializer_list>

#include "core/dispatch.h"
#include "python/reading.h"
#include "python/watchers.h"
#include "run/attend.h"
#include "run/backward.h"
#include "run/look.h"

namespace nb = nanobind;

namespace multihead {
namespace {

// A tensor to write to: of this shape and dtype, and contiguous from `axis` on. One that is read, and that others made
// or kept meanwhile, must hold what it sees.
Tensor fitting(nb::handle object, const char* name, std::initializer_list<index> shape, Number number, int axis,
               bool made_here = true) {
  Reader reader(false, made_here);
  Tensor t;
  if (!reader.tensor(object, name, t)) refuse(reader.reason.says);
  const bool fits = t.number == number && t.axes == static_cast<int>(shape.size()) &&
                    std::equal(shape.begin(), shape.end(), t.shape) && (t.count() == 0 || t.contiguous_from(axis));
  if (!fits) refuse_form(name);
  return t;
}

// The tensors a call is run into, by name; each is looked up once, and an unknown name is an error.
class Into {
 public:
  explicit Into(const nb::kwargs& named) : named_(named) {}
  nb::handle operator()(const char* name) {
    if (used_ == PyDict_Size(named_.ptr())) return {};
    PyObject* found = PyDict_GetItemString(named_.ptr(), name);
    used_ += found != nullptr;
    return found == Py_None ? nb::handle() : nb::handle(found);
  }
  void* whole(const char* name, std::initializer_list<index> shape, Number number, bool made_here = true) {
    const nb::handle found = (*this)(name);
    return found ? fitting(found, name, shape, number, 0, made_here).data : nullptr;
  }
  View rows(const char* name, std::initializer_list<index> shape, Number number, bool made_here = true) {
    const nb::handle found = (*this)(name);
    if (!found) return {};
    const Tensor t = fitting(found, name, shape, number, 3, made_here);
    return {t.data, t.strides[0], t.strides[1], t.strides[2]};
  }
  void done() const {
    if (used_ != PyDict_Size(named_.ptr())) refuse("a name is not one that this call can be run into");
  }

 private:
  const nb::kwargs& named_;
  Py_ssize_t used_ = 0;
};

}  // namespace

void run_into(Plan& plan, nb::handle out, int threads) {
  const Sizes& s = plan.sizes;
  const Tensor t = fitting(out, "out", {s.B, s.H, s.Q, s.V}, static_cast<Number>(plan.type), 3);
  plan.out = {t.data, t.strides[0], t.strides[1], t.strides[2]};
  const Isa& chosen = choose("");
  nb::gil_scoped_release release;
  attend(plan, chosen, threads);
}

void run_attend(AttentionCall& call, int threads, const std::string& isa, const nb::kwargs& named) {
  Plan plan = call.plan;
  const Sizes& s = plan.sizes;
  const Number exact = wide(plan.type);
  Into into(named);
  plan.out = into.rows("out", {s.B, s.H, s.Q, s.V}, static_cast<Number>(plan.type));
  plan.lse = into.whole("lse", {s.B, s.H, s.Q}, exact);
  plan.state = into.whole("state", {s.B, s.H, s.Q, 2}, exact);
  plan.given = into.whole("given", {s.B, s.H, s.Q, 2}, exact);
  plan.statistics.entropy = into.whole("entropy", {s.B, s.H, s.Q}, exact);
  plan.statistics.mass = into.whole("mass", {s.B, s.H, s.Q}, exact);
  if (const nb::handle top = into("top")) {
    const index n = nb::cast<index>(top.attr("shape")[nb::int_(3)]);
    plan.statistics.weights = fitting(top, "top", {s.B, s.H, s.Q, n}, exact, 0).data;
    plan.statistics.keys = static_cast<std::int64_t*>(into.whole("keys", {s.B, s.H, s.Q, n}, Number::i64));
    plan.statistics.count = n;
    if (n < 1 || (!plan.statistics.keys && s.B * s.H * s.Q > 0)) refuse("top is given without keys of the same shape");
  }
  plan.weights = into.rows("weights", {s.B, s.H, s.Q, s.K}, exact);
  into.done();
  if (s.V && s.B * s.H * s.Q > 0 && !plan.out.data) refuse("out is missing");
  if (plan.given && (s.V || plan.lse || plan.state || plan.dropout != 0))
    refuse("with a given state there are statistics only: no v, lse, state or dropout");
  if (plan.weights.data && (s.K > most_weighed_keys || plan.given))
    refuse("weights beside out: at most " + std::to_string(most_weighed_keys) + " keys, and no given state");
  const Isa& chosen = choose(isa);
  nb::gil_scoped_release release;
  attend(plan, chosen, threads);
}

void run_backward(AttentionCall& call, int threads, const std::string& isa, const nb::kwargs& named) {
  Gradients g;
  g.plan = call.plan;
  const Sizes& s = g.plan.sizes;
  const Number exact = wide(g.plan.type), own = static_cast<Number>(g.plan.type);
  Into into(named);
  g.d_out = into.rows("d_out", {s.B, s.H, s.Q, s.V}, own, false);
  g.d_q = into.rows("d_q", {s.B, s.H, s.Q, s.D}, own);
  g.d_k = into.rows("d_k", {s.B, s.G, s.K, s.D}, own);
  g.d_v = into.rows("d_v", {s.B, s.G, s.K, s.V}, own);
  g.plan.state = into.whole("state", {s.B, s.H, s.Q, 2}, exact, false);
  g.delta = into.whole("delta", {s.B, s.H, s.Q, 2}, exact);
  g.d_lse = into.whole("d_lse", {s.B, s.H, s.Q}, exact, false);
  into.done();
  const index rows = s.B * s.H * s.Q, keys = s.B * s.G * s.K;
  if ((rows && (!g.plan.state || !g.delta || !g.d_q.data || (s.V && !g.d_out.data))) ||
      (keys && (!g.d_k.data || (s.V && !g.d_v.data))))
    refuse("backward needs d_out, state, delta, d_q, d_k and d_v");
  const Isa& chosen = choose(isa);
  nb::gil_scoped_release release;
  backward(g, chosen, threads);
}

void run_look(AttentionCall& call, int threads, const std::string& isa, const nb::kwargs& named) {
  Recompute recompute;
  recompute.plan = call.plan;
  const Sizes& s = recompute.plan.sizes;
  const Number exact = wide(recompute.plan.type);
  Into into(named);
  recompute.plan.given = into.whole("given", {s.B, s.H, s.Q, 2}, exact);
  recompute.weights = into.rows("weights", {s.B, s.H, s.Q, s.K}, exact);
  recompute.received = into.whole("received", {s.B, s.H, s.K}, exact);
  if (const nb::handle largest = into("largest")) recompute.largest = nb::cast<bool>(largest);
  if (const nb::handle map = into("map")) {
    const nb::object shape = map.attr("shape");
    recompute.height = nb::cast<index>(shape[nb::int_(2)]), recompute.width = nb::cast<index>(shape[nb::int_(3)]);
    if (recompute.height < 1 || recompute.width < 1) refuse("a map needs a height and a width of at least 1");
    recompute.map = fitting(map, "map", {s.B, s.H, recompute.height, recompute.width}, exact, 0).data;
  }
  into.done();
  if (s.V) refuse("a look has no values: expected v to be None");
  if (s.B * s.H * s.Q > 0 && !recompute.plan.given) refuse("given is missing");
  const Isa& chosen = choose(isa);
  nb::gil_scoped_release release;
  look(recompute, chosen, threads);
}

void run_whole_layer(LayerCall& call, nb::handle y, int threads, const std::string& isa) {
  Layer layer = call.layer;
  const Sizes& s = layer.plan.sizes;
  layer.y = room(y, "y", layer.plan.type, s.B * s.Q * layer.outputs);
  if (s.K < 1) refuse("the keys and values of the call are missing");
  const auto numbers = [](const std::vector<std::int64_t>& of) { return of.empty() ? nullptr : of.data(); };
  layer.q_rotation.positions = numbers(call.q_positions), layer.k_rotation.positions = numbers(call.k_positions);
  layer.store.firsts = numbers(call.firsts), layer.store.real = numbers(call.real);
  const Isa& chosen = choose(isa);
  nb::gil_scoped_release release;
  run_layer(layer, chosen, threads);
}

nb::object put_out(LayerCall& call, nb::handle x) {
  nb::object y = rows_like(x, call.layer.outputs);
  run_whole_layer(call, y, torch_threads(), "");
  return y;
}

void run_product(LinearCall& call, nb::handle y, int threads, const std::string& isa) {
  Linear linear = call.linear;
  linear.y = room(y, "y", linear.x_type, linear.rows * linear.outputs);
  const Isa& chosen = choose(isa);
  nb::gil_scoped_release release;
  run_linear(linear, chosen, threads);
}

}  // namespace multihead
