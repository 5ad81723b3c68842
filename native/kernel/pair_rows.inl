// Rows of halves for an instruction that adds up products of pairs: in pairs along their width as they lie, where each
// meets lanes, and two rows interleaved, where weighed rows are added up.
#pragma once

#include "kernel/operands.inl"
#include "kernel/rows.inl"

namespace multihead {
namespace {

// The lanes' rows of a view of halves turned into to[(width + 1) / 2][lanes], pairs along the width.
template <class Pairs>
void pack_pairs(const Strip<typename Pairs::A>& strip, const View& view, index b, index width,
                typename Pairs::Item* to) {
  using A = typename Pairs::A;
  const index lanes = strip.nr * A::W, whole = width / 2;
  const typename A::T* source[A::W];
  for (int c = 0; c < strip.nr; ++c) {
    for (int i = 0; i < A::W; ++i) {
      const int lane = c * A::W + i;
      source[i] =
          reinterpret_cast<const typename A::T*>(row_of(view, Type::bf16, b, strip.head[lane], strip.query[lane]));
    }
    pack_vector<A>(source, whole, lanes, reinterpret_cast<typename A::T*>(to) + c * A::W);
    if (width % 2)
      for (int i = 0; i < A::W; ++i) {
        typename Pairs::Half last;
        std::memcpy(&last, reinterpret_cast<const char*>(source[i]) + 4 * whole, sizeof last);
        to[whole * lanes + c * A::W + i] = last;
      }
  }
}

template <class Pairs>
class PairRows {
 public:
  using Product = Pairs;
  using A = typename Pairs::A;
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  using Item = typename Pairs::Item;
  using Half = typename Pairs::Half;
  static constexpr index tile_pairs = tile_keys / 2;  // a tile starts at an even row
  static constexpr index panel_items = tile_pairs * A::NR * A::W;

  static index items(index width) { return (width + 1) / 2; }
  static index scratch_bytes(index width, Use use) {
    const index scored = use == Use::mixed ? 0 : tile_keys * items(width), mixed = use == Use::scored ? 0 : tile_pairs;
    return (scored + mixed * width) * static_cast<index>(sizeof(Item)) + 2 * 64;
  }

  PairRows(index width, Use use, Arena& arena)
      : width_(width),
        copy_(use == Use::mixed ? nullptr : arena.take<Item>(tile_keys * items(width))),
        pairs_(use == Use::scored ? nullptr : arena.take<Item>(tile_pairs * width)) {}

  static void pack(const Strip<A>& strip, const View& view, Type, index b, index width, T*, Item* to) {
    pack_pairs<Pairs>(strip, view, b, width, to);
  }

  void read(const View& view, const Plan& plan, index b, index head, index from, index to, bool may_copy) {
    first_ = from, base_ = from / 2 * 2, row_ = view.row;
    halves_ = reinterpret_cast<const Half*>(row_of(view, plan.type, b, head, from));
    if (copy_) read_scored(from, to, may_copy);
    if (pairs_) interleave(from, to);
  }

  const Item* at(index row) const { return rows_ + (row - first_) * stride_; }
  index stride() const { return stride_; }

  // Weights of rows [row, row + count) in pairs that start at even rows, with 0 for what is not in the run.
  template <int NR>
  Mixing<Item> mixing(index row, index count, const T* weights, Item* panel) const {
    const index before = row % 2, pairs = pairs_in(row, count);
    for (index p = 0; p < pairs; ++p) {
      const index i = 2 * p - before;
#pragma GCC unroll 4
      for (int c = 0; c < NR; ++c) {
        const F low = i >= 0 ? A::load(weights + (i * NR + c) * A::W) : F{};
        const F high = i + 1 < count ? A::load(weights + ((i + 1) * NR + c) * A::W) : F{};
        Pairs::store_pairs(low, high, panel + (p * NR + c) * A::W);
      }
    }
    return {pairs_ + (row - base_) / 2 * width_, width_, panel, pairs};
  }

  static index pairs_in(index row, index count) { return (row % 2 + count + 1) / 2; }

  // Of the whole tile: a pair may reach beyond a run of rows.
  bool finite() const { return finite_; }

  // Numbers that are not finite are 0 in the pairs: adds what those that a lane sees give.
  template <int NR>
  void add_not_finite(index row, index count, const T* weights, const T* visible, T* to) const {
    for (index i = 0; i < count; ++i) {
      const Half* numbers = half_row(row + i);
      for (index j = 0; j < width_; ++j) {
        if (!Pairs::special(numbers[j])) continue;
        const F x = A::all(Pairs::number(numbers[j]));
        for (int c = 0; c < NR; ++c) {
          const index at = (i * NR + c) * A::W;
          T* sum = to + (j * NR + c) * A::W;
          const F before = A::load(sum), after = A::fma(x, A::load(weights + at), before);
          A::store(sum, A::select((I)A::load(visible + at), after, before));
        }
      }
    }
  }

  // See OwnRows.
  template <int NR>
  void gather(index row, index count, const T* by, bool hidden, T* visible, Item* panel, T* to) {
    if (!finite_) {
      if (!hidden) std::memset(visible, 0xff, sizeof(T) * static_cast<std::size_t>(count * NR * A::W));
      add_not_finite<NR>(row, count, by, visible, to);
    }
    const Mixing<Item> with = mixing<NR>(row, count, by, panel);
    MixGroups<Pairs, NR> into{with.values, with.stride, with.weights, with.depth, to, {}};
    for (int c = 0; c < NR; ++c) into.decay[c] = A::all(1);
    in_groups<A::MR(NR)>(width_, into);
  }

 private:
  index width_, first_, base_, row_, stride_;
  Item *copy_, *pairs_;
  const Half* halves_;
  const Item* rows_;
  bool finite_ = true;

  const Half* half_row(index row) const { return halves_ + (row - first_) * row_; }

  // Rows as they lie, or copied where pairs would reach beyond a row, or where rows lie far apart.
  void read_scored(index from, index to, bool may_copy) {
    const index bytes = row_ * static_cast<index>(sizeof(Half));
    const bool far = may_copy && (bytes >= far_apart || bytes <= -far_apart);
    if (width_ % 2 == 0 && row_ % 2 == 0 && !far) {
      rows_ = reinterpret_cast<const Item*>(halves_), stride_ = row_ / 2;
      return;
    }
    rows_ = copy_, stride_ = items(width_);
    for (index row = from; row < to; ++row) {
      Item* copy = copy_ + (row - from) * stride_;
      if (width_ % 2) copy[stride_ - 1] = 0;
      std::memcpy(copy, half_row(row), sizeof(Half) * static_cast<std::size_t>(width_));
    }
  }

  void interleave(index from, index to) {
    finite_ = true;
    for (index row = base_; row < to; row += 2) {
      const Half *low = row < from ? nullptr : half_row(row), *high = row + 1 < to ? half_row(row + 1) : nullptr;
      finite_ &= Pairs::interleave(low, high, width_, pairs_ + (row - base_) / 2 * width_);
    }
    if (!finite_) Pairs::clean(pairs_, (to - base_ + 1) / 2 * width_);
  }
};

}  // namespace
}  // namespace multihead
