// Statistics of the weights in the same pass: entropy, and the n largest weights with their keys. They look at a tile's
// scores before these become weights; O(n) numbers a row, whatever the number of keys.
#pragma once

#include <math.h>

#include "tile.inl"
#include "weights.inl"

namespace multihead {
namespace {

template <class A>
struct Observer {
  using T = typename A::T;
  using F = typename A::F;
  static constexpr int W = A::W, Lanes = A::NR * A::W;

  T* spread;           // (lanes): sum of weight * log2(weight), both relative to the shift
  T* best;             // (lanes, n): the largest scores, falling
  std::int64_t* keys;  // (lanes, n): theirs

  static index bytes(const Statistics& s) {
    return Lanes * static_cast<index>(sizeof(T)) * (1 + s.count) + Lanes * s.count * 8 + 3 * 64;
  }

  void begin(const Statistics& s, Arena& arena) {
    spread = arena.take<T>(Lanes);
    best = arena.take<T>(Lanes * s.count);
    keys = arena.take<std::int64_t>(Lanes * s.count);
    for (int lane = 0; lane < Lanes; ++lane) spread[lane] = 0;
    for (index i = 0; i < Lanes * s.count; ++i) best[i] = -__builtin_inff(), keys[i] = -1;
  }

  // scores[count][lanes] of keys from `key` on; `top` is the tile's largest score of each lane.
  template <int NR>
  void look(const Statistics& s, const Strip<A>& strip, index key, index count, const T* scores, T unit,
            const F (&top)[NR]) {
    if (s.entropy) add_spread<NR>(strip, count, scores, unit, top);
    if (!s.count) return;
    F least[NR];
    const auto refresh = [&](int c) {
      T edge[W];
      for (int i = 0; i < W; ++i) edge[i] = best[(c * W + i) * s.count + s.count - 1];
      least[c] = A::load(edge);
    };
    for (int c = 0; c < NR; ++c) refresh(c);
    for (index i = 0; i < count; ++i)
      for (int c = 0; c < NR; ++c) {
        const T* at = scores + (i * NR + c) * W;
        if (!A::any(A::load(at) > least[c])) continue;
        for (int j = 0; j < W; ++j) insert(s.count, c * W + j, at[j], key + i);
        refresh(c);
      }
  }

  void write(const Plan& plan, index b, index h, index q, int lane, const Ending<T>& end, T total, T unit) const {
    const Statistics& s = plan.statistics;
    const index at = (b * plan.sizes.H + h) * plan.sizes.Q + q;
    if (s.entropy) {
      const double f = end.factor;
      const double bits = f > 0 ? -f * (double(spread[lane]) + double(total) * log2(f)) : f == 0 ? 0 : f;
      static_cast<T*>(s.entropy)[at] = static_cast<T>(bits * 0.6931471805599453);
    }
    for (index i = 0; i < s.count; ++i) {
      const index from = lane * s.count + i;
      const double power = double(best[from]) * double(unit) - double(end.shift);
      static_cast<T*>(s.weights)[at * s.count + i] = keys[from] < 0 ? T(0) : static_cast<T>(exp2(power) * end.factor);
      s.keys[at * s.count + i] = keys[from];
    }
  }

 private:
  template <int NR>
  void add_spread(const Strip<A>& strip, index count, const T* scores, T unit, const F (&tile_top)[NR]) {
    const F none = A::all(-__builtin_inff());
    for (int c = 0; c < NR; ++c) {
      const F top = A::max(tile_top[c], A::load(strip.top + c * W)), old = A::load(strip.shift + c * W);
      const F shift = A::select(top == none, F{}, top * A::all(unit));
      const F decay = exp2_of<A>(old - shift), moved = A::select(old == none, F{}, old - shift);
      F sum = decay * A::fma(moved, A::load(strip.total + c * W), A::load(spread + c * W));
      for (index i = 0; i < count; ++i) {
        const F power = A::fma(A::load(scores + (i * NR + c) * W), A::all(unit), -shift), weight = exp2_of<A>(power);
        sum += A::select(weight == F{}, F{}, weight * power);  // 0 * -inf is 0 here
      }
      A::store(spread + c * W, sum);
    }
  }

  // Behind its equals: of equal scores the lowest key comes first.
  void insert(index n, int lane, T score, index key) {
    T* scores = best + lane * n;
    std::int64_t* at = keys + lane * n;
    if (!(score > scores[n - 1])) return;
    index i = n - 1;
    for (; i > 0 && score > scores[i - 1]; --i) scores[i] = scores[i - 1], at[i] = at[i - 1];
    scores[i] = score, at[i] = key;
  }
};

}  // namespace
}  // namespace multihead
