#include "run/attend.h"

#include <algorithm>
#include <new>
#include <vector>

#include "run/tasks.h"

namespace multihead {
namespace {

struct Run {
  const Plan* plan;
  const Kernels* kernels;
  const Task* tasks;
  bool few;                            // rows so few that the width of a head lies in the lanes
  const void* const* parts = nullptr;  // for merging: `splits` of each task
  index splits = 1;
};

void run_some(const void* context, index from, index to, void* scratch) {
  const Run& run = *static_cast<const Run*>(context);
  const auto step = run.few ? run.kernels->attend_few : run.kernels->attend_block;
  for (index i = from; i < to; ++i) step(*run.plan, run.tasks[i], scratch);
}

void merge_some(const void* context, index from, index to, void*) {
  const Run& run = *static_cast<const Run*>(context);
  for (index i = from; i < to; ++i) run.kernels->merge(*run.plan, run.tasks[i], run.parts + i * run.splits, run.splits);
}

// Keys that the rows of a task see, from a sample: enough to start with the longest.
index weight(const Plan& plan, const Task& task) {
  const index group = plan.sizes.group(), samples = std::min<index>(task.rows, 8);
  index sum = 0;
  for (index i = 0; i < samples; ++i) {
    const index row = task.row + i * task.rows / samples, q = row / group, h = task.g * group + row % group;
    const index from = std::max(plan.start.at(task.b, h, q), task.key);
    sum += std::max<index>(0, std::min(plan.stop.at(task.b, h, q), task.key + task.keys) - from);
  }
  return sum * task.rows / samples;
}

// The longest task of each (b, g) pair first, and the heaviest pair first. A pair stays together, because its keys and
// values are in the cache then.
void longest_first(const Plan& plan, std::vector<Task>& tasks) {
  const auto even = [](const Bound& bound) { return !bound.data && bound.low == bound.high; };
  if (even(plan.start) && even(plan.stop)) return;
  struct Weighed {
    index pair_total, pair, own, place;
  };
  const auto pair_of = [&](const Task& task) { return task.b * plan.sizes.G + task.g; };
  std::vector<index> totals(static_cast<std::size_t>(plan.sizes.B * plan.sizes.G));
  std::vector<Weighed> order(tasks.size());
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    order[i] = {0, pair_of(tasks[i]), weight(plan, tasks[i]), static_cast<index>(i)};
    totals[static_cast<std::size_t>(order[i].pair)] += order[i].own;
  }
  for (Weighed& task : order) task.pair_total = totals[static_cast<std::size_t>(task.pair)];
  std::sort(order.begin(), order.end(), [](const Weighed& a, const Weighed& b) {
    if (a.pair_total != b.pair_total) return a.pair_total > b.pair_total;
    if (a.pair != b.pair) return a.pair < b.pair;
    return a.own != b.own ? a.own > b.own : a.place < b.place;
  });
  std::vector<Task> sorted(tasks.size());
  for (std::size_t i = 0; i < tasks.size(); ++i) sorted[i] = tasks[static_cast<std::size_t>(order[i].place)];
  tasks.swap(sorted);
}

// Below this many multiplications waking another thread takes longer than it saves.
constexpr double worth_waking = 4e5;

// Keys in a part, where one block of rows would leave threads idle. A function of the row's own sizes, so that a row's
// sums run in the same order whatever the batch and the threads.
index part_keys(const Sizes& s, index block, bool few) {
  const index least = few ? 512 : 1024, most_parts = few ? 64 : 16;
  if (s.rows() > block) return s.K;
  const index part = std::max(least, (s.K + most_parts - 1) / most_parts);
  return part >= s.K ? s.K : part;
}

void link(std::vector<Task>& tasks) {
  for (std::size_t i = 1; i < tasks.size(); ++i) tasks[i - 1].next = &tasks[i];
}

void run(int threads, index count, index scratch, TaskFunction task, const Run& context) {
  if (!parallel_run(threads, count, scratch, task, &context)) throw std::bad_alloc();
}

}  // namespace

void attend(const Plan& plan, const Isa& isa, int threads) {
  const Sizes& s = plan.sizes;
  const index pairs = s.B * s.G, rows = s.rows();
  if (pairs == 0 || rows == 0) return;
  const double work = double(s.B) * s.H * s.Q * s.K * (s.D + s.V);
  if (work < worth_waking) threads = 1;

  const bool whole = plan.statistics.wanted() || plan.weights.data;  // kept per row, and not merged
  // Fewer rows do not pay for turning the keys round.
  const bool bytes = plan.kv_type == Type::i8 && isa.bytes && !whole && s.V > 0 && rows > 2 && rows <= isa.bytes->few;
  const Kernels& kernels = bytes ? *isa.bytes : kernels_for(plan, isa);
  // Without values this is a pass over scores, which later passes must find again to the last bit: no other order then.
  const bool few = !whole && s.V > 0 && rows <= kernels.few;
  const index most = kernels.block_rows(s), lanes = kernels.lanes;
  const index part = std::max<index>(1, whole ? s.K : part_keys(s, most, few)),
              splits = s.K ? (s.K + part - 1) / part : 1;
  index block = most;  // rows are independent of their neighbours, so that blocks may shrink to occupy every thread
  while (block > lanes && pairs * splits * ((rows + block - 1) / block) < 4 * threads) block -= lanes;

  std::vector<Task> tasks;
  const index scratch = kernels.scratch_bytes(plan);
  if (splits == 1) {
    tasks.reserve(static_cast<std::size_t>(pairs * ((rows + block - 1) / block)));
    for (index pair = 0; pair < pairs; ++pair)
      for (index row = 0; row < rows; row += block)
        tasks.push_back({pair / s.G, pair % s.G, row, std::min(block, rows - row), 0, s.K, nullptr});
    if (threads > 1) longest_first(plan, tasks);
    link(tasks);
    run(threads, static_cast<index>(tasks.size()), scratch, run_some, {&plan, &kernels, tasks.data(), few});
    return;
  }

  // Split keys: in waves of (b, g) pairs, so that the parts' sums never take more than this.
  constexpr index most_bytes = 16 << 20;
  const index number = plan.type == Type::f64 ? 8 : 4, part_bytes = rows * (s.V + 2) * number;
  const index wave = std::min(pairs, std::max<index>(1, most_bytes / (part_bytes * splits)));
  std::vector<char> sums(static_cast<std::size_t>(wave * splits * part_bytes));
  for (index pair = 0; pair < pairs; pair += wave) {
    const index count = std::min(wave, pairs - pair);
    std::vector<Task> merged;
    std::vector<const void*> parts;
    tasks.clear();
    for (index p = 0; p < count; ++p) {
      const index b = (pair + p) / s.G, g = (pair + p) % s.G;
      for (index row = 0; row < rows; row += block) {
        merged.push_back({b, g, row, std::min(block, rows - row), 0, s.K, nullptr});
        for (index i = 0; i < splits; ++i) {
          Task task = merged.back();
          task.key = i * part, task.keys = std::min(part, s.K - task.key);
          task.partial = sums.data() + (p * splits + i) * part_bytes + row * (s.V + 2) * number;
          parts.push_back(task.partial);
          tasks.push_back(task);
        }
      }
    }
    link(tasks);
    Run context{&plan, &kernels, tasks.data(), few};
    run(threads, static_cast<index>(tasks.size()), scratch, run_some, context);
    context.tasks = merged.data(), context.parts = parts.data(), context.splits = splits;
    const index merges = static_cast<index>(merged.size());
    run(double(merges) * splits * s.V < worth_waking ? 1 : threads, merges, 0, merge_some, context);
  }
}

}  // namespace multihead
