// AVX-512: 32 registers of 16 floats hold 8 keys x 48 queries.
#pragma once

#include <immintrin.h>

#include "isa/lanes.h"

namespace multihead {
namespace {

struct Avx512 : Lanes<float, 16> {
  static constexpr int NR = 3;
  static constexpr int MR(int) { return 8; }

  static F all(float x) { return _mm512_set1_ps(x); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F fused(F a, F b, F c) { return fma(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F from_i8(const std::int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  static F from_f16(const std::uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static void to_f16(F x, std::uint16_t* p) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static F select(I mask, F a, F b) { return _mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), b, a); }
  static bool any(I mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }
  static F load_some(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store_some(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }

 private:
  static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
};

struct Avx512Double : Lanes<double, 8> {
  static constexpr int NR = 3;
  static constexpr int MR(int) { return 8; }
  static F fma(F a, F b, F c) { return _mm512_fmadd_pd(a, b, c); }
  static F fused(F a, F b, F c) { return fma(a, b, c); }
};

}  // namespace
}  // namespace multihead
