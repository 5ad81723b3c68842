// AVX512-VNNI: VPDPBUSD adds four products of an unsigned and a signed byte to an integer of 32 bits, 64 products
// an instruction, and rounds nothing.
#pragma once

#include "core/plan.h"
#include "isa/avx512.h"

namespace multihead {
namespace {

struct Vnni {
  using A = Avx512;
  using Ints = A::I;
  static constexpr int step = 64;  // bytes of a vector

  // Bytes [0, n) of at most 64, the rest 0; reads nothing beyond.
  static Ints load_some(const std::int8_t* p, int n) {
    return n == step ? (Ints)_mm512_loadu_si512(p) : (Ints)_mm512_maskz_loadu_epi8((1ull << n) - 1ull, p);
  }
  // Signed bytes plus 128, unsigned.
  static Ints raised(Ints x) { return (Ints)_mm512_xor_si512((__m512i)x, _mm512_set1_epi8(-128)); }
  static Ints dot(Ints unsigned_bytes, Ints signed_bytes, Ints sum) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
  }
  static Ints rounded(A::F x) { return (Ints)_mm512_cvtps_epi32(x); }  // to nearest even
  static A::F floats(Ints x) { return _mm512_cvtepi32_ps((__m512i)x); }
  static void store_bytes(void* p, Ints x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }

  // Column 16 b + 4 quarter + i of four rows, side by side in lane 4 b + i.
  template <int quarter>
  static Ints columns(const Ints (&row)[4]) {
    const __m512i a = (__m512i)row[0], b = (__m512i)row[1], c = (__m512i)row[2], d = (__m512i)row[3];
    const __m512i ab = quarter < 2 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
    const __m512i cd = quarter < 2 ? _mm512_unpacklo_epi8(c, d) : _mm512_unpackhi_epi8(c, d);
    return (Ints)(quarter % 2 ? _mm512_unpackhi_epi16(ab, cd) : _mm512_unpacklo_epi16(ab, cd));
  }
  static index place_of(index column) {  // in four vectors of columns, one behind the other
    return column / 64 * 64 + column % 16 / 4 * 16 + column % 64 / 16 * 4 + column % 4;
  }
};

}  // namespace
}  // namespace multihead
