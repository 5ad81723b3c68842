#include "dispatch.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "features.h"

namespace multihead {
namespace {

bool has(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    bool present = false;
    for (const Feature* f = cpu_features(); f->name; ++f) present |= !std::strcmp(f->name, name) && f->present;
    if (!present) return false;
  }
  return true;
}

const Isa& find(const std::string& name) {
  std::string names;
  for (const Isa* isa : available()) {
    if (name == isa->name) return *isa;
    names += (names.empty() ? "" : ", ") + std::string(isa->name);
  }
  const bool known = name == "portable" || name == "avx2" || name == "avx512";
  throw std::invalid_argument("instruction set '" + name + "' is " + (known ? "not available here" : "unknown") +
                              ": this machine has " + names);
}

}  // namespace

std::vector<const Isa*> available() {
  std::vector<const Isa*> list{&isa_portable};
#if defined(__x86_64__)
  if (has({"avx2", "fma"})) list.push_back(&isa_avx2);
  if (has({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})) list.push_back(&isa_avx512);
#endif
  return list;
}

const Isa& choose(const std::string& name) {
  if (!name.empty()) return find(name);
  static const Isa& own = []() -> const Isa& {
    const char* asked = std::getenv("MULTIHEAD_ISA");
    return asked && *asked ? find(asked) : *available().back();
  }();
  return own;
}

}  // namespace multihead
