// Vectors of W numbers, by the compiler's own vector types: the whole generic kernel is written on these operations.
// An instruction set overrides only what the compiler does not find by itself. Everything here has internal linkage,
// because the same names are compiled with different instructions in each translation unit.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace multihead {
namespace {

template <class T>
struct Bits;
template <>
struct Bits<float> {
  using type = std::int32_t;
};
template <>
struct Bits<double> {
  using type = std::int64_t;
};

template <class Number, int Width>
struct Lanes {
  using T = Number;
  using Int = typename Bits<T>::type;
  static constexpr int W = Width;
  static constexpr int line =
      64 / sizeof(T) > Width ? 64 / sizeof(T) : Width;  // numbers that come from memory together
  typedef T F __attribute__((vector_size(Width * sizeof(T))));
  typedef Int I __attribute__((vector_size(Width * sizeof(T))));
  typedef std::make_unsigned_t<Int> U __attribute__((vector_size(Width * sizeof(T))));  // wraps around, as I must not

  static F load(const T* p) {
    F x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  static void store(T* p, F x) { std::memcpy(p, &x, sizeof x); }
  static F all(T x) { return x - F{}; }
  static I all_int(Int x) { return x - I{}; }
  static F fma(F a, F b, F c) { return a * b + c; }
  // a * b + c, rounded once: as fma is on every instruction set that has it, and by a wider number where there is one.
  static F fused(F a, F b, F c) {
    if constexpr (sizeof(T) == 8) return a * b + c;
    F x;
    for (int i = 0; i < W; ++i) x[i] = static_cast<T>(double(a[i]) * double(b[i]) + double(c[i]));
    return x;
  }
  static F max(F a, F b) { return a > b ? a : b; }  // where either is NaN: b
  static F select(I mask, F a, F b) { return mask ? a : b; }

  // The first n of W numbers, the rest 0; reads nothing beyond.
  static F load_some(const T* p, int n) {
    F x = {};
    for (int i = 0; i < n; ++i) x[i] = p[i];
    return x;
  }
  static void store_some(T* p, F x, int n) {
    for (int i = 0; i < n; ++i) p[i] = x[i];
  }
  static bool any(I mask) {
    Int found = 0;
    for (int i = 0; i < W; ++i) found |= mask[i];
    return found != 0;
  }
  // W integers of a byte.
  static F from_i8(const std::int8_t* p) {
    typedef std::int8_t Bytes __attribute__((vector_size(Width)));
    Bytes x;
    std::memcpy(&x, p, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, I), F);
  }
  // W half-precision numbers, widened.
  static F from_bf16(const std::uint16_t* p) {
    typedef std::uint16_t Halves __attribute__((vector_size(Width * 2)));
    Halves x;
    std::memcpy(&x, p, sizeof x);
    return (F)(__builtin_convertvector(x, U) << 16);
  }
  // Shifted into place the exponent is 112 too small, for denormals too; inf and NaN need the full exponent.
  static F from_f16(const std::uint16_t* p) {
    typedef std::uint16_t Halves __attribute__((vector_size(Width * 2)));
    Halves x;
    std::memcpy(&x, p, sizeof x);
    const U bits = __builtin_convertvector(x, U), magnitude = bits & 0x7fff;
    const F finite = (F)(magnitude << 13) * all(T(0x1p112f));
    const U special = (U)(magnitude >= 0x7c00) & 0x7f800000u;
    return (F)((U)finite | special | ((bits & 0x8000) << 16));
  }
  // Rounded to nearest even; NaN stays one.
  static void to_f16(F x, std::uint16_t* p) {
    typedef std::uint16_t Halves __attribute__((vector_size(Width * 2)));
    const U bits = (U)x, magnitude = bits & 0x7fffffffu, shifted = magnitude - (112u << 23);
    const U normal = (shifted + 0xfffu + ((shifted >> 13) & 1u)) >> 13;
    const U small = (U)((F)magnitude + all(T(0.5f))) - (U)all(T(0.5f));  // the sum rounds at its last bit, 2^-24
    const U large = (U)(magnitude > 0x7f800000u) & 0x200u;
    U half = (U)(magnitude < 0x38800000u) ? small : normal;         // 2^-14
    half = (U)(magnitude >= 0x477ff000u) ? 0x7c00u | large : half;  // 65520
    const Halves x16 = __builtin_convertvector(half | ((bits >> 16) & 0x8000u), Halves);
    std::memcpy(p, &x16, sizeof x16);
  }
  static T sum(F x) {  // pairwise, in an order that does not depend on the instruction set's W beyond its value
    T part[W];
    store(part, x);
    for (int half = W / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) part[i] += part[i + half];
    return part[0];
  }

  // Rows become columns: stage S swaps one bit of the row number with the same bit of the lane number.
  static void transpose(F (&r)[W]) { exchange<1>(r, std::make_integer_sequence<int, W>()); }

  // The sum over lanes of each of W vectors, in lane order.
  static F sums(F (&r)[W]) { return folded<1>(r, std::make_integer_sequence<int, W>()); }

 private:
  // Lanes J of a and b, those of b counted from W on.
  template <int... J>
  static F shuffled(F a, F b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, J...);
#else
    return __builtin_shuffle(a, b, I{J...});
#endif
  }

  template <int S, int... J>
  static F folded(F* r, std::integer_sequence<int, J...> lanes) {
    if constexpr (S < W) {
#pragma GCC unroll 16
      for (int i = 0; i < W / S; i += 2)
        r[i / 2] = shuffled<((J & S) ? W + J : J)...>(r[i], r[i + 1]) +  // every lane stays: a blend
                   shuffled<((J & S) ? W + J - S : J + S)...>(r[i], r[i + 1]);
      return folded<2 * S>(r, lanes);
    } else {
      return r[0];
    }
  }

  template <int S, int... J>
  static void exchange(F (&r)[W], std::integer_sequence<int, J...> lanes) {
    if constexpr (S < W) {
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        if (i & S) continue;
        const F a = r[i], b = r[i + S];
        r[i] = shuffled<((J & S) ? W + J - S : J)...>(a, b);
        r[i + S] = shuffled<((J & S) ? W + J : J + S)...>(a, b);
      }
      exchange<2 * S>(r, lanes);
    }
  }
};

// Any address is allowed. `Near`: into the first-level cache, else the second.
template <bool Near = false>
inline __attribute__((always_inline)) void prefetch(const void* p) {
  __builtin_prefetch(p, 0, Near ? 3 : 2);
}

// 2^(x * unit), which is where every weight comes from; at most 0.8 units in the last place off, whatever the size of
// x, because the product is never rounded by itself. From 2^-126.5 down (2^-1022.5 in double) it is exactly 0; NaN
// stays.
template <class A>
class PowersOfTwo {
 public:
  using T = typename A::T;
  using F = typename A::F;
  using U = typename A::U;

  // Of a positive unit, neither so small nor so large that the numbers below overflow: see Plan::plain.
  explicit PowersOfTwo(T unit) : unit(A::all(unit)), lowest(A::all(zero / unit)) {}

  // log2 of the weight: x * unit, at least `zero`, so that for a weight of 0 the product weight * log2(weight) is 0,
  // not 0 * -inf.
  F power(F x) const { return A::max(A::all(zero), x * unit); }

  F operator()(F x) const;

 private:
  static constexpr bool wide = sizeof(T) == 8;
  static constexpr T zero = wide ? -1023 : -127;  // 2^ of this, and of anything below, is exactly 0
  F unit, lowest;
};

template <class A>
inline __attribute__((always_inline)) typename A::F PowersOfTwo<A>::operator()(F x) const {
  constexpr int mantissa = wide ? 52 : 23;
  constexpr std::make_unsigned_t<typename A::Int> one = wide ? 1023 : 127;
  constexpr T magic = wide ? T(6755399441055744.0) : T(12582912.0);  // adding it rounds to an integer in the low bits
  x = A::max(lowest, x);
  const F shifted = A::fma(x, unit, A::all(magic));
  const F f = A::fused(x, unit, A::all(magic) - shifted);
  F p;
  if constexpr (wide) {
    // Taylor: on +-1/2 the first term left out is below 4e-18.
    constexpr double c[] = {1.0,
                            0.6931471805599453,
                            0.2402265069591007,
                            0.05550410866482158,
                            0.009618129107628477,
                            0.0013333558146428443,
                            0.0001540353039338161,
                            1.525273380405984e-05,
                            1.3215486790144305e-06,
                            1.0178086009239696e-07,
                            7.0549116208011233e-09,
                            4.4455382718708114e-10,
                            2.5678435993488202e-11,
                            1.3691488853904128e-12};
    p = A::all(c[13]);
#pragma GCC unroll 16
    for (int i = 12; i >= 0; --i) p = A::fma(p, f, A::all(c[i]));
  } else {
    // Minimax on +-1/2: relative error 1.9e-9, so that only rounding is left.
    constexpr float c[] = {1.0f,         0.6931472057371945f,    0.2402264689047752f,    0.055503287770841354f,
                           0.009618489f, 0.0013399931180900874f, 0.00015345807425801074f};
    p = A::all(c[6]);
#pragma GCC unroll 16
    for (int i = 5; i >= 0; --i) p = A::fma(p, f, A::all(c[i]));
  }
  const U power = ((U)shifted + one) << mantissa;  // the low bits of `shifted` are the integer; the rest shifts out
  return p * (F)power;
}

}  // namespace
}  // namespace multihead
