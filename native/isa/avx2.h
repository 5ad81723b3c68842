// AVX2 and FMA: 16 registers of 8 floats hold 4 keys x 24 queries.
#pragma once

#include <immintrin.h>

#include "isa/lanes.h"

namespace multihead {
namespace {

struct Avx2 : Lanes<float, 8> {
  static constexpr int NR = 3;
  static constexpr int MR(int nr) { return nr == 1 ? 8 : 4; }

  static F all(float x) { return _mm256_set1_ps(x); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F fused(F a, F b, F c) { return fma(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F from_i8(const std::int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
  static F from_f16(const std::uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static void to_f16(F x, std::uint16_t* p) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static bool any(I mask) { return _mm256_movemask_ps((F)mask) != 0; }
  static F load_some(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  static void store_some(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }

  static F sums(F (&r)[8]) {
    F pair[4], four[2];
    for (int i = 0; i < 4; ++i)
      pair[i] = _mm256_shuffle_ps(r[2 * i], r[2 * i + 1], 0x88) + _mm256_shuffle_ps(r[2 * i], r[2 * i + 1], 0xdd);
    for (int i = 0; i < 2; ++i)
      four[i] =
          _mm256_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0x88) + _mm256_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0xdd);
    return _mm256_permute2f128_ps(four[0], four[1], 0x20) + _mm256_permute2f128_ps(four[0], four[1], 0x31);
  }

 private:
  static __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
};

struct Avx2Double : Lanes<double, 4> {
  static constexpr int NR = 3;
  static constexpr int MR(int nr) { return nr == 1 ? 8 : 4; }
  static F fma(F a, F b, F c) { return _mm256_fmadd_pd(a, b, c); }
  static F fused(F a, F b, F c) { return fma(a, b, c); }
};

}  // namespace
}  // namespace multihead
