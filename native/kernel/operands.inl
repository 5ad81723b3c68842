// What the products of the forward pass multiply: queries and weights as packed panels, keys and values a tile at a
// time. Another instruction for products is another such class, with Items of its own.
#pragma once

#include "kernel/product.inl"
#include "kernel/tile.inl"
#include "kernel/weights.inl"

namespace multihead {
namespace {

// What MixGroups multiplies: values and weights of a run of keys, in Items.
template <class Item>
struct Mixing {
  const Item* values;
  index stride;
  const Item* weights;
  index depth;
};

// Operands of the accumulators' own type: keys and values as they lie, and scores that become weights where they are.
template <class A>
class OwnOperands {
 public:
  using Product = OwnType<A>;
  using T = typename A::T;
  using F = typename A::F;
  using Item = T;
  static constexpr bool cleans = false;  // values that are not finite stay as they are

  static index scratch_bytes(const Sizes& s) {
    return tile_keys * (s.D + s.V) * static_cast<index>(sizeof(T)) + 2 * 64;
  }
  static index query_items(const Sizes& s) { return s.D; }  // in each lane

  OwnOperands(const Plan& p, Arena& arena)
      : plan(p), k_copy(arena.take<T>(tile_keys * p.sizes.D)), v_copy(arena.take<T>(tile_keys * p.sizes.V)) {}

  void pack_queries(const Strip<A>& strip, index b, T* rowwise, Item* to) const {
    strip.pack(plan.q, plan.type, b, plan.sizes.D, rowwise, to);
  }

  // The keys and values [from, to) of the task's head; `may_copy`: there are rows enough to pay for a copy.
  void read(const Task& task, index from, index to, bool may_copy) {
    first = from;
    k = rows_of<A>({plan.k, plan.kv_type, task.b, task.g, plan.sizes.D, from, to - from}, k_copy, k_stride, may_copy);
    v = rows_of<A>({plan.v, plan.kv_type, task.b, task.g, plan.sizes.V, from, to - from}, v_copy, v_stride, may_copy);
    if (plan.kv_type == Type::i8) {
      scale_rows(plan.k_scales, task, from, to - from, plan.sizes.D, k_copy);
      scale_rows(plan.v_scales, task, from, to - from, plan.sizes.V, v_copy);
    }
  }

  const Item* keys(index key) const { return k + (key - first) * k_stride; }
  index key_stride() const { return k_stride; }

  // Weights of keys [key, key + keys) take the place of their scores.
  template <int NR>
  Mixing<Item> mixing(index key, index keys, const T* weights) {
    return {values(key), v_stride, weights, keys};
  }

  // Items of a run of keys that starts at `key`.
  static index items(index, index keys) { return keys; }

  // Whether the values of a run of keys are finite.
  bool finite_values(index key, index keys) const { return finite<A>(values(key), v_stride, plan.sizes.V, keys); }

  // Adds weights times values to mixed[V][lanes] * decay, leaving out what a lane does not see.
  template <int NR>
  void mix_visible(index key, index keys, const T* weights, const T* visible, T* mixed, const F (&decay)[NR]) {
    mix_seen<A, NR>(plan.sizes.V, mixed, keys, weights, visible, values(key), v_stride, decay);
  }

 private:
  const Plan& plan;
  T *k_copy, *v_copy;
  const T *k, *v;
  index first, k_stride, v_stride;

  static void scale_rows(const View& scales, const Task& task, index from, index count, index width, T* rows) {
    const auto* by = static_cast<const float*>(scales.data) + task.b * scales.batch + task.g * scales.head;
    for (index i = 0; i < count; ++i)
      for (index j = 0; j < width; ++j) rows[i * width + j] *= by[(from + i) * scales.row];
  }

  const T* values(index key) const { return v + (key - first) * v_stride; }
};

}  // namespace
}  // namespace multihead
