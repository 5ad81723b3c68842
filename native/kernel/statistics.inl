// Statistics of the weights in the same pass: entropy, the n largest weights with their keys, and mass. They look at a
// tile's scores before these become weights; O(n) numbers a row, whatever the number of keys.
#pragma once

#include <math.h>

#include "kernel/tile.inl"
#include "kernel/weights.inl"

namespace multihead {
namespace {

constexpr index summed_keys = 32;  // that are summed by themselves: short sums first, and then their sum, round less

// Adds up a tile: the sum of weights 2^((score - from) * unit), which take the place of the scores. If `Spread`, also
// of weight * log2(weight).
template <class A, int NR, bool Spread>
inline __attribute__((always_inline)) void add_up(index key, index count, typename A::T* scores,
                                                  const PowersOfTwo<A>& weight_of, const typename A::F (&from)[NR],
                                                  typename A::F (&sum)[NR], typename A::F (&spread)[NR]) {
  using F = typename A::F;
#pragma GCC unroll 4
  for (int c = 0; c < NR; ++c) sum[c] = spread[c] = F{};
  for (index i = 0; i < count;) {
    F part[NR], wide[NR];
#pragma GCC unroll 4
    for (int c = 0; c < NR; ++c) part[c] = wide[c] = F{};
    for (const index end = stretch_end<summed_keys>(key, i, count); i < end; ++i) {
#pragma GCC unroll 4
      for (int c = 0; c < NR; ++c) {
        typename A::T* at = scores + (i * NR + c) * A::W;
        const F below = A::load(at) - from[c], weight = weight_of(below);
        A::store(at, weight);
        part[c] += weight;
        if (Spread) wide[c] = A::fma(weight, weight_of.power(below), wide[c]);
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < NR; ++c) sum[c] += part[c], spread[c] += wide[c];
  }
}

template <class A>
struct Observer {
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  static constexpr int W = A::W, Lanes = A::NR * A::W;

  T* spread;           // (lanes): sum of weight * log2(weight), both as if the largest were 1
  T* best;             // (lanes, n): the largest scores, a heap with the least of them first
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
  void rank(const Statistics& s, index key, index count, const T* scores, const F (&top)[NR]) {
    for (int c = 0; c < NR; ++c) {
      F least = worst(s.count, c);
      if (!A::any(top[c] > least)) continue;
      for (index i = 0; i < count; ++i) {
        const T* at = scores + (i * NR + c) * W;
        if (!A::any(A::load(at) > least)) continue;
        for (int j = 0; j < W; ++j) insert(s.count, c * W + j, at[j], key + i);
        least = worst(s.count, c);
      }
    }
  }

  // Adds a tile to `spread` before the strip's top moves by `moved` powers (0 where there was none yet) and its sums
  // shrink by `decay`.
  template <int NR>
  void spread_out(const Strip<A>& strip, const F (&tile)[NR], const F (&moved)[NR], const F (&decay)[NR]) {
    for (int c = 0; c < NR; ++c) {
      const F old = A::fma(moved[c], A::load(strip.total + c * W), A::load(spread + c * W));
      A::store(spread + c * W, A::fma(decay[c], old, tile[c]));
    }
  }

  // Adds a tile where the top is given. A row whose top is NaN still has weights of 0 where `visible` (null: it all
  // is) says so.
  template <int NR>
  void add_given(Strip<A>& strip, index key, index count, const T* scores, T unit, const T* visible) {
    const PowersOfTwo<A> weight_of(unit);
    for (int c = 0; c < NR; ++c) {
      const F top = A::load(strip.top + c * W);
      F sum = F{}, wide = F{};
      for (index i = 0; i < count;) {
        F part = F{}, part_wide = F{};
        for (const index end = stretch_end<summed_keys>(key, i, count); i < end; ++i) {
          const index at = (i * NR + c) * W;
          const F below = A::load(scores + at) - top;
          F weight = weight_of(below), product = weight * weight_of.power(below);
          if (visible) {
            const I seen = (I)A::load(visible + at);
            weight = A::select(seen, weight, F{}), product = A::select(seen, product, F{});
          }
          part += weight, part_wide += product;
        }
        sum += part, wide += part_wide;
      }
      A::store(strip.total + c * W, A::load(strip.total + c * W) + sum);
      A::store(spread + c * W, A::load(spread + c * W) + wide);
    }
  }

  // `total` is what the strip has summed up for the lane.
  void write(const Plan& plan, index b, index h, index q, int lane, const Ending<T>& end, T total, T unit) {
    const Statistics& s = plan.statistics;
    const index at = (b * plan.sizes.H + h) * plan.sizes.Q + q;
    const double f = end.factor;
    if (s.entropy) {
      const double by = plan.given ? f : 1 / (double(total) + sink_weight(plan, h, end.top));
      const double bits = by > 0 && total != 0 ? -by * (double(spread[lane]) + double(total) * log2(by)) : total * 0;
      static_cast<T*>(s.entropy)[at] = bits <= 0 ? T(0) : static_cast<T>(bits * 0.6931471805599453);
    }
    if (s.mass) static_cast<T*>(s.mass)[at] = total == 0 ? T(0) : static_cast<T>(double(total) * f);
    if (s.count) sort(lane * s.count, s.count);
    for (index i = 0; i < s.count; ++i) {
      const index from = lane * s.count + i;
      const double power = (double(best[from]) - double(end.top)) * double(unit);
      const double none = f == f ? 0 : f;
      static_cast<T*>(s.weights)[at * s.count + i] = static_cast<T>(keys[from] < 0 ? none : exp2(power) * f);
      s.keys[at * s.count + i] = keys[from];
    }
  }

 private:
  // The least of the n best of each lane.
  F worst(index n, int c) const {
    T edge[W];
    for (int i = 0; i < W; ++i) edge[i] = best[(c * W + i) * n];
    return A::load(edge);
  }

  // Takes the place of the least, unless it is no better: of equal scores the lowest key, which came first, stays.
  void insert(index n, int lane, T score, index key) {
    if (score > best[lane * n]) sink(lane * n, n, score, key);
  }

  // Puts a score where the least of a heap of n was.
  void sink(index heap, index n, T score, std::int64_t key) {
    T* scores = best + heap;
    std::int64_t* at = keys + heap;
    const auto below = [&](index i, T other, std::int64_t its) {
      return scores[i] < other || (scores[i] == other && at[i] > its);
    };
    index i = 0;
    for (index child; (child = 2 * i + 1) < n; i = child) {
      if (child + 1 < n && below(child + 1, scores[child], at[child])) ++child;
      if (!below(child, score, key)) break;
      scores[i] = scores[child], at[i] = at[child];
    }
    scores[i] = score, at[i] = key;
  }

  // The largest first.
  void sort(index heap, index n) {
    while (--n > 0) {
      const T least = best[heap], last = best[heap + n];
      const std::int64_t its = keys[heap], last_key = keys[heap + n];
      sink(heap, n, last, last_key);
      best[heap + n] = least, keys[heap + n] = its;
    }
  }
};

}  // namespace
}  // namespace multihead
