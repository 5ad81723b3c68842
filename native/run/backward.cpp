#include "run/backward.h"

#include <algorithm>
#include <vector>

#include "run/tasks.h"

namespace multihead {

void backward(const Gradients& gradients, const Isa& isa, int threads) {
  const Plan& plan = gradients.plan;
  const Sizes& s = plan.sizes;
  const Kernels& kernels = kernels_for(plan, isa);
  const index rows = s.rows(), block = kernels.block_rows(s), pairs = s.B * s.G;
  if (double(s.B) * s.H * s.Q * s.K * (s.D + s.V) < 1e5) threads = 1;
  const index scratch = kernels.backward_scratch(plan);

  std::vector<Task> tasks;
  for (index pair = 0; pair < pairs; ++pair)
    for (index row = rows; row > 0; row -= std::min(row, block)) {  // under a causal mask the last rows see most
      const index from = std::max<index>(0, row - block);
      tasks.push_back({pair / s.G, pair % s.G, from, row - from, 0, s.K, nullptr});
    }
  run_tasks(gradients, kernels.backward_queries, tasks, scratch, threads);

  tasks.clear();
  for (index pair = 0; pair < pairs; ++pair)
    for (index key = 0; key < s.K; key += block)
      tasks.push_back({pair / s.G, pair % s.G, 0, rows, key, std::min(block, s.K - key), nullptr});
  run_tasks(gradients, kernels.backward_keys, tasks, scratch, threads);
}

}  // namespace multihead
