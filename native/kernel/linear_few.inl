// y = x W^T + b for a few rows of x, with W (outputs, inputs) as nn.Linear holds it: bound by the reading of W, which
// is neither packed nor copied, so that nothing is stale when training changes it.
#pragma once

#include <cstring>

#include "dots.inl"
#include "kernels.h"

namespace multihead {
namespace {

// Rows of W that meet R rows of x at a time: as many sums as the registers hold.
template <class A, int R>
constexpr int outputs_together = R == 4 && A::W < 16 ? 3
                                 : A::W / R > 1      ? A::W / R
                                                     : 2;

// A few rows of x side by side in scratch, padded with zeros to whole vectors; behind three of them a row of zeros, for
// they are read as four.
template <class T>
struct LaidRows {
  T* data;
  index step;

  LaidRows(const Linear& linear, void* scratch) : data(static_cast<T*>(scratch)), step(step_of(linear.inputs)) {}

  // Rows whole pages apart would crowd each other, and those of W, out of the cache: 5 lines apart, modulo 16.
  static index step_of(index width) {
    constexpr index line = 64 / sizeof(T);
    const index lines = (width + line - 1) / line;
    return line * (lines + (21 - lines % 16) % 16);
  }

  static index bytes(const Linear& linear) {
    return (linear.rows + 1) * step_of(linear.inputs) * static_cast<index>(sizeof(T));
  }

  void fill(const Linear& linear) {
    const std::size_t used = static_cast<std::size_t>(linear.inputs), padded = static_cast<std::size_t>(step);
    for (index i = 0; i < linear.rows; ++i) {
      const T* from = static_cast<const T*>(linear.x) + i / linear.batch_rows * linear.x_batch +
                      i % linear.batch_rows * linear.x_row;
      std::memcpy(data + i * step, from, sizeof(T) * used);
      std::memset(data + i * step + used, 0, sizeof(T) * (padded - used));
    }
    if (linear.rows % 4 == 3) std::memset(data + linear.rows * step, 0, sizeof(T) * padded);
  }
};

// Outputs [first, last) of rows [row, row + R) of x.
template <class A, int R>
void linear_rows(const Linear& linear, const LaidRows<typename A::T>& laid, index first, index last, index row) {
  using T = typename A::T;
  constexpr int N = outputs_together<A, R>;
  const T* weight = static_cast<const T*>(linear.weight);
  const T* bias = static_cast<const T*>(linear.bias);
  const T* x = laid.data + row * laid.step;
  T* y = static_cast<T*>(linear.y) + row * linear.y_row;
  const index rows = linear.rows - row < R ? linear.rows - row : R;
  // The next rows are asked for in the order they lie in memory, where one lies behind the other.
  const bool dense = linear.weight_row == linear.inputs;
  for (index o = first; o < last; o += N) {
    const T* from[N];
    for (int i = 0; i < N; ++i) from[i] = weight + (o + i < last ? o + i : last - 1) * linear.weight_row;
    const T* next = weight + (o + N) * linear.weight_row;
    const Ahead<T> ahead{next, dense ? N : 1, dense ? A::W : linear.weight_row};
    T sums[R * N];
    dots<A, N, R>(from, x, laid.step, linear.inputs, ahead, sums);
    for (index r = 0; r < rows; ++r)
      for (int i = 0; i < N && o + i < last; ++i)
        y[r * linear.y_row + o + i] = sums[r * N + i] + (bias ? bias[o + i] : T(0));
  }
}

template <class A>
class LinearFew {
 public:
  using T = typename A::T;

  static index scratch_bytes(const Linear& linear) { return LaidRows<T>::bytes(linear); }

  // Outputs [first, last) of every row. `laid`: x lies in `scratch` already. A short run of weight rows stays in the
  // cache while the rows of x pass.
  static void run(const Linear& linear, index, index first, index last, bool laid, void* scratch) {
    LaidRows<T> x(linear, scratch);
    if (!laid) x.fill(linear);
    const index run = linear.rows <= 4 ? last - first : 4 * outputs_together<A, 4>;
    for (index o = first; o < last; o += run) {
      const index end = o + run < last ? o + run : last;
      for (index row = 0; row < linear.rows;) {
        const index left = linear.rows - row;
        if (left >= 3) {
          linear_rows<A, 4>(linear, x, o, end, row);
          row += 4;
        } else if (left == 2) {
          linear_rows<A, 2>(linear, x, o, end, row);
          row += 2;
        } else {
          linear_rows<A, 1>(linear, x, o, end, row);
          row += 1;
        }
      }
    }
  }
};

}  // namespace
}  // namespace multihead
