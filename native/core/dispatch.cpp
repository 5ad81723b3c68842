#include "core/dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <stdexcept>

#include "core/features.h"

namespace multihead {
namespace {

// `needed`: names with spaces between them.
[[maybe_unused]] bool has(const std::vector<std::string>& features, const char* needed) {
  std::istringstream names(needed);
  for (std::string name; names >> name;)
    if (std::find(features.begin(), features.end(), name) == features.end()) return false;
  return true;
}

// `source` begins the message: who has named it.
const Isa& find(const std::string& name, const std::string& source) {
  std::string names;
  for (const Isa* isa : available()) {
    if (name == isa->name) return *isa;
    names += (names.empty() ? "" : ", ") + std::string(isa->name);
  }
  const char* all[] = {"portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "neon", "neon_bf16"};
  const bool known = std::find(std::begin(all), std::end(all), name) != std::end(all);
  throw std::invalid_argument(source + "instruction set '" + name + "' is " +
                              (known ? "not available here" : "unknown") + ": this machine has " + names);
}

}  // namespace

std::vector<const Isa*> available_with([[maybe_unused]] const std::vector<std::string>& features) {
  std::vector<const Isa*> list{&isa_portable};
#if defined(__x86_64__)
  if (has(features, MULTIHEAD_AVX2_FEATURES)) list.push_back(&isa_avx2);
  if (has(features, MULTIHEAD_AVX512_FEATURES)) list.push_back(&isa_avx512);
  if (has(features, MULTIHEAD_AVX512_VNNI_FEATURES)) list.push_back(&isa_avx512_vnni);
  if (has(features, MULTIHEAD_AVX512_BF16_FEATURES)) list.push_back(&isa_avx512_bf16);
#elif defined(__aarch64__)
  if (has(features, MULTIHEAD_NEON_FEATURES)) list.push_back(&isa_neon);
  if (has(features, MULTIHEAD_NEON_BF16_FEATURES)) list.push_back(&isa_neon_bf16);
#endif
  return list;
}

std::vector<const Isa*> available() {
  std::vector<std::string> features;
  for (const Feature* f = cpu_features(); f->name; ++f)
    if (f->present) features.push_back(f->name);
  return available_with(features);
}

const Isa& choose(const std::string& name) {
  if (!name.empty()) return find(name, "");
  static const Isa& own = []() -> const Isa& {
    const char* asked = std::getenv("MULTIHEAD_ISA");
    return asked && *asked ? find(asked, "MULTIHEAD_ISA=" + std::string(asked) + ": ") : *available().back();
  }();
  return own;
}

}  // namespace multihead
