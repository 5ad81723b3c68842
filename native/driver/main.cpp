// The core tested without Python: `driver TABLE` runs every case of a table that tests/native/export.py has written on
// every instruction set of this CPU, and `driver --list` names these, the one that runs by itself first.
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <stdexcept>

#include "core/dispatch.h"
#include "driver/runs.h"

namespace multihead {
namespace {

// The largest error; throws where NaN or infinities are in other places.
double error_of(const Tensor& found, const Tensor& exact) {
  if (found.shape != exact.shape) throw std::runtime_error("is of another shape");
  double worst = 0;
  for (index i = 0; i < exact.count(); ++i) {
    const double a = found.at(i), b = exact.at(i);
    if (std::isnan(a) != std::isnan(b)) throw std::runtime_error("has NaN in other places");
    if (std::isinf(b) ? a != b : std::isinf(a)) throw std::runtime_error("has infinities in other places");
    if (std::isfinite(b)) worst = std::fmax(worst, std::fabs(a - b));
  }
  return worst;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.memory.data(), b.memory.data(), a.bytes()) == 0;
}

// How much further off than the table says ours may be. It holds what a lens tells of bfloat16 to float32's digits;
// BFDOT rounds twice for each pair, to odd: a whole unit each time where float32's is half of one. Both are far within
// the rule, which is bfloat16's own rounding.
double rounding_of(const Case& the, const Isa& isa) {
  const std::string lens = "bf16, look";
  const bool is_lens =
      the.why.size() >= lens.size() && !the.why.compare(the.why.size() - lens.size(), lens.size(), lens);
  return is_lens && !std::strcmp(isa.name, "neon_bf16") ? 4 : 1;
}

// What is wrong with a case, or nothing.
std::string judge(const Case& the, const Isa& isa) {
  const auto found = run(the, isa, 1), again = run(the, isa, 3);
  for (const Expected& expected : the.expected) {
    const Tensor& ours = found.at(expected.name);
    try {
      const double error = error_of(ours, expected.exact);
      const double allowed = expected.bound * rounding_of(the, isa);
      if (!(error <= allowed))
        throw std::runtime_error("is off by " + std::to_string(error / allowed) + " times what is allowed");
    } catch (const std::runtime_error& wrong) {
      return expected.name + " " + wrong.what();
    }
    if (!same_bits(ours, again.at(expected.name))) return expected.name + " depends on the number of threads";
  }
  return "";
}

int list() {
  std::cout << choose("").name << ":";
  for (const Isa* isa : available()) std::cout << " " << isa->name;
  std::cout << "\n";
  return 0;
}

int run_table(const char* path) {
  index failed = 0;
  for (const Isa* isa : available()) {
    std::ifstream table(path, std::ios::binary);
    if (!table) throw std::runtime_error(std::string("no file ") + path);
    index cases = 0;
    for (Case the; read(table, the); ++cases)
      if (const std::string wrong = judge(the, *isa); !wrong.empty())
        ++failed, std::cout << isa->name << ": " << the.kind << " " << the.why << ": " << wrong << std::endl;
    if (!cases) throw std::runtime_error(std::string("no case in ") + path);
    std::cout << isa->name << ": " << cases << " cases" << std::endl;
  }
  std::cout << (failed ? std::to_string(failed) + " failed" : "all within the bound") << "\n";
  return failed ? 1 : 0;
}

int run_arguments(int count, char** arguments) {
  try {
    if (count == 2) return std::strcmp(arguments[1], "--list") ? run_table(arguments[1]) : list();
    std::cerr << "expected: driver TABLE, or driver --list\n";
  } catch (const std::exception& error) {
    std::cerr << "driver: " << error.what() << "\n";
  }
  return 2;
}

}  // namespace
}  // namespace multihead

int main(int count, char** arguments) { return multihead::run_arguments(count, arguments); }
