// Weights from a given state, tile by tile, for those who want to see them: as they are, or pooled into a picture.
// Queries lie in lanes, as in the forward pass, so that a score is the same number there and here.
#pragma once

#include "kernel/blocks.inl"
#include "kernel/groups.inl"
#include "kernel/rows.inl"
#include "kernel/scores.inl"
#include "kernel/weights.inl"

namespace multihead {
namespace {

template <class Rows>
class Look {
 public:
  using M = typename Rows::Product;
  using A = typename M::A;
  using Item = typename M::Item;
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  static constexpr int W = A::W, Lanes = A::NR * A::W;

  // `bins`: rows of the picture that a task may have.
  static index scratch_bytes(const Recompute& look, index bins) {
    const Sizes& s = look.plan.sizes;
    const index strips = block_rows<A>(s) / Lanes;
    const index numbers = (strips + 1) * Lanes + tile_keys * 3 * Lanes + W * row_width(s);
    return numbers * static_cast<index>(sizeof(T)) + Rows::scratch_bytes(s.D, Use::scored) +
           strips * (Lanes * Rows::items(s.D) * static_cast<index>(sizeof(Item)) + static_cast<index>(sizeof(Piece))) +
           bins * s.group() * look.width * 8 + (2 * strips + 8) * 64;
  }

  // Weights of the task's rows and keys into `look.weights`.
  static void write(const Recompute& look, const Task& task, void* scratch) {
    Look own(look, task.b, task.g, scratch);
    own.sweep(task);
  }

  // Bins [task.row, task.row + task.rows) of the queries, all of the keys, into `look.map`.
  static void pool(const Recompute& look, const Task& task, void* scratch) {
    Look(look, task.b, task.g, scratch).pool_bins(task.row, task.row + task.rows);
  }

 private:
  struct Piece {
    Strip<A> strip;
    Item* q;  // a panel of D
  };

  const Recompute& look;
  const Plan& plan;
  const index b, g;
  Arena arena;
  Rows k;
  Piece* pieces;
  T *scores, *staged, *visible, *rowwise, *ones;
  double* picture = nullptr;  // (bins, group, width)
  Bins down, across;
  index low_bin = 0, high_bin = 0;
  T unit;

  Look(const Recompute& l, index b_, index g_, void* scratch)
      : look(l),
        plan(l.plan),
        b(b_),
        g(g_),
        arena{static_cast<char*>(scratch)},
        k(plan.sizes.D, Use::scored, arena),
        down{plan.sizes.Q, l.height},
        across{plan.sizes.K, l.width} {
    const Sizes& s = plan.sizes;
    const index most = block_rows<A>(s);
    scores = arena.take<T>(tile_keys * Lanes);
    staged = arena.take<T>(tile_keys * Lanes);
    visible = arena.take<T>(tile_keys * Lanes);
    rowwise = arena.take<T>(W * row_width(s));
    pieces = arena.take<Piece>(most / Lanes);
    ones = arena.take<T>(Lanes);
    for (index i = 0; i < most / Lanes; ++i) {
      pieces[i].q = arena.take<Item>(Lanes * Rows::items(s.D));
      pieces[i].strip.top = arena.take<T>(Lanes);
    }
    for (int lane = 0; lane < Lanes; ++lane) ones[lane] = 1;
    unit = score_unit<T>(plan);
  }

  void pool_bins(index from, index to) {
    const index group = plan.sizes.group(), numbers = (to - from) * group * look.width;
    low_bin = from, high_bin = to;
    picture = arena.take<double>(numbers);
    std::memset(picture, 0, sizeof(double) * numbers);
    const index last = down.last(to - 1) * group, most = block_rows<A>(plan.sizes);
    for (index row = down.first(from) * group; row < last; row += most)
      sweep({b, g, row, last - row < most ? last - row : most, 0, plan.sizes.K, nullptr});
    const double* sum = picture;
    for (index y = from; y < to; ++y)
      for (index h = g * group; h < (g + 1) * group; ++h) {
        T* out = static_cast<T*>(look.map) + ((b * plan.sizes.H + h) * look.height + y) * look.width;
        for (index x = 0; x < look.width; ++x, ++sum) {
          const double size = double(down.last(y) - down.first(y)) * double(across.last(x) - across.first(x));
          out[x] = static_cast<T>(look.largest ? *sum : *sum / size);
        }
      }
  }

  // Every weight of the task's rows and keys that may be seen, a tile at a time.
  void sweep(const Task& task) {
    KeyRange range(task);
    int count = 0;
    for (index row = 0; row < task.rows; row += Lanes) {
      Piece& piece = pieces[count++];
      Strip<A>& strip = piece.strip;
      strip.place(task, row);
      strip.bound(plan, task);
      if (strip.first >= strip.last) continue;
      range.add(strip);
      Rows::pack(strip, plan.q, plan.type, b, plan.sizes.D, rowwise, piece.q);
      for (int lane = 0; lane < strip.nr * W; ++lane)
        strip.top[lane] = Ending<T>::load(plan, b, strip.head[lane], strip.query[lane]).top;
    }
    const bool may_copy = task.rows >= Lanes;
    range.tiles([&](index from, index to, index) {
      k.read(plan.k, plan, b, g, from, to, may_copy);
      for (int i = 0; i < count; ++i) {
        const Strip<A>& strip = pieces[i].strip;
        index low, high;
        if (!strip.clip(from, to, low, high)) continue;
        with_vectors<A>(strip.nr, [&](auto nr) { see<nr.count>(task, pieces[i], low, high - low); });
      }
    });
  }

  template <int NR>
  void see(const Task& task, const Piece& piece, index key, index keys) {
    const Strip<A>& strip = piece.strip;
    Seen dense = Seen::all;
    if (plan.allowed.data) dense = classify(plan, task, strip, key, keys);
    if (dense == Seen::none) return;
    products<M, NR>(k.at(key), k.stride(), keys, piece.q, Rows::items(plan.sizes.D), scores);
    bool hidden = false;
    if (!plan.plain() || key < strip.common || key + keys > strip.uncommon) {
      const Adjustment with{dense == Seen::some, staged, visible, rowwise};
      F top[NR];
      hidden = adjust<A, NR>(plan, task, strip, key, keys, with, scores, top);
    }
    weigh<NR>(strip, keys, hidden);
    if (!picture)
      strip.write(scores, keys, sizeof(T) == 8 ? Type::f64 : Type::f32, ones, rowwise, [&](int lane) -> void* {
        const View& to = look.weights;
        return static_cast<T*>(to.data) + b * to.batch + strip.head[lane] * to.head + strip.query[lane] * to.row + key;
      });
    else if (look.largest)
      fold<NR, true>(strip, key, keys);
    else
      fold<NR, false>(strip, key, keys);
  }

  // Scores become weights.
  template <int NR>
  void weigh(const Strip<A>& strip, index keys, bool hidden) {
    F top[NR], factor[NR];
    for (int c = 0; c < NR; ++c) {
      T lanes[W];
      for (int i = 0; i < W; ++i)
        lanes[i] = Ending<T>::load(plan, b, strip.head[c * W + i], strip.query[c * W + i]).factor;
      factor[c] = A::load(lanes);
      top[c] = A::load(strip.top + c * W);
    }
    const PowersOfTwo<A> weight_of(unit);
    for (index i = 0; i < keys; ++i)
#pragma GCC unroll 4
      for (int c = 0; c < NR; ++c) {
        T* at = scores + (i * NR + c) * W;
        F weight = weight_of(A::load(at) - top[c]) * factor[c];
        if (hidden) weight = A::select((I)A::load(visible + (i * NR + c) * W), weight, F{});  // the state may be NaN
        A::store(at, weight);
      }
  }

  // Keys whose weights are added up as they are, before the sum goes to a double: equal weights are rounded alike, and
  // a long sum of them drifts.
  static constexpr index added_keys = 16;

  // Adds a tile of weights to the bins that have some of it.
  template <int NR, bool Largest>
  void fold(const Strip<A>& strip, index key, index keys) {
    const index group = plan.sizes.group(), stop = key + keys;
    index bin[Lanes], past[Lanes];
    for (int lane = 0; lane < strip.rows; ++lane) {
      bin[lane] = down.lowest(strip.query[lane]), past[lane] = down.past(strip.query[lane]);
      if (bin[lane] < low_bin) bin[lane] = low_bin;
      if (past[lane] > high_bin) past[lane] = high_bin;
    }
    T lanes[Lanes];
    for (index x = across.lowest(key); x < across.past(stop - 1); ++x) {
      const index from = across.first(x) > key ? across.first(x) : key,
                  to = across.last(x) < stop ? across.last(x) : stop;
      for (index i = from - key; i < to - key;) {
        F found[NR];
        for (int c = 0; c < NR; ++c) found[c] = F{};  // no weight is less
        for (const index end = Largest ? to - key : stretch_end<added_keys>(key, i, to - key); i < end; ++i)
#pragma GCC unroll 4
          for (int c = 0; c < NR; ++c) {
            const F weight = A::load(scores + (i * NR + c) * W);
            if (Largest)
              found[c] = A::select((weight > found[c]) | (weight != weight), weight, found[c]);
            else
              found[c] += weight;
          }
        for (int c = 0; c < NR; ++c) A::store(lanes + c * W, found[c]);
        for (int lane = 0; lane < strip.rows; ++lane)
          for (index y = bin[lane]; y < past[lane]; ++y) {
            double& at = picture[((y - low_bin) * group + strip.head[lane] - g * group) * look.width + x];
            const double value = lanes[lane];
            if (!Largest)
              at += value;
            else if (value > at || value != value)
              at = value;
          }
      }
    }
  }
};

}  // namespace
}  // namespace multihead
