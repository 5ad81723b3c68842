// How products of a few rows read numbers as they lie in memory, against rows that are kept in scratch.
#pragma once

#include "kernel/convert.inl"
#include "kernel/tile.inl"

namespace multihead {
namespace {

using Half = std::uint16_t;

// Numbers of the sums' own type.
template <class Arch>
struct OwnReader {
  using A = Arch;
  using F = typename A::F;
  using Number = typename A::T;  // what lies in memory
  using Kept = typename A::T;    // what is kept in scratch: rows, and weights
  using Vector = F;
  static constexpr int step = A::W;   // numbers of a row in a vector
  static constexpr int together = 1;  // values of so many keys in a vector

  static Vector load(const Number* p) { return A::load(p); }
  static Vector load_some(const Number* p, int n) { return A::load_some(p, n); }
  static Vector load_kept(const Kept* p) { return A::load(p); }
  static F multiply_add(Vector x, Vector y, F sum) { return A::fma(x, y, sum); }

  static Vector values(const Number* p, index, bool, int n) { return n == A::W ? A::load(p) : A::load_some(p, n); }
  static Vector weight(const Kept* p) { return A::all(*p); }
  static bool special(Number x) { return x - x != 0; }
  static typename A::T number(Number x) { return x; }
};

// Half-precision numbers, converted to floats as they are read.
template <class Arch, Type type>
struct HalfReader {
  using A = Arch;
  using F = typename A::F;
  using Number = Half;
  using Kept = typename A::T;
  using Vector = F;
  static constexpr int step = A::W, together = 1;

  static Vector load(const Number* p) {
    if constexpr (type == Type::bf16)
      return A::from_bf16(p);
    else
      return A::from_f16(p);
  }
  static Vector load_some(const Number* p, int n) {
    Half some[A::W] = {};
    for (int i = 0; i < n; ++i) some[i] = p[i];
    return load(some);
  }
  static Vector load_kept(const Kept* p) { return A::load(p); }
  static F multiply_add(Vector x, Vector y, F sum) { return A::fma(x, y, sum); }

  static Vector values(const Number* p, index, bool, int n) { return n == A::W ? load(p) : load_some(p, n); }
  static Vector weight(const Kept* p) { return A::all(*p); }
  static bool special(Number x) {
    constexpr Half exponent = type == Type::bf16 ? 0x7f80 : 0x7c00;
    return (x & exponent) == exponent;
  }
  static float number(Number x) { return type == Type::bf16 ? multihead::from_bf16(x) : multihead::from_f16(x); }
};

// Whole numbers of a byte: rows whose scale is applied to scores and weights instead.
template <class Arch>
struct ByteReader {
  using A = Arch;
  using F = typename A::F;
  using Number = std::int8_t;
  using Kept = typename A::T;
  using Vector = F;
  static constexpr int step = A::W, together = 1;

  static Vector load(const Number* p) { return A::from_i8(p); }
  static Vector load_some(const Number* p, int n) {
    Number some[A::W] = {};
    for (int i = 0; i < n; ++i) some[i] = p[i];
    return load(some);
  }
  static Vector load_kept(const Kept* p) { return A::load(p); }
  static F multiply_add(Vector x, Vector y, F sum) { return A::fma(x, y, sum); }

  static Vector values(const Number* p, index, bool, int n) { return n == A::W ? load(p) : load_some(p, n); }
  static Vector weight(const Kept* p) { return A::all(*p); }
  static bool special(Number) { return false; }
  static typename A::T number(Number x) { return x; }
};

// Whether `count` rows are finite.
template <class Reader>
bool all_finite(const typename Reader::Number* row, index stride, index width, index count) {
  unsigned found = 0;
  for (index i = 0; i < count; ++i, row += stride)
    for (index j = 0; j < width; ++j) found |= Reader::special(row[j]);
  return !found;
}

}  // namespace
}  // namespace multihead
