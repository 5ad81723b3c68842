// NEON with BFDOT (Armv8.6): adds the products of pairs of bfloat16 numbers to floats, twice as many at a time as FMLA.
// It rounds the sum of a pair, and then the whole, to odd, and takes denormal numbers, and gives them back, as 0.
#pragma once

#include "isa/neon.h"
#include "isa/pairs.h"

namespace multihead {
namespace {

struct NeonPairs : PairsOf<Neon> {
  using Vector = bfloat16x8_t;

  static Vector load(const Item* p) { return load(reinterpret_cast<const Half*>(p)); }
  static Vector all(const Item* p) {  // rows of halves need not lie at multiples of four bytes
    Item x;
    std::memcpy(&x, p, sizeof x);
    return vreinterpretq_bf16_u32(vdupq_n_u32(x));
  }
  static F multiply_add(Vector x, Vector y, F sum) { return vbfdotq_f32(sum, x, y); }

  // Two vectors of floats, rounded to nearest even, as pairs.
  static void store_pairs(F first, F second, Item* to) {
    vst1q_u16(reinterpret_cast<Half*>(to), pairs(rounded(first), rounded(second)));
  }

  // to[width] = pairs of two rows, either of which may be null for zeros. Returns whether all numbers are finite.
  static bool interleave(const Half* first, const Half* second, index width, Item* to) {
    uint16x8_t largest = vdupq_n_u16(0);
    for (index i = 0; i < width; i += A::W) {
      const int n = width - i < A::W ? static_cast<int>(width - i) : A::W;
      const uint16x8_t both =
          pairs(first ? some(first + i, n) : vdup_n_u16(0), second ? some(second + i, n) : vdup_n_u16(0));
      largest = vmaxq_u16(largest, vandq_u16(both, vdupq_n_u16(0x7fff)));
      if (n == A::W)
        vst1q_u16(reinterpret_cast<Half*>(to + i), both);
      else
        std::memcpy(to + i, &both, sizeof(Item) * static_cast<std::size_t>(n));
    }
    return vmaxvq_u16(largest) < 0x7f80;
  }

  // As a reader of rows (see kernel/readers.inl).
  using Column = Vector;
  static constexpr bool in_twos = false;

  static Vector load(const Number* p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }
  static Vector load_some(const Number* p, int n) {
    Number numbers[step] = {};
    std::memcpy(numbers, p, sizeof(Number) * static_cast<std::size_t>(n));
    return load(numbers);
  }
  static Vector load_kept(const Kept* p) { return load(p); }
  static Vector values(const Number* p, index stride, bool two, int n) {
    return vreinterpretq_bf16_u16(pairs(some(p, n), two ? some(p + stride, n) : vdup_n_u16(0)));
  }
  static Vector cleaned(Vector x) {
    const uint16x8_t bits = vreinterpretq_u16_bf16(x), exponent = vdupq_n_u16(0x7f80);
    return vreinterpretq_bf16_u16(vbicq_u16(bits, vceqq_u16(vandq_u16(bits, exponent), exponent)));
  }
  static Vector weight(const Kept* p) { return all(reinterpret_cast<const Item*>(p)); }
  static void keep(const float* from, index count, Kept* to) {
    for (index i = 0; i < count; i += A::W) vst1_u16(to + i, rounded(vld1q_f32(from + i)));
  }

 private:
  static uint16x4_t rounded(F x) { return vreinterpret_u16_bf16(vcvt_bf16_f32(x)); }
  static uint16x8_t pairs(uint16x4_t first, uint16x4_t second) {
    return vcombine_u16(vzip1_u16(first, second), vzip2_u16(first, second));
  }
  static uint16x4_t some(const Half* p, int n) {  // the first n of W, the rest 0
    if (n == A::W) return vld1_u16(p);
    Half halves[A::W] = {};
    std::memcpy(halves, p, sizeof(Half) * static_cast<std::size_t>(n));
    return vld1_u16(halves);
  }
};

}  // namespace
}  // namespace multihead
