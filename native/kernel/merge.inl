// Split keys: the sums of the parts become one row, always in the order of the keys.
#pragma once

#include "kernel/strip.inl"
#include "kernel/weights.inl"

namespace multihead {
namespace {

template <class A>
void merge(const Plan& plan, const Task& task, const void* const* parts, index count) {
  using T = typename A::T;
  const index V = plan.sizes.V, group = plan.sizes.group();
  const T none = -__builtin_inff();
  const double unit = score_unit<T>(plan);
  T sum[256];
  for (index row = 0; row < task.rows; ++row) {
    const auto part = [&](index i) { return static_cast<const T*>(parts[i]) + row * (V + 2); };
    T top = none, total = 0;
    for (index i = 0; i < count; ++i) top = part(i)[V] > top ? part(i)[V] : top;
    const auto weight = [&](index i) {
      return part(i)[V] == none ? T(0) : static_cast<T>(exp2((double(part(i)[V]) - double(top)) * unit));
    };
    // A part that saw only NaN has no top, but its total says so.
    for (index i = 0; i < count; ++i) total += part(i)[V] == none ? part(i)[V + 1] : part(i)[V + 1] * weight(i);
    const index h = task.g * group + (task.row + row) % group, q = (task.row + row) / group;
    const Ending<T> end = ending<T>(plan, h, top, total);
    end.save(plan, task.b, h, q);
    char* out = row_of(plan.out, plan.type, task.b, h, q);
    for (index v = 0; v < V; v += 256) {
      const index width = V - v < 256 ? V - v : 256;
      for (index j = 0; j < width; ++j) sum[j] = 0;
      for (index i = 0; i < count; ++i) {
        const T by = weight(i) * end.factor;
        if (part(i)[V] == none && part(i)[V + 1] == 0) continue;
        for (index j = 0; j < width; ++j) sum[j] += part(i)[v + j] * by;
      }
      narrow<A>(sum, plan.type, width, out + v * bytes(plan.type));
    }
  }
}

}  // namespace
}  // namespace multihead
