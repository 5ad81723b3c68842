#include "run/look.h"

#include <algorithm>
#include <new>
#include <vector>

#include "core/threads.h"

namespace multihead {
namespace {

using Step = void (*)(const Looking&, const Task&, void*);

struct Run {
  const Looking* looking;
  Step step;
  const Task* tasks;
};

void run_tasks(const void* context, index from, index to, void* scratch) {
  const Run& run = *static_cast<const Run*>(context);
  for (index i = from; i < to; ++i) run.step(*run.looking, run.tasks[i], scratch);
}

void run_all(const Looking& looking, Step step, const std::vector<Task>& tasks, index scratch, int threads) {
  const Run context{&looking, step, tasks.data()};
  if (!parallel_run(threads, static_cast<index>(tasks.size()), scratch, run_tasks, &context)) throw std::bad_alloc();
}

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
std::vector<Task> runs_of_bins(const Looking& looking, index block, index& most) {
  constexpr index cached = 128 << 10;
  const Sizes& s = looking.plan.sizes;
  const Bins down{s.Q, looking.height};
  const index fit = std::max<index>(1, cached / (8 * s.group() * looking.width));
  std::vector<Task> list;
  most = 1;
  for (index pair = 0; pair < s.B * s.G; ++pair)
    for (index end = looking.height; end > 0;) {
      index from = end - 1;
      while (from > 0 && end - from < fit && (down.last(end - 1) - down.first(from - 1)) * s.group() <= block) --from;
      list.push_back({pair / s.G, pair % s.G, from, end - from, 0, s.K, nullptr});
      most = std::max(most, end - from);
      end = from;
    }
  return list;
}

}  // namespace

void look(const Looking& looking, const Isa& isa, int threads) {
  const Plan& plan = looking.plan;
  const Sizes& s = plan.sizes;
  const Kernels& kernels = plan.type == Type::f64 ? *isa.f64 : *isa.f32;
  if (s.B * s.G == 0 || s.rows() == 0 || s.K == 0) return;
  if (double(s.B) * s.H * s.Q * s.K * (s.D + 1) < 2e5) threads = 1;
  const index block = kernels.block_rows(s);
  if (looking.weights.data)
    run_all(looking, kernels.look_weights, blocks(s, block, threads), kernels.look_scratch(looking, 0), threads);
  if (looking.map) {
    index most;
    const std::vector<Task> tasks = runs_of_bins(looking, block, most);
    run_all(looking, kernels.look_map, tasks, kernels.look_scratch(looking, most), threads);
  }
  if (looking.received) {
    std::vector<Task> tasks;
    for (index pair = 0; pair < s.B * s.G; ++pair)
      for (index key = 0; key < s.K; key += block)
        tasks.push_back({pair / s.G, pair % s.G, 0, s.rows(), key, std::min(block, s.K - key), nullptr});
    run_all(looking, kernels.received, tasks, kernels.received_scratch(looking), threads);
  }
}

}  // namespace multihead
