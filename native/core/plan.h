// What one call of attention is: sizes, where the tensors lie, which keys each query sees, and the options.
// Plain structs: they cross from code compiled for any CPU into code compiled for one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace multihead {

using index = std::int64_t;

// B batch, H query heads, G key/value heads (H % G == 0), Q queries, K keys, D width of q and k, V width of v.
struct Sizes {
  index B, H, G, Q, K, D, V;
  index group() const { return H / G; }
  index rows() const { return group() * Q; }  // query rows that share the keys and values of one head
};

enum class Type { f32, f64, bf16, f16, i8 };

inline index bytes(Type type) { return type == Type::f64 ? 8 : type == Type::f32 ? 4 : type == Type::i8 ? 1 : 2; }

// (B, heads, rows, width) with a contiguous last axis; strides count elements and may be 0 or negative.
struct View {
  void* data = nullptr;
  index batch = 0, head = 0, row = 0;
};

// One end of the interval of keys that a query sees: clamp(q + offset, low, high), or an integer tensor (B,H,Q).
struct Bound {
  const void* data = nullptr;  // null: the ramp
  bool wide = false;           // int64 instead of int32
  index batch = 0, head = 0, query = 0;
  index offset = 0, low = 0, high = 0;

  index at(index b, index h, index q) const {
    if (!data) {
      const index x = q + offset;
      return x < low ? low : x > high ? high : x;
    }
    const index i = b * batch + h * head + q * query;
    return wide ? static_cast<const std::int64_t*>(data)[i] : static_cast<const std::int32_t*>(data)[i];
  }
};

// A (B,H,Q,K) tensor in any broadcast; strides count elements.
struct Dense {
  const void* data = nullptr;
  index batch = 0, head = 0, query = 0, key = 0;
};

// Statistics of the weights, each contiguous, of the kernel's number type; null or 0 where not wanted.
struct Statistics {
  void* entropy = nullptr;       // (B,H,Q), in nats
  void* weights = nullptr;       // (B,H,Q,count): the largest weights, falling
  std::int64_t* keys = nullptr;  // (B,H,Q,count): their keys, -1 where a query sees fewer; ties: the lowest key first
  index count = 0;
  void* mass = nullptr;  // (B,H,Q): the sum of the weights; all of it but for a sink, unless `given` says otherwise

  bool wanted() const { return entropy || count || mass; }
};

struct Plan {
  Sizes sizes;
  Type type = Type::f32;     // of q and out
  Type kv_type = Type::f32;  // of k and v: the same, but where a cache holds them in fewer bits
  View q, k, v, out;
  View k_scales, v_scales;      // (B,G,K) floats, where kv_type is i8: what a row of k or v is to be multiplied by
  void* lse = nullptr;          // (B,H,Q) contiguous; double for f64, else float
  void* state = nullptr;        // (B,H,Q,2) contiguous: what the backward pass needs, see Ending
  const void* given = nullptr;  // a state that is known already, of these queries over more keys maybe; V is 0 then
  Bound start, stop;            // start <= key < stop
  Dense allowed;                // bool: true may attend
  Dense bias;                   // double for f64, else float; -inf hides
  const void* sinks = nullptr;  // (H,); double for f64, else float
  double scale = 1, softcap = 0, dropout = 0;
  std::uint64_t seed = 0;
  Statistics statistics;
  View weights;  // (B,H,Q,K), double for f64, else float: what may be seen is written, before dropout; or null

  // Whether scores can be left as they are, with the scale in the unit of the powers of two.
  bool plain() const { return !allowed.data && !bias.data && softcap == 0 && scale > 1e-30 && scale < 1e30; }
};

// Rows [row, row + rows) of the (query, group head) pairs that read key/value head g, over keys [key, key + keys).
// Row r is query r / group of head g * group + r % group: neighbours see nearly the same keys.
struct Task {
  index b, g, row, rows, key, keys;
  void* partial = nullptr;     // where to leave the unfinished sums of a split task; null: finish into out
  const Task* next = nullptr;  // the task that most likely follows on the same thread
};

// The backward pass of a plan whose `state` the forward pass has filled; `out` is not needed.
struct Gradients {
  Plan plan;
  View d_out, d_q, d_k, d_v;    // gradients of out, q, k and v, of the plan's type
  const void* d_lse = nullptr;  // (B,H,Q) contiguous, or null
  void* delta = nullptr;  // (B,H,Q,2) contiguous, written: what a row subtracts from its weights' gradients, its factor
};

// n things in `count` bins, as torch's adaptive pooling cuts them: neighbours may share one thing.
struct Bins {
  index n, count;
  index first(index bin) const { return bin * n / count; }
  index last(index bin) const { return ((bin + 1) * n + count - 1) / count; }  // one past it
  index lowest(index thing) const { return thing * count / n; }                // the bins that have it
  index past(index thing) const { return ((thing + 1) * count + n - 1) / n; }  // end before this one
};

// Weights of a plan whose state is `given`, or what they add up to; each of the plan's number type, and null where not
// wanted. `out` is not needed, and V is 0.
struct Recompute {
  Plan plan;
  View weights;              // (B,H,Q,K); only what may be seen is written, and the rest is left as it is
  void* received = nullptr;  // (B,H,K) contiguous: the sum over queries
  void* map = nullptr;       // (B,H,height,width) contiguous: the mean, or the largest, of each bin
  index height = 0, width = 0;
  bool largest = false;
};

}  // namespace multihead
