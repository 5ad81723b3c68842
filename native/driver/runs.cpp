#include "driver/runs.h"

#include <cstring>
#include <stdexcept>

#include "run/attend.h"
#include "run/backward.h"
#include "run/layer.h"
#include "run/look.h"

namespace multihead {
namespace {

using Results = std::map<std::string, Tensor>;

// Filled with NaN, so that what is not written is noticed; integers with -7.
Tensor unwritten(const std::string& type, const std::vector<index>& shape) {
  Tensor t(type, shape);
  std::memset(t.memory.data(), type == "i64" ? 0xf9 : 0xff, t.bytes());
  return t;
}

View view_of(const Tensor& t) {
  return {t.memory.data(), t.shape[1] * t.shape[2] * t.shape[3], t.shape[2] * t.shape[3], t.shape[3]};
}

// A ramp, or a tensor that broadcasts to (B,H,Q).
Bound bound_of(const Case& the, const std::string& name, index otherwise) {
  Bound bound;
  if (const Tensor* t = the.tensor(name)) {
    const std::vector<index> at = t->strides(3);
    bound.data = t->memory.data(), bound.wide = t->type == "i64";
    bound.batch = at[0], bound.head = at[1], bound.query = at[2];
    return bound;
  }
  bound.offset = static_cast<index>(the.number(name + ".offset", 0));
  bound.low = static_cast<index>(the.number(name + ".low", static_cast<double>(otherwise)));
  bound.high = static_cast<index>(the.number(name + ".high", static_cast<double>(otherwise)));
  return bound;
}

Dense dense_of(const Tensor* t) {
  if (!t) return {};
  const std::vector<index> at = t->strides(4);
  return {t->memory.data(), at[0], at[1], at[2], at[3]};
}

// Mask and options; sizes and type are there already.
void see(const Case& the, Plan& plan) {
  plan.start = bound_of(the, "start", 0);
  plan.stop = bound_of(the, "stop", plan.sizes.K);
  plan.allowed = dense_of(the.tensor("allowed"));
  plan.bias = dense_of(the.tensor("bias"));
  if (const Tensor* sinks = the.tensor("sinks")) plan.sinks = sinks->memory.data();
  plan.scale = the.number("scale", 1);
  plan.softcap = the.number("softcap", 0);
  plan.dropout = the.number("dropout", 0);
  plan.seed = static_cast<std::uint64_t>(the.number("seed", 0));
}

class Attention {
 public:
  Attention(const Case& c, const Isa& i, int n) : the(c), isa(i), threads(n) {
    const Tensor &q = the.needed("q"), &k = the.needed("k"), &v = the.needed("v");
    sizes = {q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]};
    plan.sizes = sizes;
    plan.type = plan.kv_type = q.number();
    plan.q = view_of(q), plan.k = view_of(k), plan.v = view_of(v);
    see(the, plan);
    wide = q.type == "f64" ? "f64" : "f32";
  }

  Results run() {
    for (const Expected& expected : the.expected) {
      const std::string& name = expected.name;
      if (results.count(name)) continue;
      if (name == "out" || name == "lse")
        forward();
      else if (name == "d_q" || name == "d_k" || name == "d_v")
        gradients();
      else if (name == "entropy" || name == "mass" || name == "top" || name == "keys")
        statistics(expected);
      else
        look_at(name, expected.exact.shape);
    }
    return results;
  }

 private:
  const Case& the;
  const Isa& isa;
  int threads;
  Sizes sizes;
  Plan plan;
  std::string wide;
  Results results;

  void* into(const std::string& name, const std::string& type, const std::vector<index>& shape) {
    return results.emplace(name, unwritten(type, shape)).first->second.memory.data();
  }
  std::vector<index> rows() const { return {sizes.B, sizes.H, sizes.Q}; }
  std::vector<index> rows_of(index width) const { return {sizes.B, sizes.H, sizes.Q, width}; }

  void forward() {
    into("out", the.needed("q").type, rows_of(sizes.V));
    plan.out = view_of(results.at("out"));
    plan.lse = into("lse", wide, rows());
    plan.state = into("state", wide, rows_of(2));
    attend(plan, isa, threads);
  }

  void gradients() {
    if (!plan.state) forward();
    Gradients g;
    g.plan = plan;
    g.d_out = view_of(the.needed("d_out"));
    if (const Tensor* t = the.tensor("d_lse")) g.d_lse = t->memory.data();
    const Tensor delta = unwritten(wide, rows_of(2));
    g.delta = delta.memory.data();
    View* to[] = {&g.d_q, &g.d_k, &g.d_v};
    const char* names[] = {"q", "k", "v"};
    for (int i = 0; i < 3; ++i) {
      const Tensor& of = the.needed(names[i]);
      const std::string name = std::string("d_") + names[i];
      into(name, of.type, of.shape);
      *to[i] = view_of(results.at(name));
    }
    backward(g, isa, threads);
  }

  // A plan of scores alone.
  Plan scores() const {
    Plan p = plan;
    p.sizes.V = 0, p.dropout = 0, p.v = p.out = {};
    p.lse = p.state = nullptr;
    return p;
  }

  void* state() {
    if (!results.count("scan")) {
      Plan p = scores();
      p.state = into("scan", wide, rows_of(2));
      attend(p, isa, threads);
    }
    return results.at("scan").memory.data();
  }

  void statistics(const Expected& expected) {
    Plan p = scores();
    p.given = state();
    p.statistics.entropy = into("entropy", wide, rows());
    p.statistics.mass = into("mass", wide, rows());
    if (expected.name == "top" || expected.name == "keys") {
      p.statistics.count = expected.exact.shape[3];
      p.statistics.weights = into("top", wide, rows_of(p.statistics.count));
      p.statistics.keys = static_cast<std::int64_t*>(into("keys", "i64", rows_of(p.statistics.count)));
    }
    attend(p, isa, threads);
  }

  void look_at(const std::string& name, const std::vector<index>& shape) {
    Recompute recompute;
    recompute.plan = scores();
    recompute.plan.given = state();
    void* to = into(name, wide, shape);
    if (name == "weights") {
      std::memset(to, 0, results.at(name).bytes());
      recompute.weights = view_of(results.at(name));
    } else if (name == "received") {
      recompute.received = to;
    } else if (name == "map" || name == "largest") {
      recompute.map = to, recompute.height = shape[2], recompute.width = shape[3],
      recompute.largest = name == "largest";
    } else {
      throw std::runtime_error("nothing is called '" + name + "'");
    }
    look(recompute, isa, threads);
  }
};

Projection projection_of(const Case& the, const std::string& letter) {
  const Tensor &weight = the.needed("w_" + letter), *bias = the.tensor("b_" + letter);
  return {weight.memory.data(), weight.shape[1], bias ? bias->memory.data() : nullptr};
}

Results run_layer_of(const Case& the, const Isa& isa, int threads) {
  const Tensor &x = the.needed("x"), *other = the.tensor("context"), &context = other ? *other : x;
  Layer layer{};
  Sizes& s = layer.plan.sizes;
  s.B = x.shape[0], s.Q = x.shape[1], s.K = context.shape[1];
  s.D = static_cast<index>(the.number("D", 0)), s.V = static_cast<index>(the.number("V", 0));
  s.H = the.needed("w_q").shape[0] / s.D, s.G = the.needed("w_k").shape[0] / s.D;
  layer.plan.type = layer.plan.kv_type = layer.weights = x.number();
  see(the, layer.plan);
  layer.E = layer.outputs = x.shape[2], layer.C = context.shape[2], layer.N = s.K;
  layer.x = x.memory.data(), layer.x_row = layer.E, layer.x_batch = s.Q * layer.E;
  layer.context = context.memory.data(), layer.context_row = layer.C, layer.context_batch = s.K * layer.C;
  layer.q = projection_of(the, "q"), layer.k = projection_of(the, "k");
  layer.v = projection_of(the, "v"), layer.o = projection_of(the, "o");
  const Tensor y = unwritten(x.type, x.shape);
  layer.y = y.memory.data();
  run_layer(layer, isa, threads);
  return {{"y", y}};
}

Results run_linear_of(const Case& the, const Isa& isa, int threads) {
  const Tensor &x = the.needed("x"), &weight = the.needed("w");
  const index rows = x.shape[0], inputs = x.shape[1], outputs = weight.shape[0];
  const Tensor y = unwritten(x.type, {rows, outputs});
  const Rows from{x.memory.data(), 0, inputs, 1, rows, inputs, x.number()};
  const Projection p{weight.memory.data(), inputs, the.needed("b").memory.data()};
  const Linear linear = linear_of(from, p, weight.number(), outputs, y.memory.data());
  run_linear(linear, isa, threads);
  return {{"y", y}};
}

}  // namespace

Results run(const Case& the, const Isa& isa, int threads) {
  if (the.kind == "attention") return Attention(the, isa, threads).run();
  if (the.kind == "layer") return run_layer_of(the, isa, threads);
  if (the.kind == "linear") return run_linear_of(the, isa, threads);
  throw std::runtime_error("a case of kind '" + the.kind + "'");
}

}  // namespace multihead
