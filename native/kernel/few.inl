// Attention of a few query rows (decoding): bound by the reading of keys and values, so that the width of a head lies
// in the vector lanes, and each key and value is read once for all rows of the group.
#pragma once

#include "kernel/dots.inl"
#include "kernel/scores.inl"
#include "kernel/tile.inl"
#include "kernel/weights.inl"

namespace multihead {
namespace {

template <class Reader>
class Few {
 public:
  using A = typename Reader::A;
  using Number = typename Reader::Number;
  using Kept = typename Reader::Kept;
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  static constexpr int W = A::W;
  static constexpr index page_keys = 16;  // keys whose values are mixed before the next ones are read
  static constexpr int most_rows = W / 2 < 8 ? W / 2 : 8;

  static index scratch_bytes(const Plan& plan) {
    const Sizes& s = plan.sizes;
    const index numbers = most_rows * (padded(s.D) + padded(s.V) + 2 * (tile_keys + W)) + 4 * W;
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

 protected:  // FewBytes multiplies otherwise
  struct Row {
    index q, h, start, stop;
    T top, total;
  };

  const Plan& plan;
  const Task& task;
  Row row[8];
  index first, last;  // keys that some row sees
  Kept *q, *weights;  // (rows, D), and (rows, keys of a tile): `scores`, where these may be kept as they are
  T *mixed, *scores;
  T unit;

  static constexpr index line = tile_keys + W;                              // numbers of a row of scores
  static constexpr bool splits = Reader::in_twos && Reader::together == 1;  // even and odd columns are mixed apart

  static index padded(index n) { return (n + Reader::step - 1) / Reader::step * Reader::step; }

  Few(const Plan& p, const Task& t, void* scratch, int rows) : plan(p), task(t) {
    const Sizes& s = plan.sizes;
    Arena arena{static_cast<char*>(scratch)};
    q = arena.take<Kept>(rows * padded(s.D));
    mixed = arena.take<T>(rows * padded(s.V));
    scores = arena.take<T>(rows * line);
    if constexpr (Reader::together == 1)
      weights = scores;
    else
      weights = arena.take<Kept>(rows * line);
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
      Kept* lanes = q + r * padded(s.D);
      const void* from = row_of(plan.q, plan.type, task.b, h, query);
      if constexpr (sizeof(Kept) == sizeof(T))
        widen<A>(from, plan.type, s.D, lanes);
      else if (s.D)
        std::memcpy(lanes, from, sizeof(Kept) * static_cast<std::size_t>(s.D));
      for (index d = s.D; d < padded(s.D); ++d) lanes[d] = 0;
      if constexpr (splits) Reader::arrange(lanes, padded(s.D));
    }
  }

  template <int R>
  void attend() {
    for (index tile = first / tile_keys * tile_keys; tile < last; tile += tile_keys) {
      const index from = tile > first ? tile : first, to = tile + tile_keys < last ? tile + tile_keys : last;
      const index k_stride = plan.k.row, v_stride = plan.v.row;
      const auto* k = reinterpret_cast<const Number*>(row_of(plan.k, plan.kv_type, task.b, task.g, from));
      const auto* v = reinterpret_cast<const Number*>(row_of(plan.v, plan.kv_type, task.b, task.g, from));
      score<R>(k, k_stride, v, v_stride, to - from);
      T decay[R];
      bool hidden = false;
      if constexpr (sizeof(Number) == 1) scale_scores(R, from, to - from);
      for (int r = 0; r < R; ++r) hidden |= weigh(row[r], scores + r * line, from, to - from, decay[r]);
      if constexpr (sizeof(Number) == 1) scale_weights(R, from, to - from);
      if constexpr (Reader::together > 1)
        for (int r = 0; r < R; ++r) Reader::keep(scores + r * line, (to - from + W - 1) / W * W, weights + r * line);
      const bool poisoned = hidden && !all_finite<Reader>(v, v_stride, plan.sizes.V, to - from);
      for (index i = 0; i < to - from; i += page_keys) {
        const index count = to - from - i < page_keys ? to - from - i : page_keys;
        const Page page{v + i * v_stride, v_stride, weights + i, count, k + (tile_keys + i) * k_stride, k_stride};
        if (!poisoned) mix<R, false>(page, decay);
        if constexpr (Reader::together > 1)
          if (poisoned) mix<R, true>(page, decay);
        if (poisoned)
          for (int r = 0; r < R; ++r) mix_seen(row[r], r, page, scores + r * line + i, from + i, decay[r]);
        for (int r = 0; r < R; ++r) decay[r] = 1;
      }
    }
    for (int r = 0; r < task.rows; ++r) finish(r);
  }

  // scores[r][key] = q_r . k_key. The tile's values are prefetched meanwhile, and the next tile's keys while values are
  // mixed: memory delivers one of them all the time, and arithmetic never waits for what was prefetched last.
  template <int R>
  void score(const Number* k, index stride, const Number* v, index v_stride, index keys) {
    constexpr int at_once = W / R;
    const index step = padded(plan.sizes.D);
    for (index key = 0; key < keys; key += at_once) {
      const Number* from[at_once];
      for (int i = 0; i < at_once; ++i) from[i] = k + (key + i < keys ? key + i : keys - 1) * stride;
      T sums[W];
      dots<Reader, at_once, R>(from, q, step, plan.sizes.D, {v + key * v_stride, 1, v_stride}, sums);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) std::memcpy(scores + r * line + key, sums + r * at_once, sizeof(T) * at_once);
    }
  }

  const T* scales_of(const View& view, index key, T (&copy)[tile_keys + W], index keys) const {
    const auto* from = static_cast<const T*>(view.data) + task.b * view.batch + task.g * view.head + key * view.row;
    if (view.row == 1)
      std::memcpy(copy, from, sizeof(T) * static_cast<std::size_t>(keys));
    else
      for (index i = 0; i < keys; ++i) copy[i] = from[i * view.row];
    for (index i = keys; i < (keys + W - 1) / W * W; ++i) copy[i] = 0;
    return copy;
  }

  // Keys of a byte have their scale in the score.
  void scale_scores(int rows, index key, index keys) {
    T copy[tile_keys + W];
    const T* scales = scales_of(plan.k_scales, key, copy, keys);
    for (int r = 0; r < rows; ++r)
      for (index i = 0; i < keys; i += W)
        A::store(scores + r * line + i, A::load(scores + r * line + i) * A::load(scales + i));
  }

  // Values of a byte have it in the weight. Where one is not finite, those that do not see its key keep their 0.
  void scale_weights(int rows, index key, index keys) {
    T copy[tile_keys + W];
    const T* scales = scales_of(plan.v_scales, key, copy, keys);
    bool finite = true;
    for (index i = 0; i < keys; ++i) finite &= scales[i] - scales[i] == 0;
    for (int r = 0; r < rows; ++r) {
      for (index i = 0; i < keys && !finite; ++i)
        if (!seen(row[r], key + i)) copy[i] = 0;
      for (index i = 0; i < keys; i += W)
        A::store(scores + r * line + i, A::load(scores + r * line + i) * A::load(scales + i));
      if (!finite) scales_of(plan.v_scales, key, copy, keys);
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
    for (index i = keys; i < (keys + W - 1) / W * W; ++i) line[i] = none;
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

  // A run of keys: values, weights (the rows' own lie `line` apart), and what to prefetch meanwhile, row by row.
  struct Page {
    const Number* v;
    index stride;
    const Kept* weights;
    index keys;
    const Number* next;
    index next_row;
  };

  // mixed[r] = mixed[r] * decay[r] + weights[r] . v, as many vectors of the width at once as the registers hold.
  // `Clean`: values that are not finite count as 0.
  template <int R, bool Clean>
  void mix(const Page& page, const T (&decay)[R]) {
    constexpr int sums = A::MR(A::NR) * A::NR, at_once = R == 1 || sums >= 8 * R ? 8
                                                         : sums >= 4 * R         ? 4
                                                         : sums >= 2 * R         ? 2
                                                                                 : 1;
    static_assert(at_once > 1 || !Reader::in_twos, "see in_twos");
    const index j = mix_most<R, at_once, Clean>(page, 0, decay);
    if (j < plan.sizes.V) mix_columns<R, 1, Clean>(page, j, static_cast<int>(plan.sizes.V - j), decay);
  }

  // C vectors of columns at a time from j on while there are so many, then half of C, and so on: the first column left.
  template <int R, int C, bool Clean>
  inline __attribute__((always_inline)) index mix_most(const Page& page, index j, const T (&decay)[R]) {
    for (; j + C * W <= plan.sizes.V; j += C * W) mix_columns<R, C, Clean>(page, j, W, decay);
    if constexpr (C > 1)
      return mix_most<R, C / 2, Clean>(page, j, decay);
    else
      return j;
  }

  template <int R, int C, bool Clean>
  inline __attribute__((always_inline)) void mix_columns(const Page& page, index j, int width, const T (&decay)[R]) {
    constexpr index near = 64 / static_cast<index>(sizeof(Number));  // numbers that come from memory together
    F sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = F{};
    const Number *at = page.v + j, *soon = page.next + j;
    for (index i = 0; i < page.keys; i += Reader::together, at += Reader::together * page.stride) {
      typename Reader::Column x[C];
      const bool two = i + 1 < page.keys;
#pragma GCC unroll 2
      for (int t = 0; t < Reader::together; ++t, soon += page.next_row)
#pragma GCC unroll 8
        for (index c = 0; c < C * W; c += near) prefetch(soon + c);
      if constexpr (Reader::in_twos && C % 2 == 0) {
#pragma GCC unroll 4
        for (int c = 0; c < C; c += 2) Reader::values_of_two(at + c * W, page.stride, two, x[c], x[c + 1]);
      } else {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) x[c] = Reader::values(at + c * W, page.stride, two, C > 1 ? W : width);
      }
      if constexpr (Clean && Reader::together > 1)
        for (int c = 0; c < C; ++c) x[c] = Reader::cleaned(x[c]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const typename Reader::Column weight = Reader::weight(page.weights + r * line + i);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r][c] = Reader::multiply_add(weight, x[c], sum[r][c]);
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

  // A page of one row, leaving out what it does not see: there 0 * NaN would be NaN. Where `mix` has taken the finite
  // values already, only the others are left.
  void mix_seen(const Row& at, int r, const Page& page, const T* own, index key, T decay) {
    constexpr bool rest = Reader::together > 1;
    T* to = mixed + r * padded(plan.sizes.V);
    if constexpr (splits) Reader::put_in_order(to, in_twos());
    for (index j = 0; j < plan.sizes.V; ++j) {
      F sum = F{};
      for (index i = 0; i < page.keys; ++i) {
        const Number x = page.v[i * page.stride + j];
        if (seen(at, key + i) && (!rest || Reader::special(x)))
          sum = A::fma(A::all(own[i]), A::all(Reader::number(x)), sum);
      }
      to[j] = rest ? to[j] + sum[0] : A::fma(A::all(to[j]), A::all(decay), sum)[0];
    }
    if constexpr (splits) Reader::arrange(to, in_twos());
  }

  // How many columns are mixed in twos of vectors.
  index in_twos() const { return plan.sizes.V / (2 * W) * (2 * W); }

  void finish(int r) {
    const index V = plan.sizes.V;
    T* sums = mixed + r * padded(V);
    if constexpr (splits) Reader::put_in_order(sums, in_twos());
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
    narrow<A>(sums, plan.type, V, row_of(plan.out, plan.type, task.b, row[r].h, row[r].q));
  }
};

// Few, by the type of keys and values.
template <class A>
void attend_few(const Plan& plan, const Task& task, void* scratch) {
  if constexpr (sizeof(typename A::T) == 4) {
    if (plan.kv_type == Type::bf16) return Few<SplitReader<A>>::run(plan, task, scratch);
    if (plan.kv_type == Type::f16) return Few<HalfReader<A, Type::f16>>::run(plan, task, scratch);
    if (plan.kv_type == Type::i8) return Few<ByteReader<A>>::run(plan, task, scratch);
  }
  Few<OwnReader<A>>::run(plan, task, scratch);
}

}  // namespace
}  // namespace multihead
