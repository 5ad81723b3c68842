#include "run/backward.h"

#include <algorithm>
#include <new>
#include <vector>

#include "core/threads.h"

namespace multihead {
namespace {

using Step = void (*)(const Gradients&, const Task&, void*);

struct Run {
  const Gradients* gradients;
  Step step;
  const Task* tasks;
};

void run_tasks(const void* context, index from, index to, void* scratch) {
  const Run& run = *static_cast<const Run*>(context);
  for (index i = from; i < to; ++i) run.step(*run.gradients, run.tasks[i], scratch);
}

void run_all(const Gradients& gradients, Step step, const std::vector<Task>& tasks, index scratch, int threads) {
  const Run context{&gradients, step, tasks.data()};
  if (!parallel_run(threads, static_cast<index>(tasks.size()), scratch, run_tasks, &context)) throw std::bad_alloc();
}

}  // namespace

void backward(const Gradients& gradients, const Isa& isa, int threads) {
  const Plan& plan = gradients.plan;
  const Sizes& s = plan.sizes;
  const bool half = plan.type == Type::bf16 && isa.bf16;
  const Kernels& kernels = half ? *isa.bf16 : plan.type == Type::f64 ? *isa.f64 : *isa.f32;
  const index rows = s.rows(), block = kernels.block_rows(s), pairs = s.B * s.G;
  if (double(s.B) * s.H * s.Q * s.K * (s.D + s.V) < 1e5) threads = 1;
  const index scratch = kernels.backward_scratch(plan);

  std::vector<Task> tasks;
  for (index pair = 0; pair < pairs; ++pair)
    for (index row = rows; row > 0; row -= std::min(row, block)) {  // under a causal mask the last rows see most
      const index from = std::max<index>(0, row - block);
      tasks.push_back({pair / s.G, pair % s.G, from, row - from, 0, s.K, nullptr});
    }
  run_all(gradients, kernels.backward_queries, tasks, scratch, threads);

  tasks.clear();
  for (index pair = 0; pair < pairs; ++pair)
    for (index key = 0; key < s.K; key += block)
      tasks.push_back({pair / s.G, pair % s.G, 0, rows, key, std::min(block, s.K - key), nullptr});
  run_all(gradients, kernels.backward_keys, tasks, scratch, threads);
}

}  // namespace multihead
