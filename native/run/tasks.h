// What passes over tasks have in common: which kernels a plan takes, and one step of each task on threads.
#pragma once

#include <new>
#include <vector>

#include "core/kernels.h"
#include "core/threads.h"

namespace multihead {

// By the type of q, and of k and v: pairs of bfloat16 numbers where the CPU multiplies them and all are of these.
inline const Kernels& kernels_for(const Plan& plan, const Isa& isa) {
  if (plan.type == Type::bf16 && plan.kv_type == Type::bf16 && isa.bf16) return *isa.bf16;
  return plan.type == Type::f64 ? *isa.f64 : *isa.f32;
}

// Runs step(pass, task, scratch) for every task. Throws std::bad_alloc.
template <class Pass>
void run_tasks(const Pass& pass, void (*step)(const Pass&, const Task&, void*), const std::vector<Task>& tasks,
               index scratch_bytes, int threads) {
  struct Run {
    const Pass& pass;
    void (*step)(const Pass&, const Task&, void*);
    const Task* tasks;
  };
  const Run run{pass, step, tasks.data()};
  const auto some = [](const void* context, index from, index to, void* scratch) {
    const Run& of = *static_cast<const Run*>(context);
    for (index i = from; i < to; ++i) of.step(of.pass, of.tasks[i], scratch);
  };
  if (!parallel_run(threads, static_cast<index>(tasks.size()), scratch_bytes, some, &run)) throw std::bad_alloc();
}

}  // namespace multihead
