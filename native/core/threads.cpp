#include "core/threads.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

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

std::int64_t now() {  // in nanoseconds
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Processor time of this thread, in nanoseconds: none passes while it has no core. Without OpenMP nobody asks.
[[maybe_unused]] std::int64_t worked() {
  timespec t;
  return clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) ? 0 : t.tv_sec * std::int64_t(1000000000) + t.tv_nsec;
}

// Whether the other threads are worth waiting for. Several threads may call at once: then a number is lost now and
// then, which changes nothing but the moment.
class Balance {
 public:
  bool alone() {
    const std::int64_t until = alone_until.load(std::memory_order_relaxed);
    return until != 0 && now() < until;
  }

  // A region that ended at `end`, in which the others worked for `help` and the caller waited for them for `wait`.
  void add(std::int64_t end, std::int64_t help, std::int64_t wait) {
    const std::int64_t gain = help - wait, until = alone_until.load(std::memory_order_relaxed);
    const std::int64_t since = end - last.exchange(end, std::memory_order_relaxed);
    const std::int64_t sum =
        std::min((since > memory ? 0 : gained.load(std::memory_order_relaxed)) + gain, most_credit);
    gained.store(sum, std::memory_order_relaxed);
    const bool trial = until != 0;
    if (sum < -least_loss || (trial && gain < -trial_loss)) {
      const std::int64_t before = pause.load(std::memory_order_relaxed);
      const std::int64_t rest = trial ? std::min(2 * before, longest) : shortest;
      pause.store(rest, std::memory_order_relaxed);
      gained.store(0, std::memory_order_relaxed);
      alone_until.store(end + rest, std::memory_order_relaxed);
      retreats.fetch_add(1, std::memory_order_relaxed);
    } else if (trial && end - until > trusted) {
      alone_until.store(0, std::memory_order_relaxed);
    }
  }

  const bool adapts = [] {
    const char* asked = std::getenv("MULTIHEAD_THREADS");
    return !asked || std::strcmp(asked, "fixed") != 0;
  }();
  std::atomic<std::int64_t> retreats{0};

 private:
  static constexpr std::int64_t ms = 1000 * 1000;
  static constexpr std::int64_t least_loss = 1 * ms;   // waited in vain, on balance, before threads are given up
  static constexpr std::int64_t most_credit = 2 * ms;  // help that waits are set against
  static constexpr std::int64_t trial_loss = ms / 2;   // in one region, while threads are on trial
  static constexpr std::int64_t memory = 100 * ms;     // a pause after which the balance begins anew
  static constexpr std::int64_t shortest = 10 * ms, longest = 640 * ms;  // time alone before threads are tried again
  static constexpr std::int64_t trusted = 200 * ms;                      // time after which they are no longer on trial

  std::atomic<std::int64_t> gained{0}, last{0}, alone_until{0}, pause{shortest};
};

Balance& balance() {
  static Balance kept;
  return kept;
}

}  // namespace

Patience patience() {
  Balance& b = balance();
  return {b.adapts, b.alone(), b.retreats.load(std::memory_order_relaxed)};
}

bool parallel_run(int threads, index count, index scratch_bytes, TaskFunction task, const void* context) {
  if (count < threads) threads = static_cast<int>(count);
  if (threads <= 1 || forked.load(std::memory_order_relaxed) || inside_parallel() || balance().alone()) {
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
  std::atomic<std::int64_t> help{0};
  const bool counted = balance().adapts;
  const std::int64_t begin = counted ? now() : 0;
  std::int64_t entered = 0, done = 0;  // by the caller
#pragma omp parallel num_threads(threads)
  {
    const bool helper = omp_get_thread_num() != 0;
    const std::int64_t before = counted && helper ? worked() : 0;
    if (counted && !helper) entered = now();
    void* own = scratch.at_least(scratch_bytes);
    if (own || !scratch_bytes) {
      able.fetch_add(1, std::memory_order_relaxed);
      for (int i = 0; i < n; ++i) {
        Share& share = shares[(omp_get_thread_num() + i) % n];
        for (index from, to; share.take(from, to);) task(context, from, to, own);
      }
    }
    if (counted && helper) help.fetch_add(worked() - before, std::memory_order_relaxed);
    if (counted && !helper) done = now();
  }
  if (counted) {
    const std::int64_t end = now();
    // A region begins when all have come back from the one before, and ends when all are done.
    balance().add(end, help.load(std::memory_order_relaxed), (entered - begin) + (end - done));
  }
  return able.load(std::memory_order_relaxed) > 0;  // one thread with memory is enough: it helped all others
#else
  return false;
#endif
}

}  // namespace multihead
