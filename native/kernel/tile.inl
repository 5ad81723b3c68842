// Tiles of keys and values, and the scratch memory they are copied to.
#pragma once

#include "convert.inl"

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

// Rows [from, from + count) of a head's keys or values as T: as they lie, or copied where they are of another type, or,
// if `crowds`, where a long row stride would crowd them into few cache sets.
template <class T>
const T* rows_of(const View& view, const Plan& plan, index b, index head, index width, index from, index count, T* copy,
                 index& stride, bool crowds) {
  const char* at = row_of(view, plan.type, b, head, from);
  const index step = view.row * bytes(plan.type), far = 2048;
  crowds = crowds && width * static_cast<index>(sizeof(T)) < step && (step >= far || step <= -far);
  if (stored_as<T>(plan.type) && !crowds) {
    stride = view.row;
    return reinterpret_cast<const T*>(at);
  }
  stride = width;
  for (index i = 0; i < count; ++i) widen(at + i * step, plan.type, width, copy + i * width);
  return copy;
}

}  // namespace
}  // namespace multihead
