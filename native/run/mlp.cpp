#include "run/mlp.h"

#include <new>

#include "core/threads.h"

namespace multihead {
namespace {

constexpr index few_rows = 16;  // whose middle is done in less time than other threads take to come

struct Run {
  const Kernels* kernels;
  Gates gates;
};

}  // namespace

void run_mlp(const Mlp& mlp, const Isa& isa, int threads) {
  const index size = bytes(mlp.type), row = 2 * mlp.width;
  auto* middle = static_cast<char*>(mlp.middle);
  const index N = mlp.batch_rows, B = mlp.rows / N;
  const Rows x{mlp.x, mlp.x_batch, mlp.x_row, B, N, mlp.inputs, mlp.type};
  const auto half = [&](const Projection& p, void* y) {  // of the rows of `middle`
    Linear linear = linear_of(x, p, mlp.type, mlp.width, y);
    linear.y_batch = N * row, linear.y_row = row;
    return linear;
  };
  run_pair(half(mlp.gate, middle), half(mlp.up, middle + mlp.width * size), isa, threads);
  const Run run{isa.f32, {middle, middle + mlp.width * size, row, middle, row, mlp.width, mlp.type, mlp.tanh}};
  const auto gate = [](const void* context, index from, index to, void* scratch) {
    const Run& of = *static_cast<const Run*>(context);
    of.kernels->gate_rows(of.gates, from, to, scratch);
  };
  const index scratch = 2 * (mlp.width + 64) * static_cast<index>(sizeof(float));
  if (!parallel_run(mlp.rows <= few_rows ? 1 : threads, mlp.rows, scratch, gate, &run)) throw std::bad_alloc();
  const Rows gated{middle, N * row, row, B, N, mlp.width, mlp.type};
  run_linear(linear_of(gated, mlp.down, mlp.type, mlp.outputs, mlp.y), isa, threads);
}

}  // namespace multihead
