#include "core/features.h"

#include <cstddef>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace multihead {
namespace {

#if defined(__x86_64__) || defined(__i386__)

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  Leaf(unsigned leaf, unsigned sub) { __get_cpuid_count(leaf, sub, &eax, &ebx, &ecx, &edx); }
};

bool bit(unsigned word, int position) { return (word >> position) & 1u; }

// The register files the operating system saves on a context switch: without its consent a CPU flag means nothing.
unsigned long long saved_state(const Leaf& basic) {
  if (!bit(basic.ecx, 27)) return 0;  // OSXSAVE
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}

bool intel() {
  const Leaf vendor(0, 0);  // "GenuineIntel"
  return vendor.ebx == 0x756e6547 && vendor.edx == 0x49656e69 && vendor.ecx == 0x6c65746e;
}

// Bytes of a core's first-level cache of data, which Intel and AMD describe alike, in leaves of their own.
unsigned first_level_bytes() {
  for (unsigned sub = 0; sub < 8; ++sub) {
    const Leaf cache(intel() ? 4u : 0x8000001du, sub);
    const unsigned type = cache.eax & 31u, level = (cache.eax >> 5) & 7u;
    if (type == 0) break;  // no more caches, or a CPU that does not say
    if (type != 1 || level != 1) continue;
    const unsigned ways = (cache.ebx >> 22) + 1, parts = ((cache.ebx >> 12) & 1023u) + 1,
                   line = (cache.ebx & 4095u) + 1;
    return ways * parts * line * (cache.ecx + 1);
  }
  return 0;
}

const Feature* detect() {
  static Feature list[13];
  const Leaf basic(1, 0), extended(7, 0), more(7, 1);
  const unsigned long long saved = saved_state(basic);
  const bool ymm = (saved & 0x6) == 0x6, zmm = ymm && (saved & 0xe0) == 0xe0, tiles = (saved & 0x60000) == 0x60000;
  Feature* next = list;
  *next++ = {"avx2", ymm && bit(extended.ebx, 5)};
  *next++ = {"fma", ymm && bit(basic.ecx, 12)};
  *next++ = {"f16c", ymm && bit(basic.ecx, 29)};
  *next++ = {"avx512f", zmm && bit(extended.ebx, 16)};
  *next++ = {"avx512bw", zmm && bit(extended.ebx, 30)};
  *next++ = {"avx512dq", zmm && bit(extended.ebx, 17)};
  *next++ = {"avx512vl", zmm && bit(extended.ebx, 31)};
  *next++ = {"avx512_vnni", zmm && bit(extended.ecx, 11)};
  *next++ = {"avx512_bf16", zmm && bit(more.eax, 5)};
  *next++ = {"avx512_fp16", zmm && bit(extended.edx, 23)};
  *next++ = {"amx_tile", tiles && bit(extended.edx, 24)};
  *next++ = {"amx_bf16", tiles && bit(extended.edx, 22)};
  *next = {nullptr, false};
  return list;
}

#elif defined(__aarch64__)

bool intel() { return false; }
unsigned first_level_bytes() { return 0; }

// Linux tells it by a bit, macOS by a name; elsewhere it is taken to be absent.
[[maybe_unused]] bool asked([[maybe_unused]] unsigned long which, [[maybe_unused]] unsigned long bit,
                            [[maybe_unused]] const char* name) {
#if defined(__linux__)
  return (getauxval(which) >> bit) & 1u;
#elif defined(__APPLE__)
  int found = 0;
  std::size_t size = sizeof found;
  return sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found;
#else
  return false;
#endif
}

const Feature* detect() {
  constexpr unsigned long hwcap = 16, hwcap2 = 26;  // AT_HWCAP and AT_HWCAP2
  static const Feature list[] = {{"neon", true},    // every AArch64 CPU has it
                                 {"asimdhp", asked(hwcap, 10, "hw.optional.arm.FEAT_FP16")},
                                 {"asimdfhm", asked(hwcap, 23, "hw.optional.arm.FEAT_FHM")},
                                 {"sve", asked(hwcap, 22, "hw.optional.arm.FEAT_SVE")},
                                 {"bf16", asked(hwcap2, 14, "hw.optional.arm.FEAT_BF16")},
                                 {nullptr, false}};
  return list;
}

#else

bool intel() { return false; }
unsigned first_level_bytes() { return 0; }

const Feature* detect() {
  static const Feature list[] = {{nullptr, false}};
  return list;
}

#endif

}  // namespace

bool cpu_is_intel() {
  static const bool found = intel();
  return found;
}

bool first_level_is_large() {
  static const bool found = first_level_bytes() >= 48 * 1024;
  return found;
}

const Feature* cpu_features() {
  static const Feature* const found = detect();
  return found;
}

}  // namespace multihead
