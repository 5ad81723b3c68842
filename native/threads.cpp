#include "threads.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#include <pthread.h>

#include <atomic>
#include <cstdlib>

namespace multihead {
namespace {

std::atomic<bool> forked{false};

const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

// Memory a thread keeps between calls: fresh pages cost more than small calls take.
class Scratch {
 public:
  ~Scratch() { std::free(data); }
  void* at_least(index bytes) {
    if (bytes > size) {
      std::free(data);
      const index rounded = (bytes + 4095) / 4096 * 4096;
      data = std::aligned_alloc(4096, static_cast<std::size_t>(rounded));
      size = data ? rounded : 0;
    }
    return data;
  }

 private:
  void* data = nullptr;
  index size = 0;
};

thread_local Scratch scratch;

bool inside_parallel() {
#ifdef _OPENMP
  return omp_in_parallel();
#else
  return true;  // built without OpenMP: serial
#endif
}

}  // namespace

bool parallel_run(int threads, index count, index scratch_bytes, TaskFunction task, const void* context) {
  if (count < threads) threads = static_cast<int>(count);
  if (threads <= 1 || forked.load(std::memory_order_relaxed) || inside_parallel()) {
    void* own = scratch.at_least(scratch_bytes);
    if (!own && scratch_bytes) return false;
    for (index i = 0; i < count; ++i) task(context, i, own);
    return true;
  }
  std::atomic<index> next{0};
  std::atomic<bool> enough{true};
#pragma omp parallel num_threads(threads)
  {
    void* own = scratch.at_least(scratch_bytes);
    if (!own && scratch_bytes) {
      enough.store(false, std::memory_order_relaxed);
    } else {
      for (index i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(context, i, own);
    }
  }
  // One thread with memory is enough: it ran every task.
  return enough.load(std::memory_order_relaxed) || next.load(std::memory_order_relaxed) >= count;
}

}  // namespace multihead
