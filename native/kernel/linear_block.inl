// y = x W^T + b for many rows of x: a strip of them in vector lanes, and W (outputs, inputs) read as nn.Linear holds
// it. The micro-kernel is that of the scores, with x for the queries and the rows of W for the keys.
#pragma once

#include "awaited.inl"
#include "kernels.h"
#include "product.inl"
#include "strip.inl"
#include "tile.inl"

namespace multihead {
namespace {

template <class A, int NR>
struct OutputGroups {
  using T = typename A::T;
  using F = typename A::F;
  static constexpr index stretch = 256;  // inputs that are summed by themselves: short sums first round less
  const T* weight;
  index stride;
  const T* bias;  // or null
  const T* panel;
  index inputs;
  T* to;
  Awaited<NR * A::W, true>& awaited;  // rows of y

  template <int MR>
  inline __attribute__((always_inline)) void group(index i) {
    for (index from = 0; from < inputs; from += stretch) {
      const index depth = inputs - from < stretch ? inputs - from : stretch;
      awaited.ask();
      F sum[MR][NR];
      accumulate<A, MR, NR, true>(weight + i * stride + from, stride, panel + from * NR * A::W, depth, sum);
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

template <class A>
class LinearBlock {
 public:
  using T = typename A::T;
  static constexpr int W = A::W, Lanes = A::NR * A::W;
  static constexpr index together = 64;  // outputs that are computed before they are written, row by row

  static index scratch_bytes(const Linear& linear) {
    return (linear.inputs + together + 1) * Lanes * static_cast<index>(sizeof(T)) + 3 * 64;
  }

  // Outputs [first, last) of rows [row, row + Lanes), or as many as there are. `laid`: these rows of x lie in the lanes
  // of `scratch` already.
  static void run(const Linear& linear, index row, index first, index last, bool laid, void* scratch) {
    Arena arena{static_cast<char*>(scratch)};
    T *panel = arena.take<T>(linear.inputs * Lanes), *tile = arena.take<T>(together * Lanes);
    T* ones = arena.take<T>(Lanes);
    Strip<A> strip;
    strip.rows = static_cast<int>(linear.rows - row < Lanes ? linear.rows - row : Lanes);
    strip.nr = (strip.rows + W - 1) / W;
    for (int lane = 0; lane < Lanes; ++lane) {
      const index at = row + (lane < strip.rows ? lane : strip.rows - 1);
      strip.head[lane] = at / linear.batch_rows, strip.query[lane] = at % linear.batch_rows;
      ones[lane] = 1;
    }
    const View x{const_cast<void*>(linear.x), 0, linear.x_batch, linear.x_row};
    if (!laid) strip.pack(x, own, 0, linear.inputs, nullptr, panel);
    for (index o = first, done; o < last; o += done) {
      index count = last - o < together ? last - o : together;
      const index head = o / linear.y_width, place = o % linear.y_width;
      if (count > linear.y_width - place) count = linear.y_width - place;
      char* to[Lanes];
      for (int lane = 0; lane < strip.rows; ++lane) {
        const index at = strip.head[lane] * linear.y_batch + head * linear.y_head + strip.query[lane] * linear.y_row;
        to[lane] = reinterpret_cast<char*>(static_cast<T*>(linear.y) + at + place);
      }
      if (strip.nr == A::NR)
        multiply<A::NR>(linear, o, count, panel, to, strip.rows, tile);
      else if (strip.nr == 1)
        multiply<1>(linear, o, count, panel, to, strip.rows, tile);
      else
        multiply<(A::NR > 2 ? 2 : 1)>(linear, o, count, panel, to, strip.rows, tile);
      strip.write(tile, count, own, ones, nullptr, [&](int lane) -> void* { return to[lane]; });
      done = count;
    }
  }

 private:
  static constexpr Type own = sizeof(T) == 8 ? Type::f64 : Type::f32;

  // tile[count][lanes]; `to`: the rows that it will be written to.
  template <int NR>
  static void multiply(const Linear& linear, index o, index count, const T* panel, char* const* to, int rows, T* tile) {
    const T* weight = static_cast<const T*>(linear.weight) + o * linear.weight_row;
    const T* bias = linear.bias ? static_cast<const T*>(linear.bias) + o : nullptr;
    using Groups = OutputGroups<A, NR>;
    Awaited<NR * W, true> awaited;
    for (int lane = 0; lane < rows; ++lane) awaited.add(to[lane]);
    const index stretches = (linear.inputs + Groups::stretch - 1) / Groups::stretch;
    awaited.spread(count * static_cast<index>(sizeof(T)), count / A::MR(NR) * stretches);
    Groups groups{weight, linear.weight_row, bias, panel, linear.inputs, tile, awaited};
    in_groups<A::MR(NR)>(count, groups);
  }
};

}  // namespace
}  // namespace multihead
