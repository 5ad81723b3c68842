// A strip: up to NR*W query rows side by side in vector lanes, with what they have summed so far.
#pragma once

#include "convert.inl"

namespace multihead {
namespace {

template <class A>
struct Strip {
  using T = typename A::T;
  using F = typename A::F;
  using Int = typename A::Int;
  static constexpr int W = A::W, Lanes = A::NR * A::W;

  int nr = 0;             // vectors in use: the panels below are [..][nr * W]
  index row = 0;          // the first of its rows within the (b, g) pair
  int rows = 0;           // rows that exist; lanes beyond repeat the last one and are never stored
  index first, last;      // keys that some lane sees lie in [first, last)
  index common, uncommon; // keys that every lane sees lie in [common, uncommon)
  Int start[Lanes], stop[Lanes];
  T* q;                   // (D, lanes)
  T* mixed;               // (V, lanes): sum of weight times value, not yet normalised
  T* top;                 // (lanes): the largest score
  T* shift;               // (lanes): `top` in powers of two, rounded once; -inf while nothing is seen
  T* total;               // (lanes): sum of the weights

  index query(const Plan& plan, int lane) const { return at(lane) / plan.sizes.group(); }
  index head(const Plan& plan, index g, int lane) const {
    return g * plan.sizes.group() + at(lane) % plan.sizes.group();
  }

  // Which keys each lane sees within [key, key + keys).
  void bound(const Plan& plan, const Task& task) {
    const index low = task.key, high = task.key + task.keys;
    first = high, last = low, common = low, uncommon = high;
    for (int lane = 0; lane < nr * W; ++lane) {
      const index q = query(plan, lane), h = head(plan, task.g, lane);
      index from = plan.start.at(task.b, h, q), to = plan.stop.at(task.b, h, q);
      from = from < low ? low : from;
      to = to > high ? high : to;
      if (from >= to) from = to = low;
      start[lane] = static_cast<Int>(from);
      stop[lane] = static_cast<Int>(to);
      if (from < to && from < first) first = from;
      if (to > last) last = to;
      if (from > common) common = from;
      if (to < uncommon) uncommon = to;
    }
    if (first >= last) first = last = low;
  }

  // Lays the queries in lanes and empties the sums. `rowwise` has room for W rows of max(D, V) numbers.
  void begin(const Plan& plan, const Task& task, T* rowwise) {
    const index D = plan.sizes.D, lanes = nr * W;
    const T* source[W];
    for (int c = 0; c < nr; ++c) {
      for (int i = 0; i < W; ++i) {
        const int lane = c * W + i;
        const void* at = row_of(plan.q, plan.type, task.b, head(plan, task.g, lane), query(plan, lane));
        if (stored_as<T>(plan.type)) {
          source[i] = static_cast<const T*>(at);
        } else {
          widen(at, plan.type, D, rowwise + i * D);
          source[i] = rowwise + i * D;
        }
      }
      F block[W];
      index d = 0;
      for (; d + W <= D; d += W) {
        for (int i = 0; i < W; ++i) block[i] = A::load(source[i] + d);
        A::transpose(block);
        for (int i = 0; i < W; ++i) A::store(q + (d + i) * lanes + c * W, block[i]);
      }
      for (; d < D; ++d)
        for (int i = 0; i < W; ++i) q[d * lanes + c * W + i] = source[i][d];
    }
    std::memset(mixed, 0, sizeof(T) * plan.sizes.V * lanes);
    for (int lane = 0; lane < lanes; ++lane) top[lane] = shift[lane] = -__builtin_inff(), total[lane] = 0;
  }

  // Writes mixed * factor, lane by lane, into rows of V numbers: to(lane) says where, and rows of another type than T
  // go through `rowwise`.
  template <class Where>
  void write(index V, Type type, const T* factor, T* rowwise, Where&& to) const {
    const index lanes = nr * W;
    for (int c = 0; c * W < rows; ++c) {
      const int count = rows - c * W < W ? rows - c * W : W;
      T* target[W];
      for (int i = 0; i < W; ++i)
        target[i] = stored_as<T>(type) && i < count ? static_cast<T*>(to(c * W + i)) : rowwise + i * V;
      const F by = A::load(factor + c * W);
      F block[W];
      for (index v = 0; v < V; v += W) {
        const int width = V - v < W ? static_cast<int>(V - v) : W;
        for (int i = 0; i < width; ++i) block[i] = A::load(mixed + (v + i) * lanes + c * W) * by;
        for (int i = width; i < W; ++i) block[i] = F{};
        A::transpose(block);
        if (width == W)
          for (int i = 0; i < count; ++i) A::store(target[i] + v, block[i]);
        else
          for (int i = 0; i < count; ++i) A::store_some(target[i] + v, block[i], width);
      }
      if (!stored_as<T>(type))
        for (int i = 0; i < count; ++i) narrow(target[i], type, V, to(c * W + i));
    }
  }

 private:
  index at(int lane) const { return row + (lane < rows ? lane : rows - 1); }
};

}  // namespace
}  // namespace multihead
