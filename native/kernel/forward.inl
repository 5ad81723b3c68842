// Attention of a block of query rows over keys and values: the (Q,K) scores exist one tile at a time.
#pragma once

#include "awaited.inl"
#include "product.inl"
#include "scores.inl"
#include "statistics.inl"
#include "strip.inl"
#include "tile.inl"
#include "weights.inl"

namespace multihead {
namespace {

// Scores of the vectors from First on.
template <class A, int NR, int First = 0>
struct ScoreGroups {
  using T = typename A::T;
  using F = typename A::F;
  const T* k;
  index stride;
  const T* q;
  index depth;
  T* scores;
  F top[NR];
  Awaited<A::NR * A::W, false>* awaited = nullptr;  // queries of the next rows

  template <int MR>
  inline __attribute__((always_inline)) void group(index i) {
    if (awaited) awaited->ask();
    F sum[MR][NR];
    accumulate<A, MR, NR, true, First>(k + i * stride, stride, q, depth, sum);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int c = First; c < NR; ++c) {
        A::store(scores + ((i + r) * NR + c) * A::W, sum[r][c]);
        top[c] = A::max(sum[r][c], top[c]);
      }
  }
};

// `Clipped`: a vector's sums end where the keys that it sees end.
template <class A, int NR, bool Clipped = false>
struct MixGroups {
  using T = typename A::T;
  using F = typename A::F;
  const T* v;
  index stride;
  const T* weights;
  index depth;
  T* mixed;
  F decay[NR];
  index until[NR] = {};                            // if Clipped: the keys of each vector and those before it
  Awaited<A::NR * A::W, true>* awaited = nullptr;  // rows of the output

  template <int MR>
  inline __attribute__((always_inline)) void group(index i) {
    if (awaited) awaited->ask();
    F sum[MR][NR];
    accumulate<A, MR, NR, false>(v + i, stride, weights, Clipped ? until[0] : depth, sum);
    if constexpr (Clipped && NR > 1)
      accumulate_more<A, MR, NR, false, 1>(v + i, stride, weights, until[0], until[1], sum);
    if constexpr (Clipped && NR > 2)
      accumulate_more<A, MR, NR, false, 2>(v + i, stride, weights, until[1], until[2], sum);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < NR; ++c) {
        T* at = mixed + ((i + r) * NR + c) * A::W;
        A::store(at, A::fma(A::load(at), decay[c], sum[r][c]));
      }
  }
};

template <class A>
class Forward {
 public:
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  static constexpr int W = A::W, Lanes = A::NR * A::W;

  // Rows a task may have: enough to reuse a tile of keys from the second-level cache, and few enough to stay there.
  static index block_rows(const Sizes& sizes) {
    const index width = sizes.D > sizes.V ? sizes.D : sizes.V;
    const index strips = width <= 160 ? 96 / Lanes : width <= 320 ? 48 / Lanes : 1;
    return Lanes * (strips < 1 ? 1 : strips);
  }

  // Numbers in a row of scratch: of a query, a value, or a tile of dense mask.
  static index row_width(const Sizes& s) {
    const index width = s.D > s.V ? s.D : s.V;
    return width > tile_keys ? width : tile_keys;
  }

  static index scratch_bytes(const Plan& plan) {
    const Sizes& s = plan.sizes;
    const index strips = block_rows(s) / Lanes;
    const index numbers =
        strips * Lanes * (s.D + s.V + 3) + tile_keys * (3 * Lanes + s.D + s.V) + W * row_width(s) + Lanes;
    const index kept = plan.weights.data ? strips * (Lanes * s.K * static_cast<index>(sizeof(T)) + 64) : 0;
    const index watching = plan.statistics.wanted() ? strips * (Observer<A>::bytes(plan.statistics) + 128) : 0;
    return kept + watching + numbers * static_cast<index>(sizeof(T)) + (strips * 5 + 8) * 64 +
           strips * static_cast<index>(sizeof(Strip<A>));
  }

  static void run(const Plan& plan, const Task& task, void* scratch) { Forward(plan, task, scratch).attend(); }

 private:
  const Plan& plan;
  const Task& task;
  Strip<A>* strips;
  Observer<A>* observers;  // one for each strip, where statistics are wanted
  int count = 0;
  T *scores, *staged, *visible, *k_copy, *v_copy, *rowwise, *factor;
  const T *k_rows, *v_rows;
  index k_stride, v_stride;
  T unit;  // what turns a score into a power of two
  Awaited<Lanes, false> queries;
  Awaited<Lanes, true> outputs;

  Forward(const Plan& p, const Task& t, void* scratch) : plan(p), task(t) {
    const Sizes& s = plan.sizes;
    Arena arena{static_cast<char*>(scratch)};
    scores = arena.take<T>(tile_keys * Lanes);
    staged = arena.take<T>(tile_keys * Lanes);
    visible = arena.take<T>(tile_keys * Lanes);
    factor = arena.take<T>(Lanes);
    rowwise = arena.take<T>(W * row_width(s));
    k_copy = arena.take<T>(tile_keys * s.D);
    v_copy = arena.take<T>(tile_keys * s.V);
    strips = arena.take<Strip<A>>(block_rows(s) / Lanes);
    for (index row = 0; row < task.rows; row += Lanes) {
      Strip<A>& strip = strips[count++];
      strip.begun = false;
      strip.row = task.row + row;
      strip.rows = static_cast<int>(task.rows - row < Lanes ? task.rows - row : Lanes);
      strip.nr = (strip.rows + W - 1) / W;
      strip.q = arena.take<T>(s.D * strip.nr * W);
      strip.mixed = arena.take<T>(s.V * strip.nr * W);
      strip.top = arena.take<T>(Lanes);
      strip.total = arena.take<T>(Lanes);
      strip.kept = plan.weights.data ? arena.take<T>(s.K * strip.nr * W) : nullptr;
    }
    unit = score_unit<T>(plan);
    if (!plan.statistics.wanted()) return;
    observers = arena.take<Observer<A>>(count);
    for (int i = 0; i < count; ++i) observers[i].begin(plan.statistics, arena);
  }

  void attend() {
    index first = task.key + task.keys, last = task.key;
    for (int i = 0; i < count; ++i) {
      strips[i].bound(plan, task);
      if (strips[i].first < strips[i].last) {
        first = strips[i].first < first ? strips[i].first : first;
        last = strips[i].last > last ? strips[i].last : last;
      }
    }
    const bool crowds = task.rows >= Lanes;  // enough rows to pay for a copy
    for (index tile = first / tile_keys * tile_keys; tile < last; tile += tile_keys) {
      const index from = tile > first ? tile : first, to = tile + tile_keys < last ? tile + tile_keys : last;
      k_rows = rows_of(plan.k, plan, task.b, task.g, plan.sizes.D, from, to - from, k_copy, k_stride, crowds);
      v_rows = rows_of(plan.v, plan, task.b, task.g, plan.sizes.V, from, to - from, v_copy, v_stride, crowds);
      for (int i = 0; i < count; ++i) {
        Strip<A>& strip = strips[i];
        const index low = strip.first > from ? strip.first : from, high = strip.last < to ? strip.last : to;
        if (low >= high) continue;
        queries.clear(), outputs.clear();
        if (!strip.begun) {
          begin(i);
          await_queries_after(strip, high - low);
        }
        if (high == strip.last && !task.partial) await_outputs(strip);
        const T* k = k_rows + (low - from) * k_stride;
        const T* v = v_rows + (low - from) * v_stride;
        if (strip.nr == A::NR)
          mix<A::NR>(strip, low, high - low, k, v);
        else if (strip.nr == 1)
          mix<1>(strip, low, high - low, k, v);
        else
          mix<(A::NR > 2 ? 2 : 1)>(strip, low, high - low, k, v);
      }
    }
    for (int i = 0; i < count; ++i) {
      if (!strips[i].begun) begin(i);
      task.partial ? leave(strips[i]) : finish(strips[i]);
    }
  }

  void begin(int i) {
    strips[i].begin(plan, task, rowwise);
    if (plan.given)
      for (int lane = 0; lane < strips[i].nr * W; ++lane)
        strips[i].top[lane] = Ending<T>::load(plan, task.b, strips[i].head[lane], strips[i].query[lane]).top;
  }

  // The queries of the strip that begins next, of this task or of the one that follows, while `keys` keys are scored.
  void await_queries_after(const Strip<A>& strip, index keys) {
    const Task* of = &task;
    index row = strip.row + strip.rows;
    if (row >= task.row + task.rows) {
      if (!task.next) return;
      of = task.next, row = of->row;
    }
    const index group = plan.sizes.group(), left = of->row + of->rows - row;
    index q = row / group, h = of->g * group + row % group;
    for (index i = 0; i < left && i < Lanes; ++i) {
      queries.add(row_of(plan.q, plan.type, of->b, h, q));
      if (++h == (of->g + 1) * group) h -= group, ++q;
    }
    queries.spread(plan.sizes.D * bytes(plan.type), keys / A::MR(A::NR));
  }

  // The rows of the output that this strip is written to, while its last values are mixed.
  void await_outputs(const Strip<A>& strip) {
    for (int lane = 0; lane < strip.rows; ++lane)
      outputs.add(row_of(plan.out, plan.type, task.b, strip.head[lane], strip.query[lane]));
    outputs.spread(plan.sizes.V * bytes(plan.type), plan.sizes.V / A::MR(A::NR));
  }

  template <int NR>
  void mix(Strip<A>& strip, index key, index keys, const T* k, const T* v) {
    Seen dense = Seen::all;
    if (plan.allowed.data) dense = classify(plan, task, strip, key, keys);
    T* kept = strip.kept ? strip.kept + (key - strip.first) * NR * W : nullptr;
    if (dense == Seen::none) {
      for (index i = 0; kept && i < keys * NR * W; ++i) kept[i] = -__builtin_inff();
      return;
    }
    const index sure = plan.plain() && key >= strip.common ? within(strip.uncommon - key, keys) : 0;  // every lane sees
    F top[NR], unsure[NR];
    for (int c = 0; c < NR; ++c) top[c] = A::all(-__builtin_inff());
    if (sure) score<NR, 0>(strip, 0, sure, k, top);
    bool hidden = false, poisoned = false;  // some lane does not see a key; nor a value that is not finite
    if (sure < keys) {
      score_clipped<NR, 0>(strip, key, sure, keys, k, unsure);
      const Adjustment with{dense == Seen::some, staged, visible, rowwise};
      hidden = adjust<A, NR>(plan, task, strip, key, sure, keys, with, scores, top);
      poisoned = hidden && !hidden_finite(strip, key, keys, v, dense == Seen::some || plan.bias.data);
      if (poisoned || plan.given) std::memset(visible, 0xff, sizeof(T) * static_cast<std::size_t>(sure * NR * W));
    }
    Observer<A>* observer = plan.statistics.wanted() ? observers + (&strip - strips) : nullptr;
    if (plan.statistics.count) observer->template rank<NR>(plan.statistics, key, keys, scores, top);
    if (plan.given) {
      if (plan.statistics.entropy || plan.statistics.mass)
        observer->template add_given<NR>(strip, key, keys, scores, unit, hidden ? visible : nullptr);
      return;
    }
    if (kept) std::memcpy(kept, scores, sizeof(T) * static_cast<std::size_t>(keys * NR * W));
    F decay[NR];
    if (plan.statistics.entropy)
      weigh<NR, true>(strip, observer, key, keys, top, decay);
    else
      weigh<NR, false>(strip, observer, key, keys, top, decay);
    if (plan.dropout > 0) drop(plan, task, strip, key, keys, scores);
    if (poisoned)
      mix_seen<A, NR>(plan.sizes.V, strip.mixed, keys, scores, visible, v, v_stride, decay);
    else if (strip.until[0] < key + keys)
      mix_groups<NR, true>(strip, key, keys, v, decay);
    else
      mix_groups<NR, false>(strip, key, keys, v, decay);
  }

  // n, or the nearest of 0…most.
  static index within(index n, index most) { return n < 0 ? 0 : n > most ? most : n; }

  // Scores of the keys [from, to) of a tile for the vectors from First on; `top` becomes the largest of each lane.
  template <int NR, int First>
  void score(const Strip<A>& strip, index from, index to, const T* k, F (&top)[NR]) {
    ScoreGroups<A, NR, First> groups{k + from * k_stride,    k_stride, strip.q, plan.sizes.D,
                                     scores + from * NR * W, {},       &queries};
    for (int c = First; c < NR; ++c) groups.top[c] = top[c];
    in_groups<A::MR(NR - First)>(to - from, groups);
    for (int c = First; c < NR; ++c) top[c] = groups.top[c];
  }

  // The same, where a vector whose keys have ended is left out.
  template <int NR, int First>
  void score_clipped(const Strip<A>& strip, index key, index from, index to, const T* k, F (&top)[NR]) {
    const index end = within(strip.until[First] - key, to);
    if (from < end) score<NR, First>(strip, from, end, k, top), from = end;
    if constexpr (First + 1 < NR)
      if (from < to) score_clipped<NR, First + 1>(strip, key, from, to, k, top);
  }

  template <int NR, bool Clipped>
  void mix_groups(const Strip<A>& strip, index key, index keys, const T* v, const F (&decay)[NR]) {
    MixGroups<A, NR, Clipped> into{v, v_stride, scores, keys, strip.mixed, {}, {}, &outputs};
    for (int c = 0; c < NR; ++c) into.decay[c] = decay[c], into.until[c] = within(strip.until[c] - key, keys);
    in_groups<A::MR(NR)>(plan.sizes.V, into);
  }

  // Whether the values of a tile that may be hidden from some lane are finite.
  bool hidden_finite(const Strip<A>& strip, index key, index keys, const T* v, bool anywhere) {
    const index end = key + keys, V = plan.sizes.V;
    if (anywhere || strip.common >= strip.uncommon) return finite<A>(v, v_stride, V, keys);
    const index before = strip.common < key ? 0 : strip.common > end ? keys : strip.common - key;
    const index after = strip.uncommon > end ? 0 : strip.uncommon < key ? keys : end - strip.uncommon;
    return finite<A>(v, v_stride, V, before) && finite<A>(v + (keys - after) * v_stride, v_stride, V, after);
  }

  // Scores become weights 2^((score - top) * unit); `decay` is what the older sums shrink by.
  template <int NR, bool Spread>
  inline __attribute__((always_inline)) void weigh(Strip<A>& strip, Observer<A>* observer, index key, index keys,
                                                   const F (&tile_top)[NR], F (&decay)[NR]) {
    const PowersOfTwo<A> weight_of(unit);
    const F none = A::all(-__builtin_inff());
    F from[NR], sum[NR], spread[NR], moved[NR];
#pragma GCC unroll 4
    for (int c = 0; c < NR; ++c) {
      const F before = A::load(strip.top + c * W), top = A::max(tile_top[c], before);
      A::store(strip.top + c * W, top);
      from[c] = A::select(top == none, F{}, top);  // nothing seen yet: -inf - -inf must not arise
      decay[c] = weight_of(before - from[c]);
      if (Spread) moved[c] = A::select(before == none, F{}, weight_of.power(before - from[c]));
    }
    add_up<A, NR, Spread>(key, keys, scores, weight_of, from, sum, spread);
    if (Spread) observer->template spread_out<NR>(strip, spread, moved, decay);
#pragma GCC unroll 4
    for (int c = 0; c < NR; ++c) {
      T* at = strip.total + c * W;
      A::store(at, A::fma(A::load(at), decay[c], sum[c]));
    }
  }

  // Normalises and writes the rows: weights divide by their sum, with the sink in it.
  void finish(Strip<A>& strip) {
    for (int lane = 0; lane < strip.nr * W; ++lane) {
      const index h = strip.head[lane];
      const T top = strip.top[lane], total = strip.total[lane];
      const Ending<T> end =
          plan.given ? Ending<T>::load(plan, task.b, h, strip.query[lane]) : ending<T>(plan, h, top, total);
      factor[lane] = end.factor;
      if (lane >= strip.rows) continue;
      end.save(plan, task.b, h, strip.query[lane]);
      if (plan.statistics.wanted())
        observers[&strip - strips].write(plan, task.b, h, strip.query[lane], lane, end, total, unit);
    }
    strip.write(strip.mixed, plan.sizes.V, plan.type, factor, rowwise, [&](int lane) -> void* {
      return row_of(plan.out, plan.type, task.b, strip.head[lane], strip.query[lane]);
    });
    if (!strip.kept || !strip.begun) return;
    if (strip.nr == A::NR)
      write_weights<A::NR>(strip);
    else if (strip.nr == 1)
      write_weights<1>(strip);
    else
      write_weights<(A::NR > 2 ? 2 : 1)>(strip);
  }

  // The weights of the scores that were kept, now that the rows' sums are known: `factor` is what they end with.
  template <int NR>
  void write_weights(const Strip<A>& strip) {
    const PowersOfTwo<A> weight_of(unit);
    const F none = A::all(-__builtin_inff());
    F from[NR], by[NR];
    for (int c = 0; c < NR; ++c) {
      const F top = A::load(strip.top + c * W);
      from[c] = A::select(top == none, F{}, top);
      by[c] = A::load(factor + c * W);
    }
    for (int lane = 0; lane < NR * W; ++lane) factor[lane] = 1;
    for (index key = strip.first; key < strip.last; key += tile_keys) {
      const index keys = strip.last - key < tile_keys ? strip.last - key : tile_keys;
      const T* kept = strip.kept + (key - strip.first) * NR * W;
      for (index i = 0; i < keys; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < NR; ++c) {
          const F score = A::load(kept + (i * NR + c) * W);
          A::store(scores + (i * NR + c) * W, A::select(score == none, F{}, weight_of(score - from[c]) * by[c]));
        }
      const Type own = sizeof(T) == 8 ? Type::f64 : Type::f32;
      strip.write(scores, keys, own, factor, rowwise, [&](int lane) -> void* {
        return reinterpret_cast<T*>(row_of(plan.weights, own, task.b, strip.head[lane], strip.query[lane])) + key;
      });
    }
  }

  // Leaves the sums of these keys for `merge`: per row V numbers, then top and total.
  void leave(Strip<A>& strip) {
    const index V = plan.sizes.V;
    T* partial = static_cast<T*>(task.partial) + (strip.row - task.row) * (V + 2);
    for (int lane = 0; lane < strip.nr * W; ++lane) factor[lane] = 1;
    for (int lane = 0; lane < strip.rows; ++lane) {
      partial[lane * (V + 2) + V] = strip.top[lane];
      partial[lane * (V + 2) + V + 1] = strip.total[lane];
    }
    const Type own = sizeof(T) == 8 ? Type::f64 : Type::f32;
    strip.write(strip.mixed, V, own, factor, rowwise, [&](int lane) -> void* { return partial + lane * (V + 2); });
  }
};

}  // namespace
}  // namespace multihead
