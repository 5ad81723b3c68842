// Rows of a view, a tile at a time, as the products of attention read them: each of them against lanes, and all of
// them, weighed, added up in lanes. Another instruction for products is another such class, with Items of its own.
#pragma once

#include "kernel/groups.inl"
#include "kernel/strip.inl"
#include "kernel/tile.inl"
#include "kernel/weights.inl"

namespace multihead {
namespace {

// What a tile is read for.
enum class Use { scored, mixed, both };

// Rows of the accumulators' own type, as they lie.
template <class Arch>
class OwnRows {
 public:
  using A = Arch;
  using Product = OwnType<A>;
  using T = typename A::T;
  using F = typename A::F;
  using Item = T;
  static constexpr index panel_items = 0;  // of scratch that `gather` needs

  static index items(index width) { return width; }  // in each lane
  static index scratch_bytes(index width, Use) { return tile_keys * width * static_cast<index>(sizeof(T)) + 64; }

  OwnRows(index width, Use, Arena& arena) : width_(width), copy_(arena.take<T>(tile_keys * width)) {}

  // The lanes' rows of a view as a panel; `rowwise` has room for W rows.
  static void pack(const Strip<A>& strip, const View& view, Type type, index b, index width, T* rowwise, Item* to) {
    strip.pack(view, type, b, width, rowwise, to);
  }

  // Rows [from, to) of a head; `may_copy`: there are lanes enough to pay for a copy.
  void read(const View& view, const Plan& plan, index b, index head, index from, index to, bool may_copy) {
    first_ = from;
    rows_ = rows_of<A>({view, plan.type, b, head, width_, from, to - from}, copy_, stride_, may_copy);
  }

  const Item* at(index row) const { return rows_ + (row - first_) * stride_; }
  index stride() const { return stride_; }

  // to[width][lanes] += by[count][lanes] times the rows from `row` on. Where something is `hidden`, `visible` says from
  // which lanes, and what is not finite is left out there.
  template <int NR>
  void gather(index row, index count, const T* by, bool hidden, T* visible, Item*, T* to) {
    F one[NR];
    for (int c = 0; c < NR; ++c) one[c] = A::all(1);
    if (hidden && !finite<A>(at(row), stride_, width_, count)) {
      mix_seen<A, NR>(width_, to, count, by, visible, at(row), stride_, one);
      return;
    }
    MixGroups<Product, NR> into{at(row), stride_, by, count, to, {}};
    for (int c = 0; c < NR; ++c) into.decay[c] = one[c];
    in_groups<A::MR(NR)>(width_, into);
  }

 private:
  index width_, first_, stride_;
  T* copy_;
  const T* rows_;
};

}  // namespace
}  // namespace multihead
