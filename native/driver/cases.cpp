#include "driver/cases.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <sstream>
#include <stdexcept>

#include "kernel/convert.inl"

namespace multihead {
namespace {

std::size_t size_of(const std::string& type) {
  static const std::map<std::string, std::size_t> sizes = {{"f32", 4},  {"f64", 8}, {"bf16", 2}, {"f16", 2},
                                                           {"bool", 1}, {"i32", 4}, {"i64", 8}};
  const auto found = sizes.find(type);
  if (found == sizes.end()) throw std::runtime_error("a tensor of type '" + type + "'");
  return found->second;
}

template <class T>
T number_at(const void* data, index i) {
  T x;
  std::memcpy(&x, static_cast<const char*>(data) + i * static_cast<index>(sizeof(T)), sizeof x);
  return x;
}

Tensor read_tensor(std::istream& from, std::istringstream& line, const std::string& type) {
  std::vector<index> shape;
  for (index n; line >> n;) shape.push_back(n);
  Tensor t(type, shape);
  from.read(static_cast<char*>(t.memory.data()), static_cast<std::streamsize>(t.bytes()));
  if (!from || from.get() != '\n') throw std::runtime_error("a tensor ends early");
  return t;
}

}  // namespace

Guarded::Guarded(std::size_t bytes) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), used = (bytes + page - 1) / page * page;
  void* whole = mmap(nullptr, used + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (whole == MAP_FAILED || mprotect(static_cast<char*>(whole) + used, page, PROT_NONE))
    throw std::runtime_error("no memory");
  whole_ = std::shared_ptr<void>(whole, [size = used + page](void* p) { munmap(p, size); });
  data_ = static_cast<char*>(whole) + used - bytes;
}

Tensor::Tensor(const std::string& kind, const std::vector<index>& sizes)
    : type(kind), shape(sizes), memory(bytes() /* of the members before */) {}

index Tensor::count() const {
  index n = 1;
  for (const index size : shape) n *= size;
  return n;
}

std::size_t Tensor::bytes() const { return static_cast<std::size_t>(count()) * size_of(type); }

Type Tensor::number() const {
  if (type == "f32") return Type::f32;
  if (type == "f64") return Type::f64;
  if (type == "bf16") return Type::bf16;
  if (type == "f16") return Type::f16;
  throw std::runtime_error("a tensor of " + type + " where numbers are needed");
}

double Tensor::at(index i) const {
  const void* data = memory.data();
  if (type == "i64") return static_cast<double>(number_at<std::int64_t>(data, i));
  switch (number()) {
    case Type::f32:
      return number_at<float>(data, i);
    case Type::f64:
      return number_at<double>(data, i);
    case Type::bf16:
      return from_bf16(number_at<std::uint16_t>(data, i));
    default:
      return from_f16(number_at<std::uint16_t>(data, i));
  }
}

std::vector<index> Tensor::strides(std::size_t axes) const {
  std::vector<index> found(axes, 0);
  index stride = 1;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const index size = shape[shape.size() - 1 - i];
    if (size != 1) found[axes - 1 - i] = stride;
    stride *= size;
  }
  return found;
}

double Case::number(const std::string& name, double otherwise) const {
  const auto found = numbers.find(name);
  return found == numbers.end() ? otherwise : found->second;
}

const Tensor* Case::tensor(const std::string& name) const {
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : &found->second;
}

const Tensor& Case::needed(const std::string& name) const {
  const Tensor* found = tensor(name);
  if (!found) throw std::runtime_error(why + ": " + name + " is missing");
  return *found;
}

bool read(std::istream& from, Case& into) {
  into = {};
  std::string text, word, name, type;
  if (!std::getline(from, text)) return false;
  for (std::istringstream line(text);; std::getline(from, text), line = std::istringstream(text)) {
    if (!from || !(line >> word)) throw std::runtime_error("a case without an end");
    if (word == "case") {
      line >> into.kind;
      std::getline(line >> std::ws, into.why);
    } else if (word == "number") {
      line >> name;
      line >> into.numbers[name];
    } else if (word == "tensor") {
      line >> name >> type;
      into.tensors.emplace(name, read_tensor(from, line, type));
    } else if (word == "expect") {
      double bound;
      line >> name >> bound;
      into.expected.push_back({name, bound, read_tensor(from, line, "f64")});
    } else if (word == "end") {
      return true;
    } else {
      throw std::runtime_error("unknown word '" + word + "'");
    }
  }
}

}  // namespace multihead
