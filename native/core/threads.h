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

}  // namespace multihead
