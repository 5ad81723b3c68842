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
  using Column = F;                       // values of `together` keys, a column in each lane
  static constexpr int step = A::W;       // numbers of a row in a vector
  static constexpr int together = 1;      // values of so many keys in a vector
  static constexpr bool in_twos = false;  // whether two vectors of columns are read at once, by values_of_two

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
  using Column = F;
  static constexpr int step = A::W, together = 1;
  static constexpr bool in_twos = false;

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

// bfloat16 numbers of two vectors at a time, the even ones and the odd ones: a shift and a mask, where widening them in
// order takes two permutations as well. Rows in scratch are arranged alike, and so are the columns of what is mixed.
template <class Arch>
struct SplitReader : HalfReader<Arch, Type::bf16> {
  using A = Arch;
  using F = typename A::F;
  using U = typename A::U;
  using Number = Half;
  using Kept = typename A::T;
  struct Vector {
    F even, odd;
  };
  using HalfReader<Arch, Type::bf16>::multiply_add;  // of columns
  static constexpr int step = 2 * A::W, together = 1;
  static constexpr bool in_twos = true;

  static Vector load(const Number* p) {
    U pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return {(F)(pairs << 16), (F)(pairs & 0xffff0000u)};
  }
  static Vector load_some(const Number* p, int n) {
    Half some[2 * A::W] = {};
    for (int i = 0; i < n; ++i) some[i] = p[i];
    return load(some);
  }
  static Vector load_kept(const Kept* p) { return {A::load(p), A::load(p + A::W)}; }
  static F multiply_add(const Vector& x, const Vector& y, F sum) {
    return A::fma(x.odd, y.odd, A::fma(x.even, y.even, sum));
  }
  static void values_of_two(const Number* p, index, bool, F& even, F& odd) {
    const Vector both = load(p);
    even = both.even, odd = both.odd;
  }
  // `width` numbers, a multiple of `step`, in the order of `load`, and back.
  static void arrange(Kept* row, index width) {
    for (index d = 0; d < width; d += step) {
      Kept copy[step];
      std::memcpy(copy, row + d, sizeof copy);
      for (int i = 0; i < step; ++i) row[d + i % 2 * A::W + i / 2] = copy[i];
    }
  }
  static void put_in_order(Kept* row, index width) {
    for (index d = 0; d < width; d += step) {
      Kept copy[step];
      std::memcpy(copy, row + d, sizeof copy);
      for (int i = 0; i < step; ++i) row[d + i] = copy[i % 2 * A::W + i / 2];
    }
  }
};

// Integers of a byte: rows whose scale is applied to scores and weights instead.
template <class Arch>
struct ByteReader {
  using A = Arch;
  using F = typename A::F;
  using Number = std::int8_t;
  using Kept = typename A::T;
  using Vector = F;
  using Column = F;
  static constexpr int step = A::W, together = 1;
  static constexpr bool in_twos = false;

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
