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
  const auto product = [&](const Projection& p, index outputs, void* y, index y_row) {
    Linear linear{mlp.x, mlp.x_batch, mlp.x_row,  mlp.batch_rows, mlp.rows, p.weight,
                  p.row, p.bias,      mlp.inputs, outputs,        y,        mlp.batch_rows * y_row,
                  0,     y_row,       outputs,    mlp.type,       mlp.type};
    return linear;
  };
  run_pair(product(mlp.gate, mlp.width, middle, row), product(mlp.up, mlp.width, middle + mlp.width * size, row), isa,
           threads);
  const Run run{isa.f32, {middle, middle + mlp.width * size, row, middle, row, mlp.width, mlp.type, mlp.tanh}};
  const auto gate = [](const void* context, index from, index to, void* scratch) {
    const Run& of = *static_cast<const Run*>(context);
    of.kernels->gate_rows(of.gates, from, to, scratch);
  };
  const index scratch = 2 * (mlp.width + 64) * static_cast<index>(sizeof(float));
  if (!parallel_run(mlp.rows <= few_rows ? 1 : threads, mlp.rows, scratch, gate, &run)) throw std::bad_alloc();
  Linear down = product(mlp.down, mlp.outputs, mlp.y, mlp.outputs);
  down.x = middle, down.x_batch = mlp.batch_rows * row, down.x_row = row, down.inputs = mlp.width;
  run_linear(down, isa, threads);
}

}  // namespace multihead
