// The table of cases that tests/native/export.py writes: tensors, numbers, and what must come out of them, each with
// the error it may have.
#pragma once

#include <istream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/plan.h"

namespace multihead {

// Memory that ends where a page begins that nobody may touch.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes);
  void* data() const { return data_; }

 private:
  std::shared_ptr<void> whole_;
  void* data_;
};

// Contiguous numbers: f32, f64, bf16 or f16, or of masks bool, i32 or i64.
struct Tensor {
  std::string type;
  std::vector<index> shape;
  Guarded memory;

  Tensor(const std::string& type, const std::vector<index>& shape);
  index count() const;
  std::size_t bytes() const;
  Type number() const;  // its type; throws where that is none of a call's
  double at(index i) const;
  // Of each axis of `axes`, aligned to the right: how far apart neighbours lie, 0 where all share one.
  std::vector<index> strides(std::size_t axes) const;
};

struct Expected {
  std::string name;
  double bound;
  Tensor exact;
};

struct Case {
  std::string kind, why;
  std::map<std::string, double> numbers;
  std::map<std::string, Tensor> tensors;
  std::vector<Expected> expected;

  double number(const std::string& name, double otherwise) const;
  const Tensor* tensor(const std::string& name) const;  // or null
  const Tensor& needed(const std::string& name) const;  // throws
};

// The next case, or false at the end. Throws std::runtime_error where the file is not such a table.
bool read(std::istream& from, Case& into);

}  // namespace multihead
