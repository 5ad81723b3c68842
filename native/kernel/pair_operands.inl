// Half-precision operands for an instruction that adds up products of pairs: queries in pairs along their width, keys
// as they lie, values and weights in pairs of keys. Scores, weights and sums are floats; a weight is rounded only where
// it is multiplied.
#pragma once

#include "kernel/linear_block.inl"
#include "kernel/operands.inl"

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
class PairOperands {
 public:
  using Product = Pairs;
  using A = typename Pairs::A;
  using T = typename A::T;
  using F = typename A::F;
  using I = typename A::I;
  using Item = typename Pairs::Item;
  using Half = typename Pairs::Half;
  static constexpr bool cleans = true;
  static constexpr index tile_pairs = tile_keys / 2;  // a tile starts at an even key

  static index query_items(const Sizes& s) { return (s.D + 1) / 2; }
  static index scratch_bytes(const Sizes& s) {
    return (tile_keys * query_items(s) + tile_pairs * (s.V + A::NR * A::W)) * static_cast<index>(sizeof(Item)) + 3 * 64;
  }

  PairOperands(const Plan& p, Arena& arena)
      : plan(p),
        k_copy(arena.take<Item>(tile_keys * query_items(p.sizes))),
        v_pairs(arena.take<Item>(tile_pairs * p.sizes.V)),
        panel(arena.take<Item>(tile_pairs * A::NR * A::W)) {}

  void pack_queries(const Strip<A>& strip, index b, T*, Item* to) const {
    pack_pairs<Pairs>(strip, plan.q, b, plan.sizes.D, to);
  }

  void read(const Task& task, index from, index to, bool may_copy) {
    first = from, base = from / 2 * 2, b = task.b, g = task.g;
    read_keys(from, to, may_copy);
    all_finite = true;
    const index V = plan.sizes.V;
    for (index key = base; key < to; key += 2) {
      const Half *low = key < from ? nullptr : value_row(key), *high = key + 1 < to ? value_row(key + 1) : nullptr;
      all_finite &= Pairs::interleave(low, high, V, v_pairs + (key - base) / 2 * V);
    }
    if (!all_finite) Pairs::clean(v_pairs, (to - base + 1) / 2 * V);
  }

  const Item* keys(index key) const { return k + (key - first) * k_stride; }
  index key_stride() const { return k_stride; }

  // Weights of keys [key, key + keys) in pairs that start at even keys, with 0 for what is not in the run.
  template <int NR>
  Mixing<Item> mixing(index key, index keys, const T* weights) {
    const index before = key % 2, pairs = items(key, keys);
    for (index p = 0; p < pairs; ++p) {
      const index i = 2 * p - before;
#pragma GCC unroll 4
      for (int c = 0; c < NR; ++c) {
        const F low = i >= 0 ? A::load(weights + (i * NR + c) * A::W) : F{};
        const F high = i + 1 < keys ? A::load(weights + ((i + 1) * NR + c) * A::W) : F{};
        Pairs::store_pairs(low, high, panel + (p * NR + c) * A::W);
      }
    }
    return {v_pairs + (key - base) / 2 * plan.sizes.V, plan.sizes.V, panel, pairs};
  }

  static index items(index key, index keys) { return (key % 2 + keys + 1) / 2; }

  // Of the whole tile: a pair may reach beyond a run of keys.
  bool finite_values(index, index) const { return all_finite; }

  // Values that are not finite are 0 in the panel: adds what those that a lane sees give.
  template <int NR>
  void add_not_finite(index key, index keys, const T* weights, const T* visible, T* mixed) const {
    for (index i = 0; i < keys; ++i) {
      const Half* row = value_row(key + i);
      for (index j = 0; j < plan.sizes.V; ++j) {
        float x;
        widen(row + j, plan.type, 1, &x);
        if (x - x == 0) continue;
        for (int c = 0; c < NR; ++c) {
          const index at = (i * NR + c) * A::W;
          T* to = mixed + (j * NR + c) * A::W;
          const F before = A::load(to), after = A::fma(A::all(x), A::load(weights + at), before);
          A::store(to, A::select((I)A::load(visible + at), after, before));
        }
      }
    }
  }

 private:
  const Plan& plan;
  Item *k_copy, *v_pairs, *panel;
  const Item* k;
  index k_stride, first, base, b, g;
  bool all_finite;

  const Half* value_row(index key) const { return reinterpret_cast<const Half*>(row_of(plan.v, plan.type, b, g, key)); }

  // Keys as they lie, or copied where pairs would reach beyond a row, or where rows lie far apart.
  void read_keys(index from, index to, bool may_copy) {
    const index D = plan.sizes.D, bytes = plan.k.row * static_cast<index>(sizeof(Half));
    const bool far = may_copy && (bytes >= far_apart || bytes <= -far_apart);
    if (D % 2 == 0 && plan.k.row % 2 == 0 && !far) {
      k = reinterpret_cast<const Item*>(row_of(plan.k, plan.type, b, g, from)), k_stride = plan.k.row / 2;
      return;
    }
    k = k_copy, k_stride = query_items(plan.sizes);
    for (index key = from; key < to; ++key) {
      Item* copy = k_copy + (key - from) * k_stride;
      if (D % 2) copy[k_stride - 1] = 0;
      std::memcpy(copy, row_of(plan.k, plan.type, b, g, key), sizeof(Half) * static_cast<std::size_t>(D));
    }
  }
};

// The factors of a product of many rows: weights as they lie, or copied where pairs would reach beyond a row.
template <class Pairs>
struct PairFactors {
  using M = Pairs;
  using A = typename Pairs::A;
  using Item = typename Pairs::Item;

  static index items(const Linear& linear) { return (linear.inputs + 1) / 2; }
  static bool copies(const Linear& linear) { return linear.inputs % 2 || linear.weight_row % 2; }
  static index scratch_bytes(const Linear& linear) {
    return copies(linear) ? outputs_at_once * items(linear) * static_cast<index>(sizeof(Item)) + 64 : 0;
  }

  const Linear& linear;
  Item* copy = nullptr;

  PairFactors(const Linear& l, Arena& arena) : linear(l) {
    if (copies(linear)) copy = arena.take<Item>(outputs_at_once * items(linear));
  }

  void pack(const Strip<A>& strip, const View& x, Item* panel) const {
    pack_pairs<Pairs>(strip, x, 0, linear.inputs, panel);
  }

  const Item* weights(index o, index count, index& stride) const {
    const char* from = static_cast<const char*>(linear.weight) + o * linear.weight_row * 2;
    stride = copy ? items(linear) : linear.weight_row / 2;
    if (!copy) return reinterpret_cast<const Item*>(from);
    for (index i = 0; i < count; ++i) {
      copy[(i + 1) * stride - 1] = 0;
      std::memcpy(copy + i * stride, from + i * linear.weight_row * 2, static_cast<std::size_t>(2 * linear.inputs));
    }
    return copy;
  }
};

}  // namespace
}  // namespace multihead
