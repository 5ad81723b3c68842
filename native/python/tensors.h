// torch's tensors, read as they are before any address is used.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>
#include <vector>

#include "core/plan.h"

namespace multihead {

// Remembers torch's types, to be called once before anything is read. `in_c`: read tensors by the functions that torch
// offers in C from 2.10 on; without them, and where `in_c` is false, by their attributes.
void remember_torch(bool in_c);

// Remembers the type of a forward that a module may have of its own and still only multiply and add.
void remember_forward(nanobind::handle type);

// Why a call may not go straight to the kernel. `dispatched`: torch's dispatcher deals with it (a gradient, a subclass,
// a negative bit), so that the call may still reach the kernel through torch's operator.
struct Reason {
  std::string says;
  bool dispatched = false;
};

enum class Number { f32, f64, bf16, f16, boolean, i32, i64, i8 };

constexpr int most_axes = 4;

struct Tensor {
  void* data = nullptr;
  int axes = 0;
  index shape[most_axes] = {}, strides[most_axes] = {};  // in elements
  Number number = Number::f32;

  index count() const {
    index n = 1;
    for (int i = 0; i < axes; ++i) n *= shape[i];
    return n;
  }
  bool contiguous_from(int axis) const {  // nothing but this axis and those after it, one behind the other
    index expected = 1;
    for (int i = axes - 1; i >= axis; expected *= shape[i--])
      if (strides[i] != expected && shape[i] > 1) return false;
    return true;
  }
};

// Reads the tensors of one call and keeps them alive. Everything returns false, with the first reason kept, where the
// call may not go straight to the kernel: a tensor that is not torch's own, wants a gradient (where `gradients`), is
// not on the CPU, not strided, of a dtype that the kernel does not know, has its negative bit set, or is not made yet.
// A storage that does not hold what its tensor sees is an error. `made_here`: tensors that this package has just made,
// of which only shape and dtype are in question.
class Reader {
 public:
  explicit Reader(bool gradients, bool made_here = false) : gradients_(gradients), made_here_(made_here) {}

  bool tensor(nanobind::handle object, const char* name, Tensor& to);
  // The same in numbers of `number`, converted where they are not.
  bool floating(nanobind::handle object, const char* name, Number number, Tensor& to);
  // The same with the last axis contiguous, copied where it is not.
  bool rows(nanobind::handle object, const char* name, Tensor& to);

  bool refuse(std::string says, bool dispatched = false) {
    reason = {std::move(says), dispatched};
    return false;
  }

  Reason reason;
  std::vector<nanobind::object> kept;

 private:
  bool gradients_, made_here_;
};

// An output of attention, (B,H,Q,V), of q's dtype and not yet filled: positions before heads, so that step 5 is a view.
nanobind::object heads_like(nanobind::handle q, const Sizes& sizes);

// The same for rows: of the shape of x, but for the width.
nanobind::object rows_like(nanobind::handle x, index width);

// Strides of a tensor that broadcasts, right-aligned, to `sizes`: 0 where it has one for all. False where it does not.
bool broadcast(const Tensor& t, const index* sizes, int axes, index* strides);

// The weight and the bias, null where there is none, of an nn.Linear that only multiplies and adds: no hook, no forward
// of its own but one that is remembered, no parametrization. False for any other module. `called`: the module has been
// called, so that its hooks see what they are to see.
bool parameters_of_linear(PyObject* module, PyObject*& weight, PyObject*& bias, bool called = false);

// The weight, null where there is none, and the eps of an nn.RMSNorm over `width` numbers, of which the same is true.
bool parameters_of_norm(PyObject* module, index width, PyObject*& weight, nanobind::object& eps);

}  // namespace multihead
