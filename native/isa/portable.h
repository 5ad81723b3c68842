// Any CPU: vectors as wide as the smallest there are.
#pragma once

#include "isa/lanes.h"

namespace multihead {
namespace {

template <class T>
struct Portable : Lanes<T, 16 / sizeof(T)> {
  static constexpr int NR = 2;
  static constexpr int MR(int nr) { return nr == 2 ? 4 : 8; }
};

}  // namespace
}  // namespace multihead
