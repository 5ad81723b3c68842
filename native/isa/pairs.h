// What all instructions for pairs of bfloat16 numbers share: how pairs lie, and numbers one by one.
#pragma once

#include "core/plan.h"
#include "isa/lanes.h"

namespace multihead {
namespace {

template <class Arch>
struct PairsOf {
  using A = Arch;
  using F = typename A::F;
  using Half = std::uint16_t;
  using Item = std::uint32_t;  // two numbers, the first in the lower half

  // Numbers that are not finite become 0.
  static void clean(Item* items, index count) {
    for (index i = 0; i < count; ++i) {
      if ((items[i] & 0x7f80u) == 0x7f80u) items[i] &= 0xffff0000u;
      if ((items[i] & 0x7f800000u) == 0x7f800000u) items[i] &= 0xffffu;
    }
  }

  // As a reader of rows (see kernel/readers.inl): pairs along the width of a row, and values of two keys.
  using Number = Half;
  using Kept = Half;
  static constexpr int step = 2 * A::W, together = 2;

  static bool special(Number x) { return (x & 0x7f80) == 0x7f80; }
  static float number(Number x) {
    const std::uint32_t bits = std::uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
  }
};

}  // namespace
}  // namespace multihead
