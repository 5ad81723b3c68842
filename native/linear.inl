// y = x W^T + b for a few rows of x, with W (outputs, inputs) as nn.Linear holds it: bound by the reading of W, which
// is neither packed nor copied, so that nothing is stale when training changes it.
#pragma once

#include "dots.inl"
#include "kernels.h"

namespace multihead {
namespace {

template <class A, int R>
void linear_rows(const Linear& linear, const typename A::T* x, index first, index last, index row, index rows) {
  using T = typename A::T;
  constexpr int W = A::W, at_once = W / R;
  const T* weight = static_cast<const T*>(linear.weight);
  const T* bias = static_cast<const T*>(linear.bias);
  T* y = static_cast<T*>(linear.y);
  const index ahead = at_once * linear.weight_row;
  for (index o = first; o < last; o += at_once) {
    const T* from[at_once];
    for (int i = 0; i < at_once; ++i) from[i] = weight + (o + i < last ? o + i : last - 1) * linear.weight_row;
    T sums[W];
    A::store(sums, dots<A, R>(from, x + row * linear.x_row, linear.x_row, linear.inputs, ahead));
    for (int r = 0; r < R && row + r < rows; ++r)
      for (int i = 0; i < at_once && o + i < last; ++i)
        y[(row + r) * linear.y_row + o + i] = sums[r * at_once + i] + (bias ? bias[o + i] : T(0));
  }
}

// Outputs [first, last) of every row. A short run of weight rows stays in the cache while the rows of x pass.
template <class A>
void linear(const Linear& linear, index first, index last) {
  using T = typename A::T;
  constexpr int most = A::W / 2 < 4 ? A::W / 2 : 4;
  const T* x = static_cast<const T*>(linear.x);
  const index run = most == 1 ? 1 : A::W / most * 2;
  for (index o = first; o < last; o += run) {
    const index end = o + run < last ? o + run : last;
    for (index row = 0; row < linear.rows;) {
      const index left = linear.rows - row;
      if (left >= 3 && most == 4) {
        linear_rows<A, (most < 4 ? 1 : 4)>(linear, x, o, end, row, linear.rows);
        row += 4;
      } else if (left >= 2 && most >= 2) {
        linear_rows<A, (most < 2 ? 1 : 2)>(linear, x, o, end, row, linear.rows);
        row += 2;
      } else {
        linear_rows<A, 1>(linear, x, o, end, row, linear.rows);
        row += 1;
      }
    }
  }
}

}  // namespace
}  // namespace multihead
