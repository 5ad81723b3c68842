// Rows that are read or written soon, asked for a few at a time while others are worked on: asked for all at once they
// wait for each other, and the work for them.
#pragma once

#include "plan.h"

namespace multihead {
namespace {

template <int Most, bool Write>
class Awaited {
 public:
  void clear() { count = next = 0; }

  void add(const void* row) { rows[count++] = static_cast<const char*>(row); }

  // Says how long the rows are, in bytes, and how often there will be a time to ask for some of them.
  void spread(index bytes, index times) { size = bytes, some = times > 0 ? (count + times - 1) / times : count; }

  inline __attribute__((always_inline)) void ask() {
    for (const index end = next + some < count ? next + some : count; next < end; ++next)
      for (index at = 0; at < size; at += 64) __builtin_prefetch(rows[next] + at, Write);
  }

 private:
  const char* rows[Most];
  index size = 0, some = 0, count = 0, next = 0;
};

}  // namespace
}  // namespace multihead
