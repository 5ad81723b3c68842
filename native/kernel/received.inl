// How much attention the keys of a block receive: keys in lanes, and the queries of each head of the group, a tile at a
// time, so that a sum runs in the order of the queries, whatever the threads.
#pragma once

#include "kernel/blocks.inl"
#include "kernel/groups.inl"
#include "kernel/query_tile.inl"
#include "kernel/rows.inl"
#include "kernel/weights.inl"

namespace multihead {
namespace {

template <class Rows>
class Received {
 public:
  using M = typename Rows::Product;
  using A = typename M::A;
  using Item = typename M::Item;
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  static constexpr int W = A::W, Lanes = A::NR * A::W;
  static constexpr index stretch = 16;  // weights added up as they are; then the sum goes to a double

  static index scratch_bytes(const Recompute& look) {
    const Sizes& s = look.plan.sizes;
    const index strips = block_rows<A>(s) / Lanes;
    const index numbers = tile_rows * Lanes + W * row_width(s);
    return numbers * static_cast<index>(sizeof(T)) + Rows::scratch_bytes(s.D, Use::scored) +
           strips *
               (Lanes * (8 + Rows::items(s.D) * static_cast<index>(sizeof(Item))) + static_cast<index>(sizeof(Piece))) +
           (2 * strips + 4) * 64;
  }

  static void run(const Recompute& look, const Task& task, void* scratch) { Received(look, task, scratch).sweep(); }

 private:
  struct Piece {
    Strip<A> strip;
    index key;
    Item* k;      // a panel of D
    double* sum;  // (lanes): many small terms
  };

  const Recompute& look;
  const Plan& plan;
  const Task& task;  // key, keys: the block of keys
  Arena arena;
  Rows q;
  Piece* pieces;
  int count = 0;
  T *scores, *rowwise;
  T unit;

  Received(const Recompute& l, const Task& t, void* scratch)
      : look(l), plan(l.plan), task(t), arena{static_cast<char*>(scratch)}, q(plan.sizes.D, Use::scored, arena) {
    const Sizes& s = plan.sizes;
    scores = arena.take<T>(tile_rows * Lanes);
    rowwise = arena.take<T>(W * row_width(s));
    pieces = arena.take<Piece>(block_rows<A>(s) / Lanes);
    unit = score_unit<T>(plan);
    for (index key = 0; key < task.keys; key += Lanes) {
      Piece& piece = pieces[count++];
      piece.key = task.key + key;
      over_keys(piece.strip, task.g, piece.key, task.keys - key);
      piece.k = arena.take<Item>(Rows::items(s.D) * piece.strip.nr * W);
      piece.sum = arena.take<double>(Lanes);
      Rows::pack(piece.strip, plan.k, plan.type, task.b, s.D, rowwise, piece.k);
    }
  }

  void sweep() {
    const Sizes& s = plan.sizes;
    QueryTile rows;
    for (index h = task.g * s.group(); h < (task.g + 1) * s.group(); ++h) {
      for (int i = 0; i < count; ++i) std::memset(pieces[i].sum, 0, sizeof(double) * Lanes);
      for (index tile = 0; tile < s.Q; tile += tile_rows) {
        if (!rows.fill(plan, task.b, h, tile, task.key, task.key + task.keys)) continue;
        q.read(plan.q, plan, task.b, h, tile, tile + rows.rows, task.keys >= Lanes);
        for (int i = 0; i < count; ++i) {
          Piece& piece = pieces[i];
          const QueryRun part = rows.over(piece.key, piece.key + piece.strip.rows);
          if (!part.count) continue;
          with_vectors<A>(piece.strip.nr, [&](auto nr) { add<nr.count>(piece, part); });
        }
      }
      T* out = static_cast<T*>(look.received) + (task.b * s.H + h) * s.K;
      for (int i = 0; i < count; ++i)
        for (int lane = 0; lane < pieces[i].strip.rows; ++lane)
          out[pieces[i].key + lane] = static_cast<T>(pieces[i].sum[lane]);
    }
  }

  template <int NR>
  void add(Piece& piece, const QueryRun& rows) {
    products<M, NR>(q.at(rows.query), q.stride(), rows.count, piece.k, Rows::items(plan.sizes.D), scores);
    for (index from = 0; from < rows.count; from += stretch) {
      const index to = from + stretch < rows.count ? from + stretch : rows.count;
      F sum[NR];
      for (int c = 0; c < NR; ++c) sum[c] = F{};
      if (plan.plain() && !rows.ragged)
        add_rows<NR, false>(piece, rows, from, to, sum);
      else
        add_rows<NR, true>(piece, rows, from, to, sum);
      T lanes[Lanes];
      for (int c = 0; c < NR; ++c) A::store(lanes + c * W, sum[c]);
      for (int lane = 0; lane < NR * W; ++lane) piece.sum[lane] += lanes[lane];
    }
  }

  // The weights of queries [from, to) of a tile, added up lane by lane. `Adjusts`: the scores are not yet what the
  // softmax sees.
  template <int NR, bool Adjusts>
  inline __attribute__((always_inline)) void add_rows(const Piece& piece, const QueryRun& rows, index from, index to,
                                                      F (&sum)[NR]) {
    const PowersOfTwo<A> weight_of(unit);
    const F none = A::all(-__builtin_inff());
    const F scaled = A::all(static_cast<T>(plan.scale)), cap = A::all(static_cast<T>(plan.softcap));
    I key[NR];
    if (Adjusts)
      for (int c = 0; c < NR; ++c)
        for (int i = 0; i < W; ++i) key[c][i] = static_cast<typename A::Int>(piece.strip.query[c * W + i]);
    for (index r = from; r < to; ++r) {
      const Ending<T> end = Ending<T>::load(plan, task.b, rows.head, rows.query + r);
      const F top = A::all(end.top), factor = A::all(end.factor);
#pragma GCC unroll 4
      for (int c = 0; c < NR; ++c) {
        F score = A::load(scores + (r * NR + c) * W);
        if (!Adjusts) {
          sum[c] = A::fma(weight_of(score - top), factor, sum[c]);
          continue;
        }
        I seen = (key[c] >= A::all_int(static_cast<typename A::Int>(rows.start[r]))) &
                 (key[c] < A::all_int(static_cast<typename A::Int>(rows.stop[r])));
        if (!plan.plain()) {
          score *= scaled;
          if (plan.softcap != 0) score = tanh_of<A>(score / cap) * cap;
          if (plan.allowed.data)
            seen &= across<A, std::uint8_t>(plan.allowed, piece.strip, task.b, rows.head, rows.query + r, c) != F{};
          if (plan.bias.data) {
            const F bias = across<A, T>(plan.bias, piece.strip, task.b, rows.head, rows.query + r, c);
            seen &= bias != none;
            score += bias;
          }
        }
        const F weight = weight_of(score - top) * factor;
        sum[c] += A::select(seen, weight, F{});
      }
    }
  }
};

}  // namespace
}  // namespace multihead
