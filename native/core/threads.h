// The one seam to threads: OpenMP, so that the workers are the ones torch already has.
#pragma once

#include "core/plan.h"

namespace multihead {

// Runs task(context, from, to, scratch) over runs of tasks [from, to) that together are [0, count), each once, on at
// most `threads` threads; the caller is one of them. Serial inside another parallel region and in a forked child, where
// the pool's threads no longer exist. Returns false if a thread had no memory for its scratch of `scratch_bytes`; then
// some tasks did not run.
using TaskFunction = void (*)(const void* context, index from, index to, void* scratch);
bool parallel_run(int threads, index count, index scratch_bytes, TaskFunction task, const void* context);

// A parallel region ends when its last thread does, and on a busy machine that is one that lost its core: a whole time
// slice for work of microseconds. So a balance is kept of what the others have done and how long the caller waited for
// them; where it is negative, calls run on one thread, and now and then try again. Results do not depend on it.
// MULTIHEAD_THREADS=fixed turns it off.
struct Patience {
  bool adapts;            // whether threads are given up at all
  bool alone;             // whether calls run on one thread now
  std::int64_t retreats;  // how often threads were given up so far
};
Patience patience();

}  // namespace multihead
