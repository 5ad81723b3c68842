// Half-precision numbers become fp32 when they are read and are rounded to nearest even when they are written.
#pragma once

#include "core/kernels.h"
#include "isa/lanes.h"

namespace multihead {
namespace {

inline float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float from_bf16(std::uint16_t x) { return float_of(std::uint32_t(x) << 16); }

inline float from_f16(std::uint16_t x) {
  // Shifted into place the exponent is 112 too small, for denormals too; inf and NaN need the full exponent.
  const std::uint32_t magnitude = x & 0x7fffu;
  const std::uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
  const std::uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return float_of(finite | special | (std::uint32_t(x & 0x8000u) << 16));
}

inline std::uint16_t to_bf16(float x) {
  const std::uint32_t bits = bits_of(x);
  if (x != x) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline std::uint16_t to_f16(float x) {
  const std::uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u;
  const float magnitude = float_of(bits & 0x7fffffffu);
  if (x != x) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x1p-14f)  // denormal: the sum rounds at its last bit, 2^-24
    return static_cast<std::uint16_t>(sign | (bits_of(magnitude + 0.5f) - bits_of(0.5f)));
  const std::uint32_t shifted = (bits & 0x7fffffffu) - (112u << 23);
  return static_cast<std::uint16_t>(sign | ((shifted + 0xfffu + ((shifted >> 13) & 1u)) >> 13));
}

// n numbers from `source`, read as `type`, as the sums' own: halves, or bytes, into floats, doubles into doubles.
template <class A>
void widen(const void* source, Type type, index n, typename A::T* to) {
  using T = typename A::T;
  if constexpr (sizeof(T) == 4) {
    if (type == Type::i8) {
      const auto* from = static_cast<const std::int8_t*>(source);
      for (index i = 0; i < n; ++i) to[i] = from[i];
      return;
    }
    if (type == Type::bf16 || type == Type::f16) {
      const auto* from = static_cast<const std::uint16_t*>(source);
      index i = 0;
      for (; i + A::W <= n; i += A::W)
        A::store(to + i, type == Type::f16 ? A::from_f16(from + i) : A::from_bf16(from + i));
      for (; i < n; ++i) to[i] = type == Type::f16 ? from_f16(from[i]) : from_bf16(from[i]);
      return;
    }
  }
  if (n) std::memcpy(to, source, static_cast<std::size_t>(n) * sizeof(T));  // a statistics pass has no values at all
}

template <class A>
void narrow(const typename A::T* from, Type type, index n, void* target) {
  using T = typename A::T;
  if constexpr (sizeof(T) == 4) {
    auto* to = static_cast<std::uint16_t*>(target);
    if (type == Type::bf16) {
      for (index i = 0; i < n; ++i) to[i] = to_bf16(from[i]);
      return;
    }
    if (type == Type::f16) {
      index i = 0;
      for (; i + A::W <= n; i += A::W) A::to_f16(A::load(from + i), to + i);
      for (; i < n; ++i) to[i] = to_f16(from[i]);
      return;
    }
  }
  if (n) std::memcpy(target, from, static_cast<std::size_t>(n) * sizeof(T));
}

template <class T>
bool stored_as(Type type) {
  return type == (sizeof(T) == 8 ? Type::f64 : Type::f32);
}

// Rows [o, o + count) of W as floats, `step` apart; where outputs lie side by side, turned a square of numbers at a
// time, with the next outputs prefetched.
template <class A>
void weight_rows(const Linear& linear, index o, index count, typename A::T* to, index step) {
  using T = typename A::T;
  constexpr int W = A::W;
  const index size = bytes(linear.type);
  const auto* from = static_cast<const char*>(linear.weight) + o * linear.weight_row * size;
  if (linear.weight_column == 1) {
    for (index i = 0; i < count; ++i)
      widen<A>(from + i * linear.weight_row * size, linear.type, linear.inputs, to + i * step);
    return;
  }
  const auto read = [&](const char* at, int n) -> typename A::F {
    if (n == W && stored_as<T>(linear.type)) return A::load(reinterpret_cast<const T*>(at));
    if constexpr (sizeof(T) == 4) {
      if (n == W && linear.type == Type::bf16) return A::from_bf16(reinterpret_cast<const std::uint16_t*>(at));
      if (n == W && linear.type == Type::f16) return A::from_f16(reinterpret_cast<const std::uint16_t*>(at));
    }
    T row[W] = {};
    widen<A>(at, linear.type, n, row);
    return A::load(row);
  };
  for (index d = 0; d < linear.inputs; d += W)
    for (index i = 0; i < count; i += W) {
      const int across = static_cast<int>(count - i < W ? count - i : W);
      const int down = static_cast<int>(linear.inputs - d < W ? linear.inputs - d : W);
      const char* at = from + (d * linear.weight_column + i) * size;
      typename A::F square[W] = {};
      for (int r = 0; r < down; ++r, at += linear.weight_column * size)
        square[r] = read(at, across), prefetch(at + count * size);
      A::transpose(square);
      for (int c = 0; c < across; ++c) A::store_some(to + (i + c) * step + d, square[c], down);
    }
}

// The address of row `row` of head `head` in batch row `b`.
inline char* row_of(const View& view, Type type, index b, index head, index row) {
  return static_cast<char*>(view.data) + (b * view.batch + head * view.head + row * view.row) * bytes(type);
}

// The address of row i of x.
inline const void* x_row(const Linear& linear, index i) {
  const index at = i / linear.batch_rows * linear.x_batch + i % linear.batch_rows * linear.x_row;
  return static_cast<const char*>(linear.x) + at * bytes(linear.x_type);
}

}  // namespace
}  // namespace multihead
