// Tiles of keys and values, and the scratch memory they are copied to.
#pragma once

#include "kernel/convert.inl"

namespace multihead {
namespace {

// Cuts a piece off a thread's scratch memory, every piece aligned to a cache line.
struct Arena {
  char* next;
  template <class T>
  T* take(index count) {
    T* piece = reinterpret_cast<T*>(next);
    next += (count * static_cast<index>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
};

// Keys in a tile. Tiles start at multiples of it, whatever the rest of the batch or the threads: the order of every sum
// is a function of the row's own keys.
constexpr index tile_keys = 128;

// Keys that some strip of a task sees.
struct KeyRange {
  index first, last;

  explicit KeyRange(const Task& task) : first(task.key + task.keys), last(task.key) {}

  template <class Strip>
  void add(const Strip& strip) {
    if (strip.first >= strip.last) return;
    first = strip.first < first ? strip.first : first;
    last = strip.last > last ? strip.last : last;
  }

  // Calls fn(from, to, i) for the keys [from, to) of the i-th tile of the range.
  template <class Fn>
  inline __attribute__((always_inline)) void tiles(Fn&& fn) const {
    index i = 0;
    for (index tile = first / tile_keys * tile_keys; tile < last; tile += tile_keys, ++i)
      fn(tile > first ? tile : first, tile + tile_keys < last ? tile + tile_keys : last, i);
  }
};

// Where a stretch of keys ends that is summed by itself, from the i-th of `count` on that start at `key`. Ends lie at
// fixed keys, so that the order of a sum is the same for any tile.
template <index stretch>
index stretch_end(index key, index i, index count) {
  const index end = (key + i) / stretch * stretch + stretch - key;
  return end < count ? end : count;
}

// Rows so many bytes apart share few sets of the cache.
constexpr index far_apart = 2048;

// Rows [from, from + count) of one head of a view of keys, values or queries.
struct HeadRows {
  const View& view;
  Type type;
  index b, head, width, from, count;
};

// These rows as the sums' own numbers: as they lie, or copied where they are of another type, or, if they `may_copy`,
// where a long row stride would put them all into few cache sets.
template <class A>
const typename A::T* rows_of(const HeadRows& rows, typename A::T* copy, index& stride, bool may_copy) {
  using T = typename A::T;
  const char* at = row_of(rows.view, rows.type, rows.b, rows.head, rows.from);
  const index step = rows.view.row * bytes(rows.type);
  may_copy = may_copy && rows.width * static_cast<index>(sizeof(T)) < step && (step >= far_apart || step <= -far_apart);
  if (stored_as<T>(rows.type) && !may_copy) {
    stride = rows.view.row;
    return reinterpret_cast<const T*>(at);
  }
  stride = rows.width;
  for (index i = 0; i < rows.count; ++i) widen<A>(at + i * step, rows.type, rows.width, copy + i * rows.width);
  return copy;
}

}  // namespace
}  // namespace multihead
