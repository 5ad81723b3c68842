// y = x W^T + b for many rows of x: a strip of them in vector lanes, and W (outputs, inputs) read as nn.Linear holds
// it. The micro-kernel is that of the scores, with x for the queries and the rows of W for the keys.
#pragma once

#include "core/kernels.h"
#include "kernel/prefetch.inl"
#include "kernel/product.inl"
#include "kernel/strip.inl"
#include "kernel/tile.inl"

namespace multihead {
namespace {

template <class M, int NR>
struct OutputGroups {
  using A = typename M::A;
  using Item = typename M::Item;
  using T = typename A::T;
  using F = typename A::F;
  static constexpr index stretch = 256;  // Items that are summed by themselves: short sums first round less
  const Item* weight;
  index stride;
  const T* bias;  // or null
  const Item* panel;
  index inputs;  // in Items
  T* to;
  Prefetcher<NR * A::W, true>& prefetcher;  // rows of y

  template <int MR>
  inline __attribute__((always_inline)) void group(index i) {
    for (index from = 0; from < inputs; from += stretch) {
      const index depth = inputs - from < stretch ? inputs - from : stretch;
      prefetcher.prefetch_some();
      F sum[MR][NR];
      accumulate<M, MR, NR, true>(weight + i * stride + from, stride, panel + from * NR * A::W, depth, sum);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < NR; ++c) {
          T* at = to + ((i + r) * NR + c) * A::W;
          if (from > 0) sum[r][c] += A::load(at);
          if (bias && from + stretch >= inputs) sum[r][c] += A::all(bias[i + r]);
          A::store(at, sum[r][c]);
        }
    }
  }
};

constexpr index outputs_at_once = 64;  // outputs that are computed before they are written, row by row

// Factors of the sums' own type, or converted to it: x when it is packed, weights a block of outputs at a time.
template <class Arch>
struct OwnFactors {
  using M = OwnType<Arch>;
  using T = typename Arch::T;

  static index items(const Linear& linear) { return linear.inputs; }
  static bool as_they_lie(const Linear& linear) { return stored_as<T>(linear.type) && linear.weight_column == 1; }
  static index scratch_bytes(const Linear& linear) {
    const index x = stored_as<T>(linear.x_type) ? 0 : Arch::W, rows = as_they_lie(linear) ? 0 : outputs_at_once;
    return (x + rows) * linear.inputs * static_cast<index>(sizeof(T)) + 2 * 64;
  }

  const Linear& linear;
  T *rowwise = nullptr, *copy = nullptr;

  OwnFactors(const Linear& l, Arena& arena) : linear(l) {
    if (!stored_as<T>(linear.x_type)) rowwise = arena.take<T>(Arch::W * linear.inputs);
    if (!as_they_lie(linear)) copy = arena.take<T>(outputs_at_once * linear.inputs);
  }

  void pack(const Strip<Arch>& strip, const View& x, T* panel) const {
    strip.pack(x, linear.x_type, 0, linear.inputs, rowwise, panel);
  }

  const T* weights(index o, index count, index& stride) const {
    stride = copy ? linear.inputs : linear.weight_row;
    if (!copy) return static_cast<const T*>(linear.weight) + o * linear.weight_row;
    weight_rows<Arch>(linear, o, count, copy, stride);
    return copy;
  }
};

template <class Factors>
class LinearBlock {
 public:
  using M = typename Factors::M;
  using A = typename M::A;
  using Item = typename M::Item;
  using T = typename A::T;
  static constexpr int W = A::W, Lanes = A::NR * A::W;

  static index scratch_bytes(const Linear& linear) {
    return Factors::items(linear) * Lanes * static_cast<index>(sizeof(Item)) +
           ((outputs_at_once + 1) * Lanes + outputs_at_once * (W + 1)) * static_cast<index>(sizeof(T)) + 5 * 64 +
           Factors::scratch_bytes(linear);
  }

  // Outputs [first, last) of rows [row, row + Lanes), or as many as there are. `packed`: these rows of x lie in the
  // lanes of `scratch` already.
  static void run(const Linear& linear, index row, index first, index last, bool packed, void* scratch) {
    Arena arena{static_cast<char*>(scratch)};
    Item* panel = arena.take<Item>(Factors::items(linear) * Lanes);
    T *tile = arena.take<T>(outputs_at_once * Lanes), *ones = arena.take<T>(Lanes);
    T *rowwise = arena.take<T>(outputs_at_once * W), *bias = arena.take<T>(outputs_at_once);
    const Factors factors(linear, arena);
    Strip<A> strip;
    strip.resize(linear.rows - row);
    for (int lane = 0; lane < Lanes; ++lane) {
      const index at = row + (lane < strip.rows ? lane : strip.rows - 1);
      strip.head[lane] = at / linear.batch_rows, strip.query[lane] = at % linear.batch_rows;
      ones[lane] = 1;
    }
    const View x{const_cast<void*>(linear.x), 0, linear.x_batch, linear.x_row};
    if (!packed) factors.pack(strip, x, panel);
    for (index o = first, done; o < last; o += done) {
      index count = last - o < outputs_at_once ? last - o : outputs_at_once;
      const index head = o / linear.y_width, place = o % linear.y_width;
      if (count > linear.y_width - place) count = linear.y_width - place;
      char* to[Lanes];
      for (int lane = 0; lane < strip.rows; ++lane) {
        const index at = strip.head[lane] * linear.y_batch + head * linear.y_head + strip.query[lane] * linear.y_row;
        to[lane] = static_cast<char*>(linear.y) + (at + place) * bytes(linear.x_type);
      }
      if (linear.bias)
        widen<A>(static_cast<const char*>(linear.bias) + o * bytes(linear.type), linear.type, count, bias);
      with_vectors<A>(strip.nr, [&](auto nr) {
        multiply<nr.count>(linear, factors, {o, count, linear.bias ? bias : nullptr}, panel, to, strip.rows, tile);
      });
      strip.write(tile, count, linear.x_type, ones, rowwise, [&](int lane) -> void* { return to[lane]; });
      done = count;
    }
  }

 private:
  struct Outputs {
    index first, count;
    const T* bias;  // of each, or null
  };

  // tile[count][lanes]; `to`: the rows that it will be written to.
  template <int NR>
  static void multiply(const Linear& linear, const Factors& factors, const Outputs& outputs, const Item* panel,
                       char* const* to, int rows, T* tile) {
    const index count = outputs.count;
    using Groups = OutputGroups<M, NR>;
    Prefetcher<NR * W, true> prefetcher;
    for (int lane = 0; lane < rows; ++lane) prefetcher.add(to[lane]);
    const index items = Factors::items(linear), stretches = (items + Groups::stretch - 1) / Groups::stretch;
    prefetcher.spread(count * bytes(linear.x_type), count / A::MR(NR) * stretches);
    index stride;
    const Item* weight = factors.weights(outputs.first, count, stride);
    Groups groups{weight, stride, outputs.bias, panel, items, tile, prefetcher};
    in_groups<A::MR(NR)>(count, groups);
  }
};

}  // namespace
}  // namespace multihead
