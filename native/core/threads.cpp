#include "core/threads.h"

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

// Tasks that are handed out in runs of a sixteenth of what is left: few hand-overs, and a short last one.
struct alignas(64) Share {
  std::atomic<index> next;
  index end;

  bool take(index& from, index& to) {
    from = next.load(std::memory_order_relaxed);
    do {
      if (from >= end) return false;
      to = from + 1 + (end - from) / 16;
    } while (!next.compare_exchange_weak(from, to, std::memory_order_relaxed));
    return true;
  }
};

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
    if (count > 0) task(context, 0, count, own);
    return true;
  }
#ifdef _OPENMP
  // Each thread has a share of neighbouring tasks, the same in every call of the same size, so that what it reads is
  // still in its own cache. One that is done helps the next.
  constexpr int most_shares = 64;
  Share shares[most_shares];
  const int n = threads < most_shares ? threads : most_shares;
  for (int i = 0; i < n; ++i) {
    shares[i].next.store(i * count / n, std::memory_order_relaxed);
    shares[i].end = (i + 1) * count / n;
  }
  std::atomic<int> able{0};
#pragma omp parallel num_threads(threads)
  {
    void* own = scratch.at_least(scratch_bytes);
    if (own || !scratch_bytes) {
      able.fetch_add(1, std::memory_order_relaxed);
      for (int i = 0; i < n; ++i) {
        Share& share = shares[(omp_get_thread_num() + i) % n];
        for (index from, to; share.take(from, to);) task(context, from, to, own);
      }
    }
  }
  return able.load(std::memory_order_relaxed) > 0;  // one thread with memory is enough: it helped all others
#else
  return false;
#endif
}

}  // namespace multihead
