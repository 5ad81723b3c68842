#include "python/reading.h"

#include <nanobind/stl/string.h>

#include <cmath>

namespace nb = nanobind;

namespace multihead {
nb::object attribute(nb::handle object, const Name& name) {
  PyObject* found = PyObject_GetAttr(object.ptr(), name.ptr());
  if (!found) throw nb::python_error();
  return nb::steal(found);
}

bool number(Reader& reader, nb::handle given, const char* name, double& to) {
  const bool integer = PyLong_Check(given.ptr()) && !PyBool_Check(given.ptr());
  if (!integer && !PyFloat_Check(given.ptr())) return reader.refuse(std::string(name) + " is not a number");
  to = PyFloat_AsDouble(given.ptr());
  if (to == -1 && PyErr_Occurred()) {  // an integer that is too large
    PyErr_Clear();
    return reader.refuse(std::string(name) + " is beyond every float");
  }
  return std::isfinite(to) || reader.refuse(std::string(name) + " is not finite");
}

bool tokens(Reader& reader, nb::handle given, const char* name, Tensor& t) {
  if (!reader.tensor(given, name, t)) return false;
  if (!multiplied(t.number) || (t.axes != 2 && t.axes != 3) || t.count() < 1)
    return reader.refuse(std::string(name) + " is not rows of float32, bfloat16 or float16, or has none");
  return t.contiguous_from(t.axes - 1) || reader.refuse(std::string(name) + " is not contiguous along its rows");
}

// How far a softcap stays from the ends of the dtype of scores, as a factor: `check_numbers` in sizes.py says why.
constexpr double softcap_room = 1 << 24;

bool options(Reader& reader, nb::handle scale, nb::handle softcap, const index D, Plan& plan) {
  const bool wide = plan.type == Type::f64;
  const double least = wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  const double most = wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  plan.scale = std::pow(static_cast<double>(D), -0.5);
  if (!scale.is_none() && !number(reader, scale, "scale", plan.scale)) return false;
  if (std::abs(plan.scale) > most) return reader.refuse("scale is beyond what scores are computed in");
  if (softcap.is_none()) return true;
  if (!number(reader, softcap, "softcap", plan.softcap)) return false;
  return (plan.softcap >= least * softcap_room && plan.softcap <= most / softcap_room) ||
         reader.refuse("softcap is not above 0, or too near the ends of what scores are computed in");
}

bool sinks(Reader& reader, nb::handle given, Plan& plan) {
  if (given.is_none()) return true;
  Tensor t;
  if (!reader.floating(given, "sinks", wide(plan.type), t)) return false;
  if (t.axes != 1 || t.shape[0] != plan.sizes.H) return reader.refuse("sinks are not one number for each head");
  const nb::object kept = reader.kept.back();
  if (!t.contiguous_from(0) && !reader.rows(kept, "sinks", t)) return false;
  plan.sinks = t.data;
  return true;
}

bool projection(Reader& reader, PyObject* weight, PyObject* bias, index inputs, Projection& to, Tensor& matrix,
                bool turned) {
  Tensor shift;
  if (!reader.tensor(weight, "a projection's weight", matrix)) return false;
  const bool fits = multiplied(matrix.number) && matrix.axes == 2 && matrix.shape[1] == inputs && matrix.count() > 0;
  turned = turned && fits && matrix.strides[0] == 1 && matrix.strides[1] >= matrix.shape[0] && inputs > 1;
  if (!fits || (!turned && !matrix.contiguous_from(1)))
    return reader.refuse("a projection's weight is not rows of float32, bfloat16 or float16 that fit");
  to = {matrix.data, matrix.strides[0], nullptr, turned ? matrix.strides[1] : 1};
  if (!bias) return true;
  if (!reader.tensor(bias, "a projection's bias", shift)) return false;
  if (shift.number != matrix.number || shift.axes != 1 || shift.shape[0] != matrix.shape[0] ||
      !shift.contiguous_from(0))
    return reader.refuse("a projection's bias is not numbers of the weight's dtype that fit, one behind the other");
  to.bias = shift.data;
  return true;
}

void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

void refuse_form(const char* name) {
  refuse(std::string(name) + " is not of the shape, dtype or layout that is expected");
}

void* room(nb::handle given, const char* name, Type type, index count) {
  Reader reader(false, true);
  Tensor t;
  if (!reader.tensor(given, name, t)) refuse(reader.reason.says);
  if (t.number != static_cast<Number>(type) || t.count() != count || !t.contiguous_from(0)) refuse_form(name);
  return t.data;
}

}  // namespace multihead
