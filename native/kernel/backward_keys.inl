// dk and dv of a block of keys: keys in lanes, and the queries of every head of the group, a tile at a time.
#pragma once

#include "kernel/backward.inl"
#include "kernel/query_tile.inl"

namespace multihead {
namespace {

template <class Rows>
class BackwardKeys {
 public:
  using M = typename Rows::Product;
  using A = typename M::A;
  using Item = typename M::Item;
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  static constexpr int W = A::W, Lanes = A::NR * A::W;

  static index block_keys(const Sizes& s) { return block_rows<A>(s); }

  static index scratch_bytes(const Plan& plan) {
    const Sizes& s = plan.sizes;
    const index strips = block_keys(s) / Lanes;
    const index numbers = strips * Lanes * (s.D + s.V) + tile_rows * 3 * Lanes + W * row_width(s) + 2 * Lanes;
    const index items = strips * Lanes * (Rows::items(s.D) + Rows::items(s.V)) + Rows::panel_items;
    return numbers * static_cast<index>(sizeof(T)) + items * static_cast<index>(sizeof(Item)) +
           Rows::scratch_bytes(s.D, Use::both) + Rows::scratch_bytes(s.V, Use::both) + (strips * 5 + 16) * 64 +
           strips * static_cast<index>(sizeof(Piece));
  }

  static void run(const Gradients& g, const Task& task, void* scratch) { BackwardKeys(g, task, scratch).sweep(); }

 private:
  struct Piece {
    Strip<A> strip;  // its rows are keys: query[lane] is the key, head[lane] the key/value head
    index key;
    Item *k, *v;   // panels of D and of V
    T *d_k, *d_v;  // (D, lanes), (V, lanes)
  };

  const Gradients& g;
  const Plan& plan;
  const Task& task;  // key, keys: the block of keys
  Arena arena;
  Rows q, d;  // queries, and the gradients of their outputs
  Piece* pieces;
  int count = 0;
  Item* panel;
  T *scores, *weights, *visible, *rowwise, *ones, *scale;
  T unit;

  BackwardKeys(const Gradients& gradients, const Task& t, void* scratch)
      : g(gradients),
        plan(g.plan),
        task(t),
        arena{static_cast<char*>(scratch)},
        q(plan.sizes.D, Use::both, arena),
        d(plan.sizes.V, Use::both, arena) {
    const Sizes& s = plan.sizes;
    panel = arena.take<Item>(Rows::panel_items);
    for (T** tile : {&scores, &weights, &visible}) *tile = arena.take<T>(tile_rows * Lanes);
    ones = arena.take<T>(Lanes);
    scale = arena.take<T>(Lanes);
    rowwise = arena.take<T>(W * row_width(s));
    pieces = arena.take<Piece>(block_keys(s) / Lanes);
    for (int lane = 0; lane < Lanes; ++lane) ones[lane] = 1, scale[lane] = static_cast<T>(plan.scale);
    unit = score_unit<T>(plan);
    for (index key = 0; key < task.keys; key += Lanes) {
      Piece& piece = pieces[count++];
      Strip<A>& strip = piece.strip;
      piece.key = task.key + key;
      over_keys(strip, task.g, piece.key, task.keys - key);
      const index lanes = strip.nr * W;
      piece.k = arena.take<Item>(Rows::items(s.D) * lanes);
      piece.v = arena.take<Item>(Rows::items(s.V) * lanes);
      piece.d_k = arena.take<T>(s.D * lanes);
      piece.d_v = arena.take<T>(s.V * lanes);
      Rows::pack(strip, plan.k, plan.type, task.b, s.D, rowwise, piece.k);
      Rows::pack(strip, plan.v, plan.type, task.b, s.V, rowwise, piece.v);
      std::memset(piece.d_k, 0, sizeof(T) * s.D * lanes);
      std::memset(piece.d_v, 0, sizeof(T) * s.V * lanes);
    }
  }

  void sweep() {
    const Sizes& s = plan.sizes;
    const bool may_copy = task.keys >= Lanes;
    QueryTile rows;
    for (index h = task.g * s.group(); h < (task.g + 1) * s.group(); ++h)
      for (index tile = 0; tile < s.Q; tile += tile_rows) {
        if (!rows.fill(plan, task.b, h, tile, task.key, task.key + task.keys)) continue;
        q.read(plan.q, plan, task.b, h, tile, tile + rows.rows, may_copy);
        d.read(g.d_out, plan, task.b, h, tile, tile + rows.rows, may_copy);
        for (int i = 0; i < count; ++i) {
          Piece& piece = pieces[i];
          const QueryRun part = rows.over(piece.key, piece.key + piece.strip.rows);
          if (!part.count) continue;
          with_vectors<A>(piece.strip.nr, [&](auto nr) { step<nr.count>(piece, part); });
        }
      }
    for (int i = 0; i < count; ++i) {
      const Strip<A>& strip = pieces[i].strip;
      strip.write(pieces[i].d_k, s.D, plan.type, scale, rowwise,
                  [&](int lane) -> void* { return row_of(g.d_k, plan.type, task.b, task.g, strip.query[lane]); });
      strip.write(pieces[i].d_v, s.V, plan.type, ones, rowwise,
                  [&](int lane) -> void* { return row_of(g.d_v, plan.type, task.b, task.g, strip.query[lane]); });
    }
  }

  template <int NR>
  void step(Piece& piece, const QueryRun& rows) {
    constexpr int MR = A::MR(NR);
    ScoreGroups<M, NR> score{q.at(rows.query), q.stride(), piece.k, Rows::items(plan.sizes.D), scores, {}};
    in_groups<MR>(rows.count, score);
    ScoreGroups<M, NR> through{d.at(rows.query), d.stride(), piece.v, Rows::items(plan.sizes.V), weights, {}};
    in_groups<MR>(rows.count, through);

    const bool hides = rows.ragged || plan.allowed.data || plan.bias.data;
    I key[NR];
    for (int c = 0; c < NR; ++c)
      for (int i = 0; i < W; ++i) key[c][i] = static_cast<typename A::Int>(piece.strip.query[c * W + i]);
    const PowersOfTwo<A> weight_of(unit);
    const F none = A::all(-__builtin_inff());
    const F scaled = A::all(static_cast<T>(plan.scale)), cap = A::all(static_cast<T>(plan.softcap));
    const T keep = plan.dropout < 1 ? static_cast<T>(1 / (1 - plan.dropout)) : T(0);
    const std::uint32_t edge = dropout_threshold(plan.dropout);
    bool hidden = false;
    for (index r = 0; r < rows.count; ++r) {
      const index at_row = (task.b * plan.sizes.H + rows.head) * plan.sizes.Q + rows.query + r;
      const F top = A::all(static_cast<const T*>(plan.state)[2 * at_row]);
      const T* delta_factor = static_cast<const T*>(g.delta) + 2 * at_row;
      const F delta = A::all(delta_factor[0]), factor = A::all(delta_factor[1]);
      const std::uint32_t bits = plan.dropout > 0 ? dropout_row(plan.seed, task.b, rows.head, rows.query + r) : 0;
#pragma GCC unroll 4
      for (int c = 0; c < NR; ++c) {
        const index at = (r * NR + c) * W;
        F value = A::load(scores + at), slope = A::all(1), kept = A::all(1);
        I seen = ~I{};
        if (!plan.plain()) {
          value *= scaled;
          if (plan.softcap != 0) value = tanh_of<A>(value / cap, &slope) * cap;
          if (plan.allowed.data)
            seen &= across<A, std::uint8_t>(plan.allowed, piece.strip, task.b, rows.head, rows.query + r, c) != F{};
          if (plan.bias.data) {
            const F bias = across<A, T>(plan.bias, piece.strip, task.b, rows.head, rows.query + r, c);
            seen &= bias != none;
            value += bias;
          }
        }
        if (hides) {
          seen &= (key[c] >= A::all_int(static_cast<typename A::Int>(rows.start[r]))) &
                  (key[c] < A::all_int(static_cast<typename A::Int>(rows.stop[r])));
          value = A::select(seen, value, none);
        }
        const F weight = weight_of(value - top) * factor;
        if (plan.dropout > 0)
          for (int i = 0; i < W; ++i) kept[i] = mix32(bits ^ dropout_key(key[c][i])) >= edge ? keep : T(0);
        F d_score = weight * (A::load(weights + at) * kept - delta) * slope, used = weight * kept;
        if (hides) {
          d_score = A::select(seen, d_score, F{});
          used = A::select(seen, used, F{});
          hidden |= A::any(~seen);
          A::store(visible + at, (F)seen);
        }
        A::store(scores + at, d_score);
        A::store(weights + at, used);
      }
    }
    q.template gather<NR>(rows.query, rows.count, scores, hidden, visible, panel, piece.d_k);
    d.template gather<NR>(rows.query, rows.count, weights, hidden, visible, panel, piece.d_v);
  }
};

template <class Rows>
index backward_scratch(const Plan& plan) {
  const index a = BackwardQueries<Rows>::scratch_bytes(plan), b = BackwardKeys<Rows>::scratch_bytes(plan);
  return a > b ? a : b;
}

}  // namespace
}  // namespace multihead
