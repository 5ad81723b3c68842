// y = x W^T + b for a few rows of x, with W (outputs, inputs) as nn.Linear holds it: bound by the reading of W, which
// is neither packed nor copied, so that nothing is stale when training changes it.
#pragma once

#include <cstring>

#include "core/features.h"
#include "core/kernels.h"
#include "kernel/dots.inl"

namespace multihead {
namespace {

// Rows of W that meet R rows of x at a time: as many sums as the registers hold.
template <class A, int R>
constexpr int outputs_together = R == 4 && A::W < 16 ? 3
                                 : A::W / R > 1      ? A::W / R
                                                     : 2;

// A few rows of x packed side by side in scratch, padded with zeros to whole vectors; behind three of them a row of
// zeros, for they are read as four.
template <class Reader>
struct PackedRows {
  using A = typename Reader::A;
  using Kept = typename Reader::Kept;
  Kept* data;
  index step;

  PackedRows(const Linear& linear, void* scratch) : data(static_cast<Kept*>(scratch)), step(step_of(linear.inputs)) {}

  // Rows whole pages apart would evict each other, and those of W, from the cache: 5 lines apart, modulo 16.
  static index step_of(index width) {
    constexpr index line = 64 / sizeof(Kept);
    const index lines = (width + line - 1) / line;
    return line * (lines + (21 - lines % 16) % 16);
  }

  static index bytes(const Linear& linear) {
    return (linear.rows + 1) * step_of(linear.inputs) * static_cast<index>(sizeof(Kept));
  }

  void fill(const Linear& linear) {
    const std::size_t used = static_cast<std::size_t>(linear.inputs), padded = static_cast<std::size_t>(step);
    for (index i = 0; i < linear.rows; ++i) {
      const void* from = x_row(linear, i);
      if constexpr (sizeof(Kept) == 2)
        std::memcpy(data + i * step, from, sizeof(Kept) * used);
      else
        widen<A>(from, linear.x_type, linear.inputs, data + i * step);
      std::memset(data + i * step + used, 0, sizeof(Kept) * (padded - used));
    }
    if (linear.rows % 4 == 3) std::memset(data + linear.rows * step, 0, sizeof(Kept) * padded);
  }
};

// The first `count` of N numbers of each row, rows `step` bytes apart.
template <int R, int N, class Number>
inline void put(const Number (&from)[R * N], index rows, index count, char* to, index step) {
  for (index r = 0; r < rows; ++r)
    if (count == N)
      std::memcpy(to + r * step, from + r * N, sizeof(Number) * N);
    else
      std::memcpy(to + r * step, from + r * N, sizeof(Number) * static_cast<std::size_t>(count));
}

// Outputs [first, last) of rows [row, row + R) of x.
template <class Reader, int R>
void linear_rows(const Linear& linear, const PackedRows<Reader>& packed, index first, index last, index row) {
  using A = typename Reader::A;
  using T = typename A::T;
  using Number = typename Reader::Number;
  constexpr int N = outputs_together<A, R>;
  const auto* weight = static_cast<const Number*>(linear.weight);
  const auto* bias = static_cast<const Number*>(linear.bias);
  const auto* x = packed.data + row * packed.step;
  const index rows = linear.rows - row < R ? linear.rows - row : R;
  const index size = bytes(linear.x_type);
  char* y = static_cast<char*>(linear.y) + row * linear.y_row * size;
  // The next rows are prefetched in the order they lie in memory, where one lies behind the other.
  const bool dense = linear.weight_row == linear.inputs, near = R == 1 && first_level_is_large();
  for (index o = first; o < last; o += N) {
    const Number* from[N];
    for (int i = 0; i < N; ++i) from[i] = weight + (o + i < last ? o + i : last - 1) * linear.weight_row;
    const Number* next = weight + (o + N) * linear.weight_row;
    const Ahead<Number> ahead{next, dense ? N : 1, dense ? index(Reader::step) : linear.weight_row};
    T sums[R * N];
    if constexpr (R == 1)
      near ? dots_of_one<Reader, N, true>(from, x, linear.inputs, linear.weight_row, sums)
           : dots_of_one<Reader, N, false>(from, x, linear.inputs, linear.weight_row, sums);
    else
      dots<Reader, N, R>(from, x, packed.step, linear.inputs, ahead, sums);
    const index count = last - o < N ? last - o : N;
    if (bias)
      for (int i = 0; i < count; ++i)
        for (int r = 0; r < R; ++r) sums[r * N + i] += Reader::number(bias[o + i]);
    if (sizeof(T) == 8 || stored_as<T>(linear.x_type)) {
      put<R, N>(sums, rows, count, y + o * size, linear.y_row * size);
    } else {
      Half halves[R * N];
      narrow<A>(sums, linear.x_type, R * N, halves);
      put<R, N>(halves, rows, count, y + o * size, linear.y_row * size);
    }
  }
}

template <class Reader>
class LinearFew {
 public:
  using A = typename Reader::A;
  using Rows = PackedRows<Reader>;

  static index scratch_bytes(const Linear& linear) { return Rows::bytes(linear); }

  // Outputs [first, last) of every row. `packed`: x lies in `scratch` already. A short run of weight rows stays in the
  // cache while the rows of x pass.
  static void run(const Linear& linear, index, index first, index last, bool packed, void* scratch) {
    Rows x(linear, scratch);
    if (!packed) x.fill(linear);
    const index run = linear.rows <= 4 ? last - first : 4 * outputs_together<A, 4>;
    for (index o = first; o < last; o += run) {
      const index end = o + run < last ? o + run : last;
      for (index row = 0; row < linear.rows;) {
        const index left = linear.rows - row;
        if (left >= 3) {
          linear_rows<Reader, 4>(linear, x, o, end, row);
          row += 4;
        } else if (left == 2) {
          linear_rows<Reader, 2>(linear, x, o, end, row);
          row += 2;
        } else {
          linear_rows<Reader, 1>(linear, x, o, end, row);
          row += 1;
        }
      }
    }
  }
};

// Half-precision weights that meet several groups of rows: a run of them is widened once for all.
template <class A>
class LinearWidened {
 public:
  using T = typename A::T;
  using Rows = PackedRows<OwnReader<A>>;
  static constexpr index run_length = 4 * outputs_together<A, 4>;

  static bool suits(const Linear& linear) { return !stored_as<T>(linear.type) && linear.rows > 4; }

  static index scratch_bytes(const Linear& linear) {
    const index widened = run_length * (Rows::step_of(linear.inputs) + 1) * static_cast<index>(sizeof(T));
    return Rows::bytes(linear) + (suits(linear) ? widened : 0);
  }

  static void run(const Linear& linear, index row, index first, index last, bool packed, void* scratch) {
    const index step = Rows::step_of(linear.inputs), size = bytes(linear.type);
    T* weight = reinterpret_cast<T*>(static_cast<char*>(scratch) + Rows::bytes(linear));
    T* bias = weight + run_length * step;
    Linear some = linear;
    some.weight = weight, some.weight_row = step, some.type = sizeof(T) == 8 ? Type::f64 : Type::f32;
    some.bias = linear.bias ? bias : nullptr;
    for (index o = first; o < last; o += run_length, packed = true) {
      some.outputs = last - o < run_length ? last - o : run_length;
      weight_rows<A>(linear, o, some.outputs, weight, step);
      if (linear.bias) widen<A>(static_cast<const char*>(linear.bias) + o * size, linear.type, some.outputs, bias);
      some.y = static_cast<char*>(linear.y) + o * bytes(linear.x_type);
      LinearFew<OwnReader<A>>::run(some, row, 0, some.outputs, packed, scratch);
    }
  }
};

// Weights whose outputs lie side by side, in the lanes: y += x[i] * W[i] for one input after the other.
template <class Reader>
class LinearTurned {
 public:
  using A = typename Reader::A;
  using T = typename A::T;
  using F = typename A::F;
  using Number = typename Reader::Number;
  static constexpr int W = A::W;

  static void run(const Linear& linear, index first, index last, bool packed, void* scratch) {
    PackedRows<Reader> x(linear, scratch);
    if (!packed) x.fill(linear);
    for (index row = 0; row < linear.rows;) {
      const index left = linear.rows - row;
      const T* from = x.data + row * x.step;
      if (left >= 3)
        rows<4>(linear, from, x.step, row, first, last), row += 4;
      else if (left == 2)
        rows<2>(linear, from, x.step, row, first, last), row += 2;
      else
        rows<1>(linear, from, x.step, row, first, last), row += 1;
    }
  }

 private:
  template <int R>
  static void rows(const Linear& linear, const T* x, index step, index row, index first, index last) {
    constexpr int C = 8 / R;
    index o = first;
    for (; o + C * W <= last; o += C * W) columns<R, C>(linear, x, step, row, o, W);
    for (; o < last; o += W) columns<R, 1>(linear, x, step, row, o, static_cast<int>(last - o < W ? last - o : W));
  }

  // C vectors of outputs from o on, the last of `width` numbers. Short sums first round less.
  template <int R, int C>
  static void columns(const Linear& linear, const T* x, index step, index row, index o, int width) {
    constexpr index stretch = 256, ahead = 8, near = 64 / static_cast<index>(sizeof(Number));
    const auto* at = static_cast<const Number*>(linear.weight) + o;
    F total[R][C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) total[r][c] = F{};
    for (index from = 0; from < linear.inputs; from += stretch) {
      const index to = from + stretch < linear.inputs ? from + stretch : linear.inputs;
      F sum[R][C];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r][c] = F{};
      for (index i = from; i < to; ++i, at += linear.weight_column) {
        F v[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) v[c] = Reader::values(at + c * W, 0, false, C > 1 ? W : width);
#pragma GCC unroll 8
        for (index c = 0; c < C * W; c += near) prefetch(at + ahead * linear.weight_column + c);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) sum[r][c] = A::fma(A::all(x[r * step + i]), v[c], sum[r][c]);
      }
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) total[r][c] += sum[r][c];
    }
    const index count = (C - 1) * W + width, size = bytes(linear.x_type);
    T bias[C * W] = {}, line[C * W];
    if (linear.bias) widen<A>(static_cast<const Number*>(linear.bias) + o, linear.type, count, bias);
    for (int r = 0; r < R && row + r < linear.rows; ++r) {
      for (int c = 0; c < C; ++c) A::store(line + c * W, total[r][c] + A::load(bias + c * W));
      narrow<A>(line, linear.x_type, count, static_cast<char*>(linear.y) + ((row + r) * linear.y_row + o) * size);
    }
  }
};

// By the type of the weights.
template <class A>
void linear_few(const Linear& linear, index row, index first, index last, bool packed, void* scratch) {
  if constexpr (sizeof(typename A::T) == 4) {
    if (linear.weight_column != 1) {
      if (linear.type == Type::bf16)
        return LinearTurned<HalfReader<A, Type::bf16>>::run(linear, first, last, packed, scratch);
      if (linear.type == Type::f16)
        return LinearTurned<HalfReader<A, Type::f16>>::run(linear, first, last, packed, scratch);
      return LinearTurned<OwnReader<A>>::run(linear, first, last, packed, scratch);
    }
    if (LinearWidened<A>::suits(linear)) return LinearWidened<A>::run(linear, row, first, last, packed, scratch);
    if (linear.type == Type::bf16)
      return LinearFew<HalfReader<A, Type::bf16>>::run(linear, row, first, last, packed, scratch);
    if (linear.type == Type::f16)
      return LinearFew<HalfReader<A, Type::f16>>::run(linear, row, first, last, packed, scratch);
  }
  LinearFew<OwnReader<A>>::run(linear, row, first, last, packed, scratch);
}

}  // namespace
}  // namespace multihead
