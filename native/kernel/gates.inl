// The middle of a gated feed-forward part, act(gate) * up, row by row.
#pragma once

#include "kernel/convert.inl"

namespace multihead {
namespace {

template <class A>
class GateRows {
 public:
  using F = typename A::F;
  static constexpr int W = A::W;

  static void run(const Gates& gates, index from, index to, void* scratch) {
    auto* gate = static_cast<float*>(scratch);
    float* up = gate + (gates.width + W - 1) / W * W;
    const index size = bytes(gates.type);
    for (index row = from; row < to; ++row) {
      widen<A>(static_cast<const char*>(gates.gate) + row * gates.row * size, gates.type, gates.width, gate);
      widen<A>(static_cast<const char*>(gates.up) + row * gates.row * size, gates.type, gates.width, up);
      for (index i = 0; i < gates.width; i += W) {  // scratch has whole vectors
        const F x = A::load(gate + i);
        A::store(gate + i, x * share(gates.tanh ? unit(x) : x) * A::load(up + i));
      }
      narrow<A>(gate, gates.type, gates.width, static_cast<char*>(gates.to) + row * gates.to_row * size);
    }
  }

 private:
  // 2 * sqrt(2 / pi) * (x + 0.044715 x^3): x * share of this is GELU by tanh.
  static F unit(F x) {
    const F cube = x * x * x;
    return A::fma(A::all(0.044715f), cube, x) * A::all(1.5957691216057308f);
  }

  // 1 / (1 + exp(-z)), by the exponential of what is never above 0.
  static F share(F z) {
    const F falling = PowersOfTwo<A>(1.4426950408889634f)(z > 0 ? -z : z);
    return (z > 0 ? A::all(1) : falling) / (A::all(1) + falling);
  }
};

}  // namespace
}  // namespace multihead
