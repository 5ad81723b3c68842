// How large a block of rows is, and its rows of scratch.
#pragma once

#include "kernel/tile.inl"

namespace multihead {
namespace {

// Rows a task may have: enough to reuse a tile of keys from the second-level cache, and few enough to stay there.
template <class A>
index block_rows(const Sizes& sizes) {
  constexpr index lanes = A::NR * A::W;
  const index width = sizes.D > sizes.V ? sizes.D : sizes.V;
  const index strips = width <= 160 ? 96 / lanes : width <= 320 ? 48 / lanes : 1;
  return lanes * (strips < 1 ? 1 : strips);
}

// Numbers in a row of scratch: of a query, a value, or a tile of dense mask.
inline index row_width(const Sizes& s) {
  const index width = s.D > s.V ? s.D : s.V;
  return width > tile_keys ? width : tile_keys;
}

}  // namespace
}  // namespace multihead
