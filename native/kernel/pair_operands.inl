// Half-precision operands for an instruction that adds up products of pairs: queries in pairs along their width, keys
// as they lie, values and weights in pairs of keys. Scores, weights and sums are floats; a weight is rounded only where
// it is multiplied.
#pragma once

#include "kernel/linear_block.inl"
#include "kernel/pair_rows.inl"

namespace multihead {
namespace {

template <class Pairs>
class PairOperands {
 public:
  using Product = Pairs;
  using A = typename Pairs::A;
  using T = typename A::T;
  using F = typename A::F;
  using Item = typename Pairs::Item;
  using Rows = PairRows<Pairs>;
  static constexpr bool cleans = true;

  static index query_items(const Sizes& s) { return Rows::items(s.D); }
  static index scratch_bytes(const Sizes& s) {
    return Rows::scratch_bytes(s.D, Use::scored) + Rows::scratch_bytes(s.V, Use::mixed) +
           Rows::panel_items * static_cast<index>(sizeof(Item)) + 64;
  }

  PairOperands(const Plan& p, Arena& arena)
      : plan(p),
        k(p.sizes.D, Use::scored, arena),
        v(p.sizes.V, Use::mixed, arena),
        panel(arena.take<Item>(Rows::panel_items)) {}

  void pack_queries(const Strip<A>& strip, index b, T*, Item* to) const {
    pack_pairs<Pairs>(strip, plan.q, b, plan.sizes.D, to);
  }

  void read(const Task& task, index from, index to, bool may_copy) {
    k.read(plan.k, plan, task.b, task.g, from, to, may_copy);
    v.read(plan.v, plan, task.b, task.g, from, to, may_copy);
  }

  const Item* keys(index key) const { return k.at(key); }
  index key_stride() const { return k.stride(); }

  template <int NR>
  Mixing<Item> mixing(index key, index keys, const T* weights) {
    return v.template mixing<NR>(key, keys, weights, panel);
  }

  static index items(index key, index keys) { return Rows::pairs_in(key, keys); }

  bool finite_values(index, index) const { return v.finite(); }

  template <int NR>
  void add_not_finite(index key, index keys, const T* weights, const T* visible, T* mixed) const {
    v.template add_not_finite<NR>(key, keys, weights, visible, mixed);
  }

 private:
  const Plan& plan;
  Rows k, v;
  Item* panel;
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
