// Attention of a few query rows (decoding): bound by the reading of keys and values, so that the width of a head lies
// in the vector lanes, and each key and value is read once for all rows of the group.
#pragma once

#include "dots.inl"
#include "scores.inl"
#include "tile.inl"
#include "weights.inl"

namespace multihead {
namespace {

template <class A>
class Few {
 public:
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  static constexpr int W = A::W;
  static constexpr index page = 16;  // keys whose values are mixed before the next ones are read
  static constexpr int most_rows = W / 2 < 8 ? W / 2 : 8;

  static index scratch_bytes(const Plan& plan) {
    const Sizes& s = plan.sizes;
    const index numbers = most_rows * (padded(s.D) + padded(s.V) + tile_keys + 2 * W) + tile_keys * (s.D + s.V) + 4 * W;
    return numbers * static_cast<index>(sizeof(T)) + 16 * 64;
  }

  static void run(const Plan& plan, const Task& task, void* scratch) {
    if (task.rows == 1)
      Few(plan, task, scratch, 1).template attend<1>();
    else if (task.rows == 2 || most_rows == 2)
      Few(plan, task, scratch, 2).template attend<(most_rows < 2 ? 1 : 2)>();
    else if (task.rows <= 4)
      Few(plan, task, scratch, 4).template attend<(most_rows < 4 ? 1 : 4)>();
    else
      Few(plan, task, scratch, 8).template attend<(most_rows < 8 ? 1 : 8)>();
  }

 private:
  struct Row {
    index q, h, start, stop;
    T top, total;
  };

  const Plan& plan;
  const Task& task;
  Row row[8];
  index first, last;  // keys that some row sees
  T *q, *mixed, *scores, *k_copy, *v_copy;
  T unit;

  static index padded(index n) { return (n + W - 1) / W * W; }

  Few(const Plan& p, const Task& t, void* scratch, int rows) : plan(p), task(t) {
    const Sizes& s = plan.sizes;
    Arena arena{static_cast<char*>(scratch)};
    q = arena.take<T>(rows * padded(s.D));
    mixed = arena.take<T>(rows * padded(s.V));
    scores = arena.take<T>(rows * (tile_keys + W));
    k_copy = arena.take<T>(tile_keys * s.D);
    v_copy = arena.take<T>(tile_keys * s.V);
    unit = score_unit<T>(plan);
    first = task.key + task.keys, last = task.key;
    std::memset(mixed, 0, sizeof(T) * rows * padded(s.V));
    for (int r = 0; r < rows; ++r) {
      const index at = task.row + (r < task.rows ? r : task.rows - 1);  // rows beyond repeat the last one
      const index query = at / s.group(), h = task.g * s.group() + at % s.group();
      index start = plan.start.at(task.b, h, query), stop = plan.stop.at(task.b, h, query);
      start = start < task.key ? task.key : start;
      stop = stop > task.key + task.keys ? task.key + task.keys : stop;
      if (start >= stop) start = stop = task.key;
      const T none = -__builtin_inff();
      row[r] = {query, h, start, stop, none, T(0)};
      if (start < stop) first = start < first ? start : first, last = stop > last ? stop : last;
      T* lanes = q + r * padded(s.D);
      widen(row_of(plan.q, plan.type, task.b, h, query), plan.type, s.D, lanes);
      for (index d = s.D; d < padded(s.D); ++d) lanes[d] = 0;
    }
  }

  template <int R>
  void attend() {
    for (index tile = first / tile_keys * tile_keys; tile < last; tile += tile_keys) {
      const index from = tile > first ? tile : first, to = tile + tile_keys < last ? tile + tile_keys : last;
      index k_stride, v_stride;
      const T* k = rows_of(plan.k, plan, task.b, task.g, plan.sizes.D, from, to - from, k_copy, k_stride, false);
      const T* v = rows_of(plan.v, plan, task.b, task.g, plan.sizes.V, from, to - from, v_copy, v_stride, false);
      score<R>(k, k_stride, v, v_stride, to - from);
      T decay[R];
      bool hidden = false;
      for (int r = 0; r < R; ++r) hidden |= weigh(row[r], scores + r * (tile_keys + W), from, to - from, decay[r]);
      const bool poisoned = hidden && !finite<A>(v, v_stride, plan.sizes.V, to - from);
      for (index i = 0; i < to - from; i += page) {
        const index count = to - from - i < page ? to - from - i : page;
        const T *values = v + i * v_stride, *weights = scores + i;
        if (poisoned)
          for (int r = 0; r < R; ++r)
            mix_seen(row[r], r, values, v_stride, weights + r * (tile_keys + W), from + i, count, decay[r]);
        else
          mix<R>(values, v_stride, weights, count, decay, k + (tile_keys + i) * k_stride, k_stride);
        for (int r = 0; r < R; ++r) decay[r] = 1;
      }
    }
    for (int r = 0; r < task.rows; ++r) finish(r);
  }

  // scores[r][key] = q_r . k_key. The tile's values are asked for meanwhile, and the next tile's keys while values are
  // mixed: memory delivers one of them all the time, and arithmetic never waits for what it asked for last.
  template <int R>
  void score(const T* k, index stride, const T* v, index v_stride, index keys) {
    constexpr int at_once = W / R;
    const index step = padded(plan.sizes.D);
    for (index key = 0; key < keys; key += at_once) {
      const T* from[at_once];
      for (int i = 0; i < at_once; ++i) from[i] = k + (key + i < keys ? key + i : keys - 1) * stride;
      T sums[W];
      dots<A, at_once, R>(from, q, step, plan.sizes.D, {v + key * v_stride, 1, v_stride}, sums);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        std::memcpy(scores + r * (tile_keys + W) + key, sums + r * at_once, sizeof(T) * at_once);
    }
  }

  // One row's scores of a tile become weights; returns whether a key of the tile is hidden from it.
  bool weigh(Row& at, T* line, index key, index keys, T& decay) {
    const T none = -__builtin_inff();
    bool hidden = at.start > key || at.stop < key + keys;
    if (!plan.plain()) hidden |= adjust_row(at, line, key, keys);
    const index before = at.start > key ? at.start - key : 0, after = at.stop - key;
    for (index i = 0; i < before && i < keys; ++i) line[i] = none;
    for (index i = after < 0 ? 0 : after; i < keys; ++i) line[i] = none;
    for (index i = keys; i < padded(keys); ++i) line[i] = none;
    F largest = A::all(none);
    for (index i = 0; i < keys; i += W) largest = A::max(A::load(line + i), largest);
    T top = at.top;
    for (int i = 0; i < W; ++i) top = largest[i] > top ? largest[i] : top;
    const PowersOfTwo<A> weight_of(unit);
    const T from = top == none ? T(0) : top;  // nothing seen yet: -inf - -inf must not arise
    decay = weight_of(A::all(at.top - from))[0];
    at.top = top;
    F sum = F{};
    const F tops = A::all(from);
    for (index i = 0; i < keys; i += W) {
      const F weight = weight_of(A::load(line + i) - tops);
      A::store(line + i, weight);
      sum += weight;
    }
    at.total = at.total * decay + A::sum(sum);
    if (plan.dropout > 0) {
      const std::uint32_t bits = dropout_row(plan.seed, task.b, at.h, at.q), edge = dropout_threshold(plan.dropout);
      const T keep = plan.dropout < 1 ? static_cast<T>(1 / (1 - plan.dropout)) : T(0);
      for (index i = 0; i < keys; ++i) line[i] *= mix32(bits ^ dropout_key(key + i)) >= edge ? keep : T(0);
    }
    return hidden;
  }

  bool seen(const Row& at, index key) const {
    if (key < at.start || key >= at.stop) return false;
    if (const Dense& m = plan.allowed; m.data)
      if (!static_cast<const std::uint8_t*>(m.data)[task.b * m.batch + at.h * m.head + at.q * m.query + key * m.key])
        return false;
    return !plan.bias.data || bias(at, key) != -__builtin_inff();
  }

  T bias(const Row& at, index key) const {
    const Dense& m = plan.bias;
    return static_cast<const T*>(m.data)[task.b * m.batch + at.h * m.head + at.q * m.query + key * m.key];
  }

  // Scale, softcap, bias and dense mask on one row's scores; returns whether a key is hidden.
  bool adjust_row(const Row& at, T* line, index key, index keys) const {
    bool hidden = false;
    const F cap = A::all(static_cast<T>(plan.softcap));
    for (index i = 0; i < keys; i += W) {
      F score = A::load(line + i) * A::all(static_cast<T>(plan.scale));
      if (plan.softcap != 0) score = tanh_of<A>(score / cap) * cap;
      A::store(line + i, score);
    }
    if (plan.bias.data)
      for (index i = 0; i < keys; ++i) line[i] += bias(at, key + i);
    if (plan.bias.data || plan.allowed.data)
      for (index i = 0; i < keys; ++i)
        if (!seen(at, key + i)) line[i] = -__builtin_inff(), hidden = true;
    return hidden;
  }

  // mixed[r] = mixed[r] * decay[r] + weights[r] . v, as many vectors of the width at once as the registers hold; `next`
  // is what to ask for meanwhile, row by row.
  template <int R>
  void mix(const T* v, index stride, const T* weights, index keys, const T (&decay)[R], const T* next, index next_row) {
    constexpr int sums = A::MR(A::NR) * A::NR, at_once = R == 1 || sums >= 8 * R ? 8
                                                         : sums >= 4 * R         ? 4
                                                         : sums >= 2 * R         ? 2
                                                                                 : 1;
    const index V = plan.sizes.V;
    index j = 0;
    for (; j + at_once * W <= V; j += at_once * W)
      mix_columns<R, at_once>(v, stride, weights, keys, j, W, decay, next, next_row);
    for (; j + W <= V; j += W) mix_columns<R, 1>(v, stride, weights, keys, j, W, decay, next, next_row);
    if (j < V) mix_columns<R, 1>(v, stride, weights, keys, j, static_cast<int>(V - j), decay, next, next_row);
  }

  template <int R, int C>
  inline __attribute__((always_inline)) void mix_columns(const T* v, index stride, const T* weights, index keys,
                                                         index j, int width, const T (&decay)[R], const T* next,
                                                         index next_row) {
    F sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = F{};
    const T *at = v + j, *soon = next + j;
    for (index i = 0; i < keys; ++i, at += stride, soon += next_row) {
      F x[C];
#pragma GCC unroll 8
      for (int c = 0; c < C * W; c += A::line) fetch(soon + c);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) x[c] = C > 1 || width == W ? A::load(at + c * W) : A::load_some(at, width);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F weight = A::all(weights[r * (tile_keys + W) + i]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r][c] = A::fma(weight, x[c], sum[r][c]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        T* to = mixed + r * padded(plan.sizes.V) + j + c * W;
        A::store(to, A::fma(A::load(to), A::all(decay[r]), sum[r][c]));
      }
  }

  // The same for a page of one row, leaving out what it does not see: there 0 * NaN would be NaN.
  void mix_seen(const Row& at, int r, const T* v, index stride, const T* weights, index key, index keys, T decay) {
    T* to = mixed + r * padded(plan.sizes.V);
    for (index j = 0; j < plan.sizes.V; ++j) {
      F sum = F{};
      for (index i = 0; i < keys; ++i)
        if (seen(at, key + i)) sum = A::fma(A::all(weights[i]), A::all(v[i * stride + j]), sum);
      to[j] = A::fma(A::all(to[j]), A::all(decay), sum)[0];
    }
  }

  void finish(int r) {
    const index V = plan.sizes.V;
    T* sums = mixed + r * padded(V);
    if (task.partial) {
      T* partial = static_cast<T*>(task.partial) + r * (V + 2);
      std::memcpy(partial, sums, sizeof(T) * V);
      partial[V] = row[r].top;
      partial[V + 1] = row[r].total;
      return;
    }
    const Ending<T> end = ending<T>(plan, row[r].h, row[r].top, row[r].total);
    end.save(plan, task.b, row[r].h, row[r].q);
    for (index j = 0; j < V; ++j) sums[j] *= end.factor;
    narrow(sums, plan.type, V, row_of(plan.out, plan.type, task.b, row[r].h, row[r].q));
  }
};

}  // namespace
}  // namespace multihead
