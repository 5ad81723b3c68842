// What happens to a tile of scores between q.k and the weights: scale, softcap, bias, mask.
#pragma once

#include <math.h>

#include "kernel/strip.inl"

namespace multihead {
namespace {

// tanh, to about one unit in the last place on both sides of where the two forms meet; `slope`, if wanted, becomes its
// derivative without the cancellation of 1 - tanh^2.
template <class A>
typename A::F tanh_of(typename A::F x, typename A::F* slope = nullptr) {
  using F = typename A::F;
  using T = typename A::T;
  if constexpr (sizeof(T) == 8) {
    for (int i = 0; i < A::W; ++i) {
      if (slope) (*slope)[i] = 1 / (cosh(x[i]) * cosh(x[i]));
      x[i] = tanh(x[i]);
    }
    return x;
  } else {
    constexpr float c[] = {1.0f,
                           -0.3333332969808752f,
                           0.13333182790224685f,
                           -0.05394469778974966f,
                           0.021691821216151333f,
                           -0.008159113753925452f,
                           0.002128507699608765f};
    const F u = x * x;
    F near = A::all(c[6]);
#pragma GCC unroll 8
    for (int i = 5; i >= 0; --i) near = A::fma(near, u, A::all(c[i]));
    const F size = x < F{} ? -x : x;
    const F capped = size > A::all(20) ? A::all(20) : size;  // NaN stays
    const F e = PowersOfTwo<A>(2.885390081777927f)(-capped);
    const F below = A::all(1) + e, far = (A::all(1) - e) / below;
    if (slope) *slope = A::all(4) * e / (below * below);
    return A::select(size < A::all(0.625f), near * x, A::select(x < F{}, -far, far));
  }
}

// Rows of a dense (B,H,Q,K) tensor, one per lane, turned so that each key has a vector of lanes: to[key][lane].
template <class A, class Element>
void stage(const Task& task, const Strip<A>& strip, const Dense& dense, index key, index keys, typename A::T* rowwise,
           typename A::T* to) {
  using T = typename A::T;
  using F = typename A::F;
  constexpr int W = A::W;
  const index lanes = strip.nr * W;
  for (int c = 0; c < strip.nr; ++c) {
    const T* source[W];
    for (int i = 0; i < W; ++i) {
      const int lane = c * W + i;
      const Element* from = static_cast<const Element*>(dense.data) + task.b * dense.batch +
                            strip.head[lane] * dense.head + strip.query[lane] * dense.query + key * dense.key;
      T* row = rowwise + i * keys;
      if (dense.key == 1)
        for (index j = 0; j < keys; ++j) row[j] = static_cast<T>(from[j]);
      else
        for (index j = 0; j < keys; ++j) row[j] = static_cast<T>(from[j * dense.key]);
      source[i] = row;
    }
    F block[W];
    for (index j = 0; j < keys; j += W) {
      const int width = keys - j < W ? static_cast<int>(keys - j) : W;
      for (int i = 0; i < W; ++i) block[i] = A::load_some(source[i] + j, width);
      A::transpose(block);
      for (int i = 0; i < width; ++i) A::store(to + (j + i) * lanes + c * W, block[i]);
    }
  }
}

enum class Seen { none, some, all };

// What the dense mask leaves of a tile.
template <class A>
Seen classify(const Plan& plan, const Task& task, const Strip<A>& strip, index key, index keys) {
  bool any = false, all = true;
  index done_h = -1, done_q = -1;
  for (int lane = 0; lane < strip.rows; ++lane) {
    const index h = plan.allowed.head ? strip.head[lane] : 0;
    const index q = plan.allowed.query ? strip.query[lane] : 0;
    if (h == done_h && q == done_q) continue;
    done_h = h, done_q = q;
    const auto* at = static_cast<const std::uint8_t*>(plan.allowed.data) + task.b * plan.allowed.batch +
                     h * plan.allowed.head + q * plan.allowed.query + key * plan.allowed.key;
    unsigned found = 0, missing = 0;
    if (plan.allowed.key == 1)
      for (index j = 0; j < keys; ++j) found |= at[j], missing |= at[j] ^ 1u;
    else
      for (index j = 0; j < keys; ++j) found |= at[j * plan.allowed.key], missing |= at[j * plan.allowed.key] ^ 1u;
    any |= found != 0;
    all &= missing == 0;
    if (any && !all) return Seen::some;
  }
  return all ? Seen::all : any ? Seen::some : Seen::none;
}

struct Adjustment {
  bool dense;  // some keys of the tile are hidden by the dense mask
  void* staged;
  void* visible;
  void* rowwise;
  void* slope = nullptr;  // where to leave the softcap's derivative, for the backward pass
  index from = 0;  // of a plain plan: the keys before it are left out, for every lane sees them, and `top` is theirs
};

// Applies scale, softcap, bias and mask to scores[keys][lanes]; `top` becomes the largest score of each lane, and
// visible[keys][lanes] all ones where a key is seen. True if any key is hidden from any lane.
template <class A, int NR>
bool adjust(const Plan& plan, const Task& task, const Strip<A>& strip, index key, index keys, const Adjustment& with,
            typename A::T* scores, typename A::F (&top)[NR]) {
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  constexpr int W = A::W;
  T* staged = static_cast<T*>(with.staged);
  T* visible = static_cast<T*>(with.visible);
  T* rowwise = static_cast<T*>(with.rowwise);
  if (plan.bias.data) stage<A, T>(task, strip, plan.bias, key, keys, rowwise, staged);
  if (with.dense) stage<A, std::uint8_t>(task, strip, plan.allowed, key, keys, rowwise, visible);

  const F none = A::all(-__builtin_inff());
  const F scale = A::all(static_cast<T>(plan.plain() ? 1 : plan.scale));
  const F cap = A::all(static_cast<T>(plan.softcap));
  const bool simple = plan.plain();
  I start[NR], stop[NR], hidden = I{};
  for (int c = 0; c < NR; ++c) {
    std::memcpy(&start[c], strip.start + c * W, sizeof(I));
    std::memcpy(&stop[c], strip.stop + c * W, sizeof(I));
    if (with.from == 0) top[c] = none;
  }
  for (index i = with.from; i < keys; ++i) {
    const I at_key = A::all_int(static_cast<typename A::Int>(key + i));
#pragma GCC unroll 4
    for (int c = 0; c < NR; ++c) {
      const index at = (i * NR + c) * W;
      I seen = (at_key >= start[c]) & (at_key < stop[c]);
      F score = A::load(scores + at);
      if (!simple) {
        score *= scale;
        if (plan.softcap != 0) {
          F slope;
          score = tanh_of<A>(score / cap, with.slope ? &slope : nullptr) * cap;
          if (with.slope) A::store(static_cast<T*>(with.slope) + at, slope);
        }
        if (with.dense) seen &= A::load(visible + at) != F{};
        if (plan.bias.data) {
          const F bias = A::load(staged + at);
          seen &= bias != none;
          score += bias;
        }
      }
      score = A::select(seen, score, none);
      hidden |= ~seen;
      top[c] = A::max(score, top[c]);
      A::store(scores + at, score);
      A::store(visible + at, (F)seen);
    }
  }
  return A::any(hidden);
}

}  // namespace
}  // namespace multihead
