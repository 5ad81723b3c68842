// What happens to weights: how a row ends, dropout, and values that are not finite under a mask.
#pragma once

#include <math.h>

#include "kernel/strip.inl"

namespace multihead {
namespace {

// What turns a score into a power of two.
template <class T>
T score_unit(const Plan& plan) {
  constexpr double log2e = 1.4426950408889634;
  return static_cast<T>(plan.plain() ? plan.scale * log2e : log2e);
}

// A score as the softmax sees it: a plain plan leaves the scale to the unit.
template <class T>
double natural(const Plan& plan, T score) {
  return plan.plain() ? double(score) * plan.scale : double(score);
}

// What a head's sink adds to the sum of weights of a row with this top.
template <class T>
double sink_weight(const Plan& plan, index h, T top) {
  return plan.sinks ? exp(double(static_cast<const T*>(plan.sinks)[h]) - natural(plan, top)) : 0;
}

// How a row ends: a weight is 2^((score - top) * unit) * factor, and lse is the log-sum-exp. (top, factor) is the state
// the backward pass starts from: lse alone would lose digits where scores are large.
template <class T>
struct Ending {
  T factor, lse, top;

  // From the state that a plan is given.
  static Ending load(const Plan& plan, index b, index h, index q) {
    const T* at = static_cast<const T*>(plan.given) + 2 * ((b * plan.sizes.H + h) * plan.sizes.Q + q);
    return {at[1], T(0), at[0]};
  }

  void save(const Plan& plan, index b, index h, index q) const {
    const index at = (b * plan.sizes.H + h) * plan.sizes.Q + q;
    if (plan.lse) static_cast<T*>(plan.lse)[at] = lse;
    if (plan.state) static_cast<T*>(plan.state)[2 * at] = top, static_cast<T*>(plan.state)[2 * at + 1] = factor;
  }
};

// `total` is the sum of 2^((score - top) * unit).
template <class T>
Ending<T> ending(const Plan& plan, index h, T top, T total) {
  const T none = -__builtin_inff();
  const bool dead = top == none && total == 0;
  const double level = natural(plan, top);
  if (plan.sinks) {
    const T sink = static_cast<const T*>(plan.sinks)[h];
    if (dead) return {T(0), sink, -none};
    if (double(sink) > level) {
      const T ratio = static_cast<T>(exp(level - double(sink))), sum = total * ratio + 1;
      return {ratio / sum, static_cast<T>(sink + log(double(sum))), top};
    }
    total += static_cast<T>(sink_weight(plan, h, top));
  }
  if (dead) return {T(0), none, -none};  // exp2(anything - inf) is 0
  if (!plan.lse) return {1 / total, T(0), top};
  const double sum = sizeof(T) == 8 ? log(double(total)) : double(logf(float(total)));
  return {1 / total, static_cast<T>(level + sum), top};
}

// The generator of dropout: counter-based, the same numbers on every backend.
inline std::uint32_t mix32(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

inline std::uint32_t dropout_row(std::uint64_t seed, index b, index h, index q) {
  std::uint32_t row = mix32(static_cast<std::uint32_t>(seed));
  row = mix32(row ^ static_cast<std::uint32_t>(seed >> 32));
  row = mix32(row ^ static_cast<std::uint32_t>(b));
  row = mix32(row ^ static_cast<std::uint32_t>(h));
  return mix32(row ^ static_cast<std::uint32_t>(q));
}

inline std::uint32_t dropout_key(index key) { return mix32(static_cast<std::uint32_t>(key) + 0x9e3779b9u); }

// A weight stays where its random bits reach this.
inline std::uint32_t dropout_threshold(double p) {
  const double edge = p * 4294967296.0;
  return edge >= 4294967295.0 ? 4294967295u : static_cast<std::uint32_t>(edge);
}

// Zeroes weights[keys][lanes] that are dropped and scales up the others.
template <class A>
void drop(const Plan& plan, const Task& task, const Strip<A>& strip, index key, index keys, typename A::T* weights) {
  using T = typename A::T;
  const int lanes = strip.nr * A::W;
  const std::uint32_t threshold = dropout_threshold(plan.dropout);
  const T keep = plan.dropout < 1 ? static_cast<T>(1 / (1 - plan.dropout)) : T(0);
  std::uint32_t row[Strip<A>::Lanes];
  for (int lane = 0; lane < lanes; ++lane)
    row[lane] = dropout_row(plan.seed, task.b, strip.head[lane], strip.query[lane]);
  for (index i = 0; i < keys; ++i) {
    const std::uint32_t column = dropout_key(key + i);
    T* at = weights + i * lanes;
    for (int lane = 0; lane < lanes; ++lane) at[lane] *= mix32(row[lane] ^ column) >= threshold ? keep : T(0);
  }
}

template <class A>
bool finite(const typename A::T* v, index stride, index width, index rows) {
  using F = typename A::F;
  F sum = F{};
  for (index i = 0; i < rows; ++i, v += stride) {
    index j = 0;
    for (; j + A::W <= width; j += A::W) sum += A::load(v + j) * F{};  // 0, or NaN once and for ever
    if (j < width) sum += A::load_some(v + j, static_cast<int>(width - j)) * F{};
  }
  return !A::any(sum != sum);
}

// to[width][lanes] = to * decay + v * weights, leaving out what a lane does not see: there 0 * NaN would be NaN. The
// sums run in the same order as the fast path's.
template <class A, int NR>
void mix_seen(index width, typename A::T* to, index keys, const typename A::T* weights, const typename A::T* visible,
              const typename A::T* v, index stride, const typename A::F (&decay)[NR]) {
  using F = typename A::F;
  using I = typename A::I;
  for (index j = 0; j < width; ++j)
    for (int c = 0; c < NR; ++c) {
      F sum = F{};
      for (index i = 0; i < keys; ++i) {
        const index at = (i * NR + c) * A::W;
        const I seen = (I)A::load(visible + at);
        sum = A::select(seen, A::fma(A::all(v[i * stride + j]), A::load(weights + at), sum), sum);
      }
      typename A::T* at = to + (j * NR + c) * A::W;
      A::store(at, A::fma(A::load(at), decay[c], sum));
    }
}

}  // namespace
}  // namespace multihead
