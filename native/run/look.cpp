#include "run/look.h"

#include <algorithm>
#include <vector>

#include "run/tasks.h"

namespace multihead {
namespace {

// Blocks of rows, the last ones first: under a causal mask they see most. No weight depends on another, so that few
// rows are parted by keys to occupy every thread.
std::vector<Task> blocks(const Sizes& s, index block, int threads) {
  constexpr index least = 1024;
  const index tasks = s.B * s.G * ((s.rows() + block - 1) / block);
  const index parts = tasks < 4 * threads ? std::max<index>(1, std::min<index>(4 * threads / tasks, s.K / least)) : 1;
  const index part = std::max<index>(1, (s.K + parts - 1) / parts);
  std::vector<Task> list;
  for (index pair = 0; pair < s.B * s.G; ++pair)
    for (index end = s.rows(); end > 0; end -= std::min(end, block))
      for (index key = 0; key < s.K; key += part) {
        const index from = std::max<index>(0, end - block);
        list.push_back({pair / s.G, pair % s.G, from, end - from, key, std::min(part, s.K - key), nullptr});
      }
  return list;
}

// Runs of bins that have about a block of rows, and a picture that stays in the second-level cache; the sizes alone
// decide, so that sums run in the same order whatever the threads. `most` becomes the bins of the longest run.
std::vector<Task> runs_of_bins(const Recompute& recompute, index block, index& most) {
  constexpr index cached = 128 << 10;
  const Sizes& s = recompute.plan.sizes;
  const Bins down{s.Q, recompute.height};
  const index fit = std::max<index>(1, cached / (8 * s.group() * recompute.width));
  std::vector<Task> list;
  most = 1;
  for (index pair = 0; pair < s.B * s.G; ++pair)
    for (index end = recompute.height; end > 0;) {
      index from = end - 1;
      while (from > 0 && end - from < fit && (down.last(end - 1) - down.first(from - 1)) * s.group() <= block) --from;
      list.push_back({pair / s.G, pair % s.G, from, end - from, 0, s.K, nullptr});
      most = std::max(most, end - from);
      end = from;
    }
  return list;
}

}  // namespace

void look(const Recompute& recompute, const Isa& isa, int threads) {
  const Plan& plan = recompute.plan;
  const Sizes& s = plan.sizes;
  const Kernels& kernels = kernels_for(plan, isa);
  if (s.B * s.G == 0 || s.rows() == 0 || s.K == 0) return;
  if (double(s.B) * s.H * s.Q * s.K * (s.D + 1) < 2e5) threads = 1;
  const index block = kernels.block_rows(s);
  if (recompute.weights.data)
    run_tasks(recompute, kernels.look_weights, blocks(s, block, threads), kernels.look_scratch(recompute, 0), threads);
  if (recompute.map) {
    index most;
    const std::vector<Task> tasks = runs_of_bins(recompute, block, most);
    run_tasks(recompute, kernels.look_map, tasks, kernels.look_scratch(recompute, most), threads);
  }
  if (recompute.received) {
    std::vector<Task> tasks;
    for (index pair = 0; pair < s.B * s.G; ++pair)
      for (index key = 0; key < s.K; key += block)
        tasks.push_back({pair / s.G, pair % s.G, 0, s.rows(), key, std::min(block, s.K - key), nullptr});
    run_tasks(recompute, kernels.received, tasks, kernels.received_scratch(recompute), threads);
  }
}

}  // namespace multihead
