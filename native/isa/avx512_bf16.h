// AVX512-BF16: VDPBF16PS adds the products of pairs of bfloat16 numbers to floats, twice as many a cycle as FMA. It
// rounds each sum to nearest and takes denormal numbers, and gives them back, as 0.
#pragma once

#include "isa/avx512.h"
#include "isa/pairs.h"

namespace multihead {
namespace {

struct Bf16Pairs : PairsOf<Avx512> {
  using Vector = __m512i;  // not __m512bh: clang has it as numbers, and loses them where it does not optimise

  static Vector load(const Item* p) { return _mm512_loadu_si512(p); }
  static Vector all(const Item* p) {  // rows of halves need not lie at multiples of four bytes
    int x;
    std::memcpy(&x, p, sizeof x);
    __m512i pairs = _mm512_set1_epi32(x);
#if defined(__clang__) && __clang_major__ == 16
    asm("" : "+v"(pairs));  // clang 16 dies of a vector of bfloat16 that it knows to repeat one number
#endif
    return pairs;
  }
  static F multiply_add(Vector x, Vector y, F sum) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y); }

  // Two vectors of floats, rounded to nearest even, as pairs.
  static void store_pairs(F first, F second, Item* to) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(halves_to_pairs(), both));
  }

  // to[width] = pairs of two rows, either of which may be null for zeros. Returns whether all numbers are finite.
  static bool interleave(const Half* first, const Half* second, index width, Item* to) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i largest = _mm512_setzero_si512();
    for (index i = 0; i < width; i += A::W) {
      const __mmask16 some = width - i < A::W ? static_cast<__mmask16>((1u << (width - i)) - 1u) : __mmask16(0xffff);
      const __m512i low = first ? widened(some, first + i) : _mm512_setzero_si512();
      const __m512i high = second ? widened(some, second + i) : _mm512_setzero_si512();
      const __m512i pairs = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
      largest = _mm512_max_epu16(largest, _mm512_and_si512(pairs, magnitude));
      _mm512_mask_storeu_epi32(to + i, some, pairs);
    }
    return !_mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80));
  }

  // As a reader of rows (see kernel/readers.inl).
  using Column = Vector;
  static constexpr bool in_twos = true;

  static Vector load(const Number* p) { return _mm512_loadu_si512(p); }
  static Vector load_some(const Number* p, int n) { return _mm512_maskz_loadu_epi16((1u << n) - 1u, p); }
  static Vector load_kept(const Kept* p) { return load(p); }
  static Vector values(const Number* p, index stride, bool two, int n) {
    const __mmask16 some = static_cast<__mmask16>((1u << n) - 1u);
    const __m512i low = widened(some, p), high = two ? widened(some, p + stride) : _mm512_setzero_si512();
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
  // Of twice as many columns: whole vectors, and a permutation for each instead of four instructions.
  static void values_of_two(const Number* p, index stride, bool two, Vector& left, Vector& right) {
    const __m512i low = _mm512_loadu_si512(p), high = two ? _mm512_loadu_si512(p + stride) : _mm512_setzero_si512();
    left = _mm512_permutex2var_epi16(low, columns_to_pairs(0), high);
    right = _mm512_permutex2var_epi16(low, columns_to_pairs(16), high);
  }
  static Vector cleaned(Vector x) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    const __mmask32 finite = _mm512_cmpneq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
    return _mm512_maskz_mov_epi16(finite, x);
  }
  static Vector weight(const Kept* p) { return all(reinterpret_cast<const Item*>(p)); }
  static void keep(const float* from, index count, Kept* to) {
    for (index i = 0; i < count; i += A::W)
      _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
  }

 private:
  static __m512i widened(__mmask16 some, const Half* p) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p));
  }
  static __m512i columns_to_pairs(Half first) {  // of two vectors, the second's numbers from 32 on
    alignas(64) static constexpr Half order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                   8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    return _mm512_add_epi16(_mm512_load_si512(order), _mm512_set1_epi16(static_cast<short>(first)));
  }
  static __m512i halves_to_pairs() {
    alignas(64) static constexpr Half order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_load_si512(order);
  }
};

}  // namespace
}  // namespace multihead
