// NEON, which every AArch64 CPU has: 32 registers of 4 floats hold 8 keys x 12 queries.
#pragma once

#include <arm_neon.h>

#include "isa/lanes.h"

namespace multihead {
namespace {

// `max` stays that of Lanes: the instruction for it gives NaN where either number is.
struct Neon : Lanes<float, 4> {
  static constexpr int NR = 3;
  static constexpr int MR(int) { return 8; }

  static F all(float x) { return vdupq_n_f32(x); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F fused(F a, F b, F c) { return fma(a, b, c); }
  static F from_f16(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static bool any(I mask) { return vmaxvq_u32((uint32x4_t)mask) != 0; }
  static F sums(F (&r)[4]) { return vpaddq_f32(vpaddq_f32(r[0], r[1]), vpaddq_f32(r[2], r[3])); }
};

struct NeonDouble : Lanes<double, 2> {
  static constexpr int NR = 3;
  static constexpr int MR(int) { return 8; }
  static F fma(F a, F b, F c) { return vfmaq_f64(c, a, b); }
  static F fused(F a, F b, F c) { return fma(a, b, c); }
};

}  // namespace
}  // namespace multihead
