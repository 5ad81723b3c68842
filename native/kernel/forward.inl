// Attention of a block of query rows over keys and values: the (Q,K) scores exist one tile at a time.
#pragma once

#include "kernel/blocks.inl"
#include "kernel/groups.inl"
#include "kernel/operands.inl"
#include "kernel/scores.inl"
#include "kernel/statistics.inl"
#include "kernel/strip.inl"
#include "kernel/tile.inl"
#include "kernel/weights.inl"

namespace multihead {
namespace {

template <class Operands>
class Forward {
 public:
  using M = typename Operands::Product;
  using A = typename M::A;
  using Item = typename M::Item;
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  static constexpr int W = A::W, Lanes = A::NR * A::W;

  static index scratch_bytes(const Plan& plan) {
    const Sizes& s = plan.sizes;
    const index strips = block_rows<A>(s) / Lanes;
    const index numbers = strips * Lanes * (s.V + 3) + tile_keys * 3 * Lanes + W * row_width(s) + Lanes;
    const index kept = plan.weights.data ? strips * (Lanes * s.K * static_cast<index>(sizeof(T)) + 64) : 0;
    const index watching = plan.statistics.wanted() ? strips * (Observer<A>::bytes(plan.statistics) + 128) : 0;
    const index operands =
        Operands::scratch_bytes(s) + strips * Lanes * Operands::query_items(s) * static_cast<index>(sizeof(Item));
    return kept + watching + operands + numbers * static_cast<index>(sizeof(T)) + (strips * 5 + 10) * 64 +
           strips * static_cast<index>(sizeof(Strip<A>));
  }

  static void run(const Plan& plan, const Task& task, void* scratch) { Forward(plan, task, scratch).attend(); }

 private:
  const Plan& plan;
  const Task& task;
  Strip<A>* strips;
  Observer<A>* observers;  // one for each strip, where statistics are wanted
  int count = 0;
  Arena arena;
  Operands operands;
  Item** panels;  // the queries of each strip, in lanes
  T *scores, *staged, *visible, *rowwise, *factor;
  T unit;  // what turns a score into a power of two
  Prefetcher<Lanes, false> queries;
  Prefetcher<Lanes, true> outputs;

  Forward(const Plan& p, const Task& t, void* scratch)
      : plan(p), task(t), arena{static_cast<char*>(scratch)}, operands(p, arena) {
    const Sizes& s = plan.sizes;
    scores = arena.take<T>(tile_keys * Lanes);
    staged = arena.take<T>(tile_keys * Lanes);
    visible = arena.take<T>(tile_keys * Lanes);
    factor = arena.take<T>(Lanes);
    rowwise = arena.take<T>(W * row_width(s));
    panels = arena.take<Item*>(block_rows<A>(s) / Lanes);
    strips = arena.take<Strip<A>>(block_rows<A>(s) / Lanes);
    for (index row = 0; row < task.rows; row += Lanes) {
      Strip<A>& strip = strips[count++];
      strip.begun = false;
      strip.place(task, row);
      panels[count - 1] = arena.take<Item>(Operands::query_items(s) * strip.nr * W);
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
    KeyRange range(task);
    for (int i = 0; i < count; ++i) {
      strips[i].bound(plan, task);
      range.add(strips[i]);
    }
    range.tiles([&](index from, index to, index) {
      operands.read(task, from, to, task.rows >= Lanes);
      for (int i = 0; i < count; ++i) {
        Strip<A>& strip = strips[i];
        index low, high;
        if (!strip.clip(from, to, low, high)) continue;
        queries.clear(), outputs.clear();
        if (!strip.begun) {
          begin(i);
          prefetch_queries_after(strip, high - low);
        }
        if (high == strip.last && !task.partial) prefetch_outputs(strip);
        with_vectors<A>(strip.nr, [&](auto nr) { mix<nr.count>(strip, low, high - low); });
      }
    });
    for (int i = 0; i < count; ++i) {
      if (!strips[i].begun) begin(i);
      task.partial ? leave(strips[i]) : finish(strips[i]);
    }
  }

  void begin(int i) {
    operands.pack_queries(strips[i], task.b, rowwise, panels[i]);
    strips[i].begin(plan.sizes.V);
    if (plan.given)
      for (int lane = 0; lane < strips[i].nr * W; ++lane)
        strips[i].top[lane] = Ending<T>::load(plan, task.b, strips[i].head[lane], strips[i].query[lane]).top;
  }

  // The queries of the strip that begins next, of this task or of the one that follows, while `keys` keys are scored.
  void prefetch_queries_after(const Strip<A>& strip, index keys) {
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
  void prefetch_outputs(const Strip<A>& strip) {
    for (int lane = 0; lane < strip.rows; ++lane)
      outputs.add(row_of(plan.out, plan.type, task.b, strip.head[lane], strip.query[lane]));
    outputs.spread(plan.sizes.V * bytes(plan.type), plan.sizes.V / A::MR(A::NR));
  }

  template <int NR>
  void mix(Strip<A>& strip, index key, index keys) {
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
    if (sure) score<NR, 0>(strip, key, 0, sure, top);
    bool hidden = false, poisoned = false;  // some lane does not see a key; nor, maybe, a value that is not finite
    if (sure < keys) {
      score_clipped<NR, 0>(strip, key, sure, keys, unsure);
      const Adjustment with{dense == Seen::some, staged, visible, rowwise, nullptr, sure};
      hidden = adjust<A, NR>(plan, task, strip, key, keys, with, scores, top);
      poisoned = hidden && !hidden_finite(strip, key, keys, dense == Seen::some || plan.bias.data);
    }
    if constexpr (Operands::cleans) poisoned = !operands.finite_values(key, keys);
    if (poisoned || plan.given) std::memset(visible, 0xff, sizeof(T) * static_cast<std::size_t>(sure * NR * W));
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
    if constexpr (Operands::cleans)
      if (plan.sizes.V == 0) return;  // there is nothing to round the weights for
    if (plan.dropout > 0) drop(plan, task, strip, key, keys, scores);
    if constexpr (!Operands::cleans)
      if (poisoned) {
        operands.template mix_visible<NR>(key, keys, scores, visible, strip.mixed, decay);
        return;
      }
    if (strip.until[0] < key + keys)
      mix_groups<NR, true>(strip, key, keys, decay);
    else
      mix_groups<NR, false>(strip, key, keys, decay);
    if constexpr (Operands::cleans)
      if (poisoned) operands.template add_not_finite<NR>(key, keys, scores, visible, strip.mixed);
  }

  // n, or the nearest of 0…most.
  static index within(index n, index most) { return n < 0 ? 0 : n > most ? most : n; }

  // Scores of the keys [from, to) of a tile for the vectors from First on; `top` becomes the largest of each lane.
  template <int NR, int First>
  void score(const Strip<A>& strip, index key, index from, index to, F (&top)[NR]) {
    ScoreGroups<M, NR, First> groups{operands.keys(key + from),
                                     operands.key_stride(),
                                     panels[&strip - strips],
                                     Operands::query_items(plan.sizes),
                                     scores + from * NR * W,
                                     {},
                                     &queries};
    for (int c = First; c < NR; ++c) groups.top[c] = top[c];
    in_groups<A::MR(NR - First)>(to - from, groups);
    for (int c = First; c < NR; ++c) top[c] = groups.top[c];
  }

  // The same, where a vector whose keys have ended is left out.
  template <int NR, int First>
  void score_clipped(const Strip<A>& strip, index key, index from, index to, F (&top)[NR]) {
    const index end = within(strip.until[First] - key, to);
    if (from < end) score<NR, First>(strip, key, from, end, top), from = end;
    if constexpr (First + 1 < NR)
      if (from < to) score_clipped<NR, First + 1>(strip, key, from, to, top);
  }

  template <int NR, bool Clipped>
  void mix_groups(const Strip<A>& strip, index key, index keys, const F (&decay)[NR]) {
    const Mixing<Item> with = operands.template mixing<NR>(key, keys, scores);
    MixGroups<M, NR, Clipped> into{with.values, with.stride, with.weights, with.depth, strip.mixed, {}, {}, &outputs};
    for (int c = 0; c < NR; ++c) {
      into.decay[c] = decay[c];
      into.until[c] = Operands::items(key, within(strip.until[c] - key, keys));
    }
    in_groups<A::MR(NR)>(plan.sizes.V, into);
  }

  // Whether the values of a tile that may be hidden from some lane are finite.
  bool hidden_finite(const Strip<A>& strip, index key, index keys, bool anywhere) const {
    const index end = key + keys;
    if (anywhere || strip.common >= strip.uncommon) return operands.finite_values(key, keys);
    const index before = strip.common < key ? 0 : strip.common > end ? keys : strip.common - key;
    const index after = strip.uncommon > end ? 0 : strip.uncommon < key ? keys : end - strip.uncommon;
    return operands.finite_values(key, before) && operands.finite_values(end - after, after);
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
    with_vectors<A>(strip.nr, [&](auto nr) { write_weights<nr.count>(strip); });
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
