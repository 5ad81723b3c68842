#include "layer.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "attend.h"
#include "threads.h"

namespace multihead {
namespace {

// Outputs a task computes: a few hundred kilobytes of weights.
constexpr index outputs_at_once = 32;

struct Run {
  const Kernels* kernels;
  std::vector<Linear> linears;
};

void run_one(const void* context, index i, void*) {
  const Run& run = *static_cast<const Run*>(context);
  for (const Linear& linear : run.linears) {
    const index blocks = (linear.outputs + outputs_at_once - 1) / outputs_at_once;
    if (i < blocks) {
      const index first = i * outputs_at_once;
      run.kernels->linear(linear, first, std::min(first + outputs_at_once, linear.outputs));
      return;
    }
    i -= blocks;
  }
}

void run_all(const Run& run, int threads) {
  index count = 0;
  for (const Linear& linear : run.linears) count += (linear.outputs + outputs_at_once - 1) / outputs_at_once;
  if (!parallel_run(threads, count, 0, run_one, &run)) throw std::bad_alloc();
}

// Rows copied side by side, padded with zeros as `Linear` asks: a whole number of vectors, and a whole group of rows.
struct Padded {
  index step;
  std::vector<float> data;
  Padded(index rows, index width) : step((width + 15) / 16 * 16), data(static_cast<std::size_t>((rows + 3) * step)) {}
  void fill(const float* from, index batch, index row, index B, index N, index width) {
    for (index b = 0; b < B; ++b)
      for (index n = 0; n < N; ++n)
        std::memcpy(&data[static_cast<std::size_t>((b * N + n) * step)], from + b * batch + n * row,
                    sizeof(float) * static_cast<std::size_t>(width));
  }
};

Linear linear_of(const Padded& x, index rows, const Projection& p, index inputs, index outputs, float* y, index y_row) {
  return {x.data.data(), x.step, rows, p.weight, p.row, p.bias, inputs, outputs, y, y_row};
}

}  // namespace

void run_layer(Layer layer, const Isa& isa, int threads) {
  Plan& plan = layer.plan;
  const Sizes& s = plan.sizes;
  const Kernels& kernels = *isa.f32;
  const index rows = s.B * s.Q, seen = s.B * s.K;
  const bool self = layer.context == layer.x && layer.context_batch == layer.x_batch &&
                    layer.context_row == layer.x_row && s.K == s.Q && layer.C == layer.E;
  Padded x(rows, layer.E), context(self ? 0 : seen, self ? 0 : layer.C), merged(rows, s.H * s.V);
  x.fill(layer.x, layer.x_batch, layer.x_row, s.B, s.Q, layer.E);
  if (!self) context.fill(layer.context, layer.context_batch, layer.context_row, s.B, s.K, layer.C);
  std::vector<float> projected(static_cast<std::size_t>(rows * s.H * s.D + seen * s.G * (s.D + s.V)));
  float *q = projected.data(), *k = q + rows * s.H * s.D, *v = k + seen * s.G * s.D;
  const Padded& from = self ? x : context;
  run_all({&kernels,
           {linear_of(x, rows, layer.q, layer.E, s.H * s.D, q, s.H * s.D),
            linear_of(from, seen, layer.k, layer.C, s.G * s.D, k, s.G * s.D),
            linear_of(from, seen, layer.v, layer.C, s.G * s.V, v, s.G * s.V)}},
          threads);
  plan.q = {q, s.Q * s.H * s.D, s.D, s.H * s.D};
  plan.k = {k, s.K * s.G * s.D, s.D, s.G * s.D};
  plan.v = {v, s.K * s.G * s.V, s.V, s.G * s.V};
  plan.out = {merged.data.data(), s.Q * merged.step, s.V, merged.step};
  attend(plan, isa, threads);
  run_all({&kernels, {linear_of(merged, rows, layer.o, s.H * s.V, layer.E, layer.y, layer.E)}}, threads);
}

}  // namespace multihead
