// The backward pass, recomputing weights tile by tile from the saved state. Blocks of query rows own dq, blocks of keys
// own dk and dv: there are no atomic sums, and the order of every sum is fixed.
#pragma once

#include "kernel/blocks.inl"
#include "kernel/groups.inl"
#include "kernel/rows.inl"
#include "kernel/scores.inl"
#include "kernel/weights.inl"

namespace multihead {
namespace {

// dq of a block of query rows: queries in lanes, as in the forward pass. A first sweep over the keys finds what each
// row subtracts, delta = (sum of weight * d_weight) / (sum of weights) - d_lse. d_out . out is the same number in exact
// arithmetic and needs no sweep, but its rounding errors are not those of the d_weights it is subtracted from:
// gradients of peaked rows, which are small differences, were up to four times as far off as the plain
// implementation's. The weights add up to 1 only as far as scores are rounded here as in the forward pass (few rows
// take another order of summation there); dividing both by their own sum takes that out: it was up to ten times the
// plain error at scores of 100. Of a row with one weight of more than 1/2 the mean is taken of what d_weights have over
// that weight's own, so that with a weight of nearly 1 it subtracts that d_weight to the last bit, as a softmax with a
// weight of 1 does. Where weights are even, the way from one largest weight to the next would round more than it saves.
template <class Rows>
class BackwardQueries {
 public:
  using M = typename Rows::Product;
  using A = typename M::A;
  using Item = typename M::Item;
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  static constexpr int W = A::W, Lanes = A::NR * A::W;

  static index scratch_bytes(const Plan& plan) {
    const Sizes& s = plan.sizes;
    const index strips = block_rows<A>(s) / Lanes;
    const index numbers = strips * Lanes * (s.D + 7) + tile_keys * 5 * Lanes + W * row_width(s) + Lanes;
    const index items = strips * Lanes * (Rows::items(s.D) + Rows::items(s.V)) + Rows::panel_items;
    return numbers * static_cast<index>(sizeof(T)) + items * static_cast<index>(sizeof(Item)) +
           Rows::scratch_bytes(s.D, Use::both) + Rows::scratch_bytes(s.V, Use::scored) + (strips * 10 + 17) * 64 +
           strips * static_cast<index>(sizeof(Piece)) + kept_tiles(plan) * strips * slot_bytes;
  }

  static void run(const Gradients& g, const Task& task, void* scratch) { BackwardQueries(g, task, scratch).run_both(); }

 private:
  struct Piece {
    Strip<A> strip;
    Item *q, *d_out;                 // panels of D and of V
    T *d_q, *factor, *delta, *mass;  // (D, lanes), then (lanes) each
    T *peak, *base, *over;  // (lanes): the largest power so far, its d_weight, and the sum of what others have over it
  };

  const Gradients& g;
  const Plan& plan;
  const Task& task;
  Arena arena;
  Rows k, v;
  Piece* pieces;
  int count = 0;
  Item* panel;
  T *scores, *d_weights, *staged, *visible, *slope, *rowwise, *scale;
  T* kept;  // (tiles, strips, 2, keys, lanes): powers and d_weights of the first sweep, for the second
  T unit;

  // A tile of a strip, kept from one sweep to the other, saves two of the five products.
  static constexpr index slot = 2 * tile_keys * Lanes, slot_bytes = slot * static_cast<index>(sizeof(T));

  static index kept_tiles(const Plan& plan) {
    constexpr index most_bytes = 4 << 20;
    const index tiles = (plan.sizes.K + tile_keys - 1) / tile_keys;
    const index most = most_bytes / (slot_bytes * (block_rows<A>(plan.sizes) / Lanes));
    return tiles < most ? tiles : most;
  }

  BackwardQueries(const Gradients& gradients, const Task& t, void* scratch)
      : g(gradients),
        plan(g.plan),
        task(t),
        arena{static_cast<char*>(scratch)},
        k(plan.sizes.D, Use::both, arena),
        v(plan.sizes.V, Use::scored, arena) {
    const Sizes& s = plan.sizes;
    panel = arena.take<Item>(Rows::panel_items);
    for (T** tile : {&scores, &d_weights, &staged, &visible, &slope}) *tile = arena.take<T>(tile_keys * Lanes);
    scale = arena.take<T>(Lanes);
    rowwise = arena.take<T>(W * row_width(s));
    pieces = arena.take<Piece>(block_rows<A>(s) / Lanes);
    kept = arena.take<T>(kept_tiles(plan) * (block_rows<A>(s) / Lanes) * slot);
    for (int lane = 0; lane < Lanes; ++lane) scale[lane] = static_cast<T>(plan.scale);
    unit = score_unit<T>(plan);
    for (index row = 0; row < task.rows; row += Lanes) {
      Piece& piece = pieces[count++];
      Strip<A>& strip = piece.strip;
      strip.place(task, row);
      const index lanes = strip.nr * W;
      piece.q = arena.take<Item>(Rows::items(s.D) * lanes);
      piece.d_out = arena.take<Item>(Rows::items(s.V) * lanes);
      piece.d_q = arena.take<T>(s.D * lanes);
      strip.top = arena.take<T>(Lanes);
      piece.factor = arena.take<T>(Lanes);
      piece.delta = arena.take<T>(Lanes);
      piece.mass = arena.take<T>(Lanes);
      piece.peak = arena.take<T>(Lanes);
      piece.base = arena.take<T>(Lanes);
      piece.over = arena.take<T>(Lanes);
      strip.bound(plan, task);
      Rows::pack(strip, plan.q, plan.type, task.b, s.D, rowwise, piece.q);
      Rows::pack(strip, g.d_out, plan.type, task.b, s.V, rowwise, piece.d_out);
      std::memset(piece.d_q, 0, sizeof(T) * s.D * lanes);
      for (int lane = 0; lane < lanes; ++lane) {
        const index at = (task.b * s.H + strip.head[lane]) * s.Q + strip.query[lane];
        strip.top[lane] = static_cast<const T*>(plan.state)[2 * at];
        piece.factor[lane] = static_cast<const T*>(plan.state)[2 * at + 1];
        piece.delta[lane] = piece.mass[lane] = piece.peak[lane] = piece.base[lane] = 0;
        piece.over[lane] = 0;
      }
    }
  }

  void run_both() {
    sweep(false);
    for (int i = 0; i < count; ++i) {
      const Strip<A>& strip = pieces[i].strip;
      for (int lane = 0; lane < strip.rows; ++lane) {
        const index at = (task.b * plan.sizes.H + strip.head[lane]) * plan.sizes.Q + strip.query[lane];
        T &delta = pieces[i].delta[lane], &factor = pieces[i].factor[lane];
        if (factor != 0) {
          const double sink = sink_weight(plan, strip.head[lane], strip.top[lane]), base = pieces[i].base[lane];
          const double mass = double(pieces[i].mass[lane]) + sink;
          if (mass != 0) {
            const double over = pieces[i].over[lane];
            delta = static_cast<T>(2 * double(pieces[i].peak[lane]) > mass ? base + (over - base * sink) / mass
                                                                           : double(delta) / mass);
            factor = static_cast<T>(1 / mass);
          }
        }
        if (g.d_lse) delta -= static_cast<const T*>(g.d_lse)[at];
        static_cast<T*>(g.delta)[2 * at] = delta, static_cast<T*>(g.delta)[2 * at + 1] = factor;
      }
    }
    sweep(true);
    for (int i = 0; i < count; ++i) {
      const Strip<A>& strip = pieces[i].strip;
      strip.write(pieces[i].d_q, plan.sizes.D, plan.type, scale, rowwise, [&](int lane) -> void* {
        return row_of(g.d_q, plan.type, task.b, strip.head[lane], strip.query[lane]);
      });
    }
  }

  // Over the keys once: for delta, or, with delta known, for dq.
  void sweep(bool second) {
    KeyRange range(task);
    for (int i = 0; i < count; ++i) range.add(pieces[i].strip);
    const bool may_copy = task.rows >= Lanes;
    const index most_kept = kept_tiles(plan);
    range.tiles([&](index from, index to, index tile) {
      k.read(plan.k, plan, task.b, task.g, from, to, may_copy);
      v.read(plan.v, plan, task.b, task.g, from, to, may_copy);
      for (int i = 0; i < count; ++i) {
        const Strip<A>& strip = pieces[i].strip;
        index low, high;
        if (!strip.clip(from, to, low, high)) continue;
        T* keep = tile < most_kept ? kept + (tile * count + i) * slot : nullptr;
        with_vectors<A>(strip.nr, [&](auto nr) { step<nr.count>(pieces[i], low, high - low, second, keep); });
      }
    });
  }

  template <int NR>
  void step(Piece& piece, index key, index keys, bool second, T* keep) {
    constexpr int MR = A::MR(NR);
    const Strip<A>& strip = piece.strip;
    const bool adjusted = !plan.plain() || key < strip.common || key + keys > strip.uncommon;
    if (adjusted) keep = nullptr;  // what is hidden would have to be kept, too
    if (second && keep) {
      finish_kept<NR>(piece, key, keys, keep);
      return;
    }
    T *const scores = keep ? keep : this->scores, *const d_weights = keep ? keep + slot / 2 : this->d_weights;
    Seen dense = Seen::all;
    if (plan.allowed.data) dense = classify(plan, task, strip, key, keys);
    if (dense == Seen::none) return;
    ScoreGroups<M, NR> score{k.at(key), k.stride(), piece.q, Rows::items(plan.sizes.D), scores, {}};
    in_groups<MR>(keys, score);
    ScoreGroups<M, NR> through{v.at(key), v.stride(), piece.d_out, Rows::items(plan.sizes.V), d_weights, {}};
    in_groups<MR>(keys, through);
    bool hidden = false;
    if (adjusted) {
      const Adjustment with{dense == Seen::some, staged, visible, rowwise, slope};
      hidden = adjust<A, NR>(plan, task, strip, key, keys, with, scores, score.top);
    }
    if (plan.dropout > 0) drop(plan, task, strip, key, keys, d_weights);
    const PowersOfTwo<A> weight_of(unit);
    F top[NR], factor[NR], delta[NR], sum[NR], mass[NR], before[NR], peak[NR], base[NR], over[NR];
    for (int c = 0; c < NR; ++c) {
      top[c] = A::load(strip.top + c * W);
      factor[c] = A::load(piece.factor + c * W);
      delta[c] = A::load(piece.delta + c * W);
      before[c] = A::load(piece.mass + c * W);
      sum[c] = mass[c] = over[c] = F{};
      peak[c] = A::load(piece.peak + c * W);
      base[c] = A::load(piece.base + c * W);
    }
    for (index i = 0; i < keys; ++i)
#pragma GCC unroll 4
      for (int c = 0; c < NR; ++c) {
        const index at = (i * NR + c) * W;
        const F power = weight_of(A::load(scores + at) - top[c]), weight = power * factor[c];
        if (!second) {
          if (keep) A::store(scores + at, power);
          const I seen = hidden ? (I)A::load(visible + at) : ~I{};
          const F d_weight = A::load(d_weights + at);
          const F now = A::select(seen & (power > peak[c]), d_weight, base[c]);
          const F moved = A::fma(before[c] + mass[c], base[c] - now, over[c]);
          over[c] = A::select(seen, A::fma(power, d_weight - now, moved), over[c]);
          sum[c] = A::select(seen, sum[c] + power * d_weight, sum[c]);
          mass[c] = A::select(seen, mass[c] + power, mass[c]);
          peak[c] = A::select(seen, A::max(power, peak[c]), peak[c]);
          base[c] = now;
          continue;
        }
        F d_score = weight * (A::load(d_weights + at) - delta[c]);
        if (plan.softcap != 0) d_score *= A::load(slope + at);
        if (hidden) d_score = A::select((I)A::load(visible + at), d_score, F{});
        A::store(scores + at, d_score);
      }
    if (!second) {
      for (int c = 0; c < NR; ++c) {
        A::store(piece.delta + c * W, delta[c] + sum[c]);
        A::store(piece.mass + c * W, before[c] + mass[c]);
        A::store(piece.peak + c * W, peak[c]);
        A::store(piece.base + c * W, base[c]);
        A::store(piece.over + c * W, A::load(piece.over + c * W) + over[c]);
      }
      return;
    }
    k.template gather<NR>(key, keys, scores, hidden, visible, panel, piece.d_q);
  }

  // The second sweep over a tile that the first has kept; every lane sees all of it.
  template <int NR>
  void finish_kept(Piece& piece, index key, index keys, const T* keep) {
    F factor[NR], delta[NR];
    for (int c = 0; c < NR; ++c) {
      factor[c] = A::load(piece.factor + c * W);
      delta[c] = A::load(piece.delta + c * W);
    }
    for (index i = 0; i < keys; ++i)
#pragma GCC unroll 4
      for (int c = 0; c < NR; ++c) {
        const index at = (i * NR + c) * W;
        const F weight = A::load(keep + at) * factor[c];
        A::store(scores + at, weight * (A::load(keep + slot / 2 + at) - delta[c]));
      }
    k.template gather<NR>(key, keys, scores, false, visible, panel, piece.d_q);
  }
};

}  // namespace
}  // namespace multihead
