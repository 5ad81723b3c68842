// A strip: up to NR*W query rows side by side in vector lanes, with what they have summed so far.
#pragma once

#include "kernel/convert.inl"

namespace multihead {
namespace {

// A number of vectors that the compiler knows.
template <int N>
struct Vectors {
  static constexpr int count = N;
};

// Calls fn(Vectors<nr>) for the nr vectors that a strip has: NR of them, or of its last rows fewer.
template <class A, class Fn>
inline __attribute__((always_inline)) void with_vectors(int nr, Fn&& fn) {
  if (nr == A::NR)
    fn(Vectors<A::NR>());
  else if (nr == 1)
    fn(Vectors<1>());
  else
    fn(Vectors<(A::NR > 2 ? 2 : 1)>());
}

// W rows of `width` numbers turned into to[width][lanes], of which they are a vector.
template <class A>
void pack_vector(const typename A::T* const (&rows)[A::W], index width, index lanes, typename A::T* to) {
  typename A::F block[A::W];
  index d = 0;
  for (; d + A::W <= width; d += A::W) {
#pragma GCC unroll 16
    for (int i = 0; i < A::W; ++i) block[i] = A::load(rows[i] + d);
    A::transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < A::W; ++i) A::store(to + (d + i) * lanes, block[i]);
  }
  for (; d < width; ++d)
    for (int i = 0; i < A::W; ++i) std::memcpy(to + d * lanes + i, rows[i] + d, sizeof(*to));
}

template <class A>
struct Strip {
  using T = typename A::T;
  using F = typename A::F;
  using Int = typename A::Int;
  static constexpr int W = A::W, Lanes = A::NR * A::W;

  bool begun = false;
  int nr = 0;              // vectors in use: the panels below are [..][nr * W]
  index row = 0;           // the first of its rows within the (b, g) pair
  int rows = 0;            // rows that exist; lanes beyond repeat the last one and are never stored
  index first, last;       // keys that some lane sees lie in [first, last)
  index common, uncommon;  // keys that every lane sees lie in [common, uncommon)
  index until[A::NR];      // keys from here on are seen by no lane of this vector, nor of those before it
  index query[Lanes], head[Lanes];
  Int start[Lanes], stop[Lanes];
  T* mixed;  // (V, lanes): sum of weight times value, not yet normalised
  T* top;    // (lanes): the largest score, whose weight is 1 until the row ends; -inf while nothing is seen
  T* total;  // (lanes): sum of the weights
  T* kept;   // (keys, lanes): the scores from key `first` on, where weights are wanted; or null

  // Makes it the strip of the task's rows from task.row + offset on.
  void place(const Task& task, index offset) {
    row = task.row + offset;
    resize(task.rows - offset);
  }

  // So many rows, or as many of them as there are lanes.
  void resize(index count) {
    rows = static_cast<int>(count < Lanes ? count : Lanes);
    nr = (rows + W - 1) / W;
  }

  // What of the keys [from, to) some lane sees lies in [low, high); false where that is nothing.
  bool clip(index from, index to, index& low, index& high) const {
    low = first > from ? first : from, high = last < to ? last : to;
    return low < high;
  }

  // Which query and head each lane is, and which of the task's keys it sees.
  void bound(const Plan& plan, const Task& task) {
    const index low = task.key, high = task.key + task.keys;
    first = high, last = low, common = low, uncommon = high;
    const index group = plan.sizes.group();
    index q = row / group, h = task.g * group + row % group;
    for (int lane = 0; lane < nr * W; ++lane) {
      if (lane && lane < rows && ++h == (task.g + 1) * group) h -= group, ++q;
      query[lane] = q, head[lane] = h;
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
      until[lane / W] = last;
    }
    if (first >= last) first = last = low;
  }

  // Empties the sums.
  void begin(index V) {
    const index lanes = nr * W;
    begun = true;
    std::memset(mixed, 0, sizeof(T) * V * lanes);
    for (int lane = 0; lane < lanes; ++lane) top[lane] = -__builtin_inff(), total[lane] = 0;
  }

  // The lanes' rows of a view turned into to[width][lanes]. `rowwise` has room for W rows.
  void pack(const View& view, Type type, index b, index width, T* rowwise, T* to) const {
    const index lanes = nr * W;
    const T* source[W];
    for (int c = 0; c < nr; ++c) {
      for (int i = 0; i < W; ++i) {
        const int lane = c * W + i;
        const void* at = row_of(view, type, b, head[lane], query[lane]);
        if (stored_as<T>(type)) {
          source[i] = static_cast<const T*>(at);
        } else {
          widen<A>(at, type, width, rowwise + i * width);
          source[i] = rowwise + i * width;
        }
      }
      pack_vector<A>(source, width, lanes, to + c * W);
    }
  }

  // Writes from[V][lanes] * factor, lane by lane, into rows of V numbers: to(lane) says where, and rows of another type
  // than T go through `rowwise`.
  template <class Where>
  void write(const T* from, index V, Type type, const T* factor, T* rowwise, Where&& to) const {
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
        if (width == W) {
#pragma GCC unroll 16
          for (int i = 0; i < W; ++i) block[i] = A::load(from + (v + i) * lanes + c * W) * by;
        } else {
          for (int i = 0; i < W; ++i) block[i] = i < width ? A::load(from + (v + i) * lanes + c * W) * by : F{};
        }
        A::transpose(block);
        if (width == W) {
#pragma GCC unroll 16
          for (int i = 0; i < W; ++i)
            if (i < count) A::store(target[i] + v, block[i]);
        } else {
          for (int i = 0; i < count; ++i) A::store_some(target[i] + v, block[i], width);
        }
      }
      if (!stored_as<T>(type))
        for (int i = 0; i < count; ++i) narrow<A>(target[i], type, V, to(c * W + i));
    }
  }
};

}  // namespace
}  // namespace multihead
