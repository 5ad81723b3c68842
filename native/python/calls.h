// Calls as Python makes them: read once, checked, and kept alive until they have run.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "python/tensors.h"
#include "run/mlp.h"

namespace multihead {

// Steps 3 and 4.
struct AttentionCall {
  Plan plan;
  std::vector<nanobind::object> kept;
};

// The whole layer.
struct LayerCall {
  Layer layer;
  bool gradients = false;
  std::vector<std::int64_t> q_positions, k_positions, firsts,
      real;  // what the layer's pointers of these names point to
  std::vector<nanobind::object> kept;
};

// A cache's memory; scales are None but for int8.
struct Buffers {
  nanobind::handle k, v, k_scales, v_scales;
};

// Cosines and sines of RoPE's angles, see `Layer.rotate` in bindings.cpp.
struct Angles {
  nanobind::handle cos, sin, positions;
  bool counted, interleaved;
  index pairs;
};

// A product with the weights of an nn.Linear.
struct LinearCall {
  Linear linear;
  std::vector<nanobind::object> kept;
};

// The gated feed-forward part.
struct FeedForwardCall {
  Mlp mlp;
  std::vector<nanobind::object> kept;
};

// Its linears; `up` None: the rows of the gate's weight are the gate's, then up's.
struct Gated {
  nanobind::handle gate, up, down;
  bool tanh;
};

// Each gives the call, or (reason, dispatched) where it may not go straight to the kernel: see Reason. `gradients`:
// whether torch records them, so that a tensor that wants one is a reason.

// `call` has q, k, v or None, bias, sinks, scale, softcap and dropout; every key is visible until `see` is told more.
nanobind::object read_attention(nanobind::handle call, bool gradients);

// The output of a call without dropout, of which nothing else is wanted, read and run at once; or (reason, dispatched).
// `call`: q, k, v, bias, sinks, scale, softcap, dropout. `mask` None, or what `lower(mask, B, H, Q, K)` takes, which
// gives what `see` takes.
nanobind::object attend_now(const nanobind::tuple& call, nanobind::handle mask, const nanobind::callable& lower);

// `layer` is a MultiHeadAttention; `context` may be None. H and G are what the projections put out. `recalls`: keys and
// values are not made here, but told by `recall`.
nanobind::object read_layer(nanobind::handle layer, nanobind::handle x, nanobind::handle context, bool gradients,
                            bool recalls);

// The same of any layer: `parts` has q, k, v and o, each an nn.Linear or (weight, bias), q_norm and k_norm, each None
// or (weight, eps), D, V, scale, softcap and sinks.
nanobind::object read_parts(nanobind::handle parts, nanobind::handle x, nanobind::handle context, bool gradients);

// What a layer's call does besides: each gives None, or (reason, dispatched). K is how many keys are visible then.
nanobind::object rotate(LayerCall& call, const Angles& angles, bool queries, bool keys);
nanobind::object join(LayerCall& call, const Buffers& cache, nanobind::handle first, index K, nanobind::handle real);
nanobind::object recall(LayerCall& call, nanobind::handle k, nanobind::handle v, index K);

// x (..., inputs) of two or three axes.
nanobind::object read_linear(nanobind::handle x, nanobind::handle weight, nanobind::handle bias, bool gradients);
nanobind::object read_projection(nanobind::handle module, nanobind::handle x, bool gradients, bool called);

nanobind::object read_feed_forward(const Gated& of, nanobind::handle x, bool gradients);

// RMS norm of each row of x into y, or (reason, dispatched).
nanobind::object norm_rows(nanobind::handle x, nanobind::handle weight, double eps, nanobind::handle y, bool gradients,
                           int threads);

// What the queries of a call see: an object with start, stop and dense. None, or (reason, dispatched).
nanobind::object see(Plan& plan, std::vector<nanobind::object>& kept, nanobind::handle visible);

// Attention into `out`, which this package has just made.
void run_into(Plan& plan, nanobind::handle out, int threads);

// Runs a call into the tensors that are named; see native/README.md for their names, shapes and dtypes.
void run_attend(AttentionCall& call, int threads, const std::string& isa, const nanobind::kwargs& into);
void run_backward(AttentionCall& call, int threads, const std::string& isa, const nanobind::kwargs& into);
void run_look(AttentionCall& call, int threads, const std::string& isa, const nanobind::kwargs& into);
void run_whole_layer(LayerCall& call, nanobind::handle y, int threads, const std::string& isa);
nanobind::object put_out(LayerCall& call, nanobind::handle x);
void run_feed_forward(FeedForwardCall& call, nanobind::handle y, nanobind::handle middle, int threads,
                      const std::string& isa);
void run_product(LinearCall& call, nanobind::handle y, int threads, const std::string& isa);

// The dtype of sums: see native/README.md.
inline Number wide(Type type) { return type == Type::f64 ? Number::f64 : Number::f32; }

// The scores of so many keys are kept until a row ends, where its weights are wanted beside the output.
constexpr index most_weighed_keys = 1024;

}  // namespace multihead
