// What calls of attention and of the layer have in common: their numbers, options and projections, read and checked.
#pragma once

#include <limits>

#include "python/calls.h"

namespace multihead {

constexpr index most_rows = std::numeric_limits<std::int32_t>::max() / 2;  // keys, or query rows that share them

inline nanobind::object as_tuple(const Reason& reason) { return nanobind::make_tuple(reason.says, reason.dispatched); }

// Names that are looked up in every call, made once.
class Name {
 public:
  explicit Name(const char* text) : text_(text) {}
  PyObject* ptr() const {
    if (!made_) made_ = PyUnicode_InternFromString(text_);
    return made_;
  }

 private:
  const char* text_;
  mutable PyObject* made_ = nullptr;
};

nanobind::object attribute(nanobind::handle object, const Name& name);

// These return false, with the reason in `reader`, where the call may not go straight to the kernel.

bool number(Reader& reader, nanobind::handle given, const char* name, double& to);

// The scale, 1/√D unless given, and the softcap.
bool options(Reader& reader, nanobind::handle scale, nanobind::handle softcap, index D, Plan& plan);

bool sinks(Reader& reader, nanobind::handle given, Plan& plan);

// Whether numbers are float32 or half precision, which is what products are made for.
inline bool multiplied(Number number) { return number <= Number::f16 && number != Number::f64; }

// Rows (N, width) or (B, N, width) that products are made for.
bool tokens(Reader& reader, nanobind::handle given, const char* name, Tensor& t);

// The weight (outputs, inputs) and the bias, or null, of a product.
bool projection(Reader& reader, PyObject* weight, PyObject* bias, index inputs, Projection& to, Tensor& matrix,
                bool turned = false);

// Where a tensor lies that is to be written to, contiguous, of this type and so many numbers. An error where it is not.
void* room(nanobind::handle given, const char* name, Type type, index count);

[[noreturn]] void refuse(const std::string& message);

[[noreturn]] void refuse_form(const char* name);

}  // namespace multihead
