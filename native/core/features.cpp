#include "core/features.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
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

const Feature* detect() {
  static Feature list[12];
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
  *next++ = {"avx512_bf16", zmm && bit(more.eax, 5)};
  *next++ = {"avx512_fp16", zmm && bit(extended.edx, 23)};
  *next++ = {"amx_tile", tiles && bit(extended.edx, 24)};
  *next++ = {"amx_bf16", tiles && bit(extended.edx, 22)};
  *next = {nullptr, false};
  return list;
}

#elif defined(__aarch64__)

bool intel() { return false; }

const Feature* detect() {
  static const Feature list[] = {{"neon", true}, {nullptr, false}};  // every AArch64 CPU has it
  return list;
}

#else

bool intel() { return false; }

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

const Feature* cpu_features() {
  static const Feature* const found = detect();
  return found;
}

}  // namespace multihead
