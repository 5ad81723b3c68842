// Rows that are read or written soon, prefetched a few at a time while others are worked on: all at once they would
// wait for each other, and the work for them.
#pragma once

#include "core/plan.h"

namespace multihead {
namespace {

template <int Most, bool Write>
class Prefetcher {
 public:
  void clear() { count = next = 0; }

  void add(const void* row) { rows[count++] = static_cast<const char*>(row); }

  // Says how long the rows are, in bytes, and how often prefetch_some will be called.
  void spread(index bytes, index times) { size = bytes, step = times > 0 ? (count + times - 1) / times : count; }

  inline __attribute__((always_inline)) void prefetch_some() {
    for (const index end = next + step < count ? next + step : count; next < end; ++next)
      for (index at = 0; at < size; at += 64) __builtin_prefetch(rows[next] + at, Write);
  }

 private:
  const char* rows[Most];
  index size = 0, step = 0, count = 0, next = 0;
};

}  // namespace
}  // namespace multihead
