// The only file that knows how torch's objects are made. Where torch lets them be read in C no Python runs: what the
// kernel has pushed out of the caches makes every line of Python several times as long as it is in a loop by itself.
#include "python/tensors.h"

#include <nanobind/ndarray.h>

#include <cstdint>

namespace nb = nanobind;

namespace multihead {
namespace {

// The functions that torch offers for exchanging tensors in C, by DLPack's specification of version 1.
struct Exchange {
  struct {
    std::uint32_t major, minor;
  } version;
  const Exchange* older;
  void *allocate, *give, *take;
  int (*describe)(void* tensor, nb::dlpack::dltensor* description);  // 0, or -1 with an error set
  void* stream;
};

PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

PyTypeObject* type(const char* module, const char* text) {
  return reinterpret_cast<PyTypeObject*>(nb::object(nb::module_::import_(module).attr(text)).release().ptr());
}

PyObject* attribute_of(PyTypeObject* of, const char* text) {
  return nb::object(nb::handle(reinterpret_cast<PyObject*>(of)).attr(text)).release().ptr();
}

constexpr const char* dtype_names[] = {"float32", "float64", "bfloat16", "float16", "bool", "int32", "int64", "int8"};
constexpr index sizes_in_bytes[] = {4, 8, 2, 2, 1, 4, 8, 1};

// A method without arguments, or an attribute, of one of torch's classes in C, called as the class has it: looking it
// up by its name at every tensor takes longer than the call.
class Descriptor {
 public:
  Descriptor(PyTypeObject* of, const char* text) {
    own_ = attribute_of(of, text);
    name_ = name(text);
    if (Py_TYPE(own_) == &PyMethodDescr_Type) {
      const PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(own_)->d_method;
      if (method->ml_flags == METH_NOARGS) method_ = method->ml_meth;
    } else if (Py_TYPE(own_) == &PyGetSetDescr_Type) {
      getter_ = reinterpret_cast<PyGetSetDescrObject*>(own_)->d_getset;
    }
    if (method_ || getter_) of_ = reinterpret_cast<PyDescrObject*>(own_)->d_type;
  }

  nb::object operator()(PyObject* object) const {
    PyObject* result;
    if (of_ && PyObject_TypeCheck(object, of_))
      result = method_ ? method_(object, nullptr) : getter_->get(object, getter_->closure);
    else
      result = is_method() ? PyObject_CallMethodNoArgs(object, name_) : PyObject_GetAttr(object, name_);
    if (!result) throw nb::python_error();
    return nb::steal(result);
  }

  bool holds(PyObject* object) const { return (*this)(object).ptr() == Py_True; }

  index integer(PyObject* object) const {
    const index n = PyLong_AsLongLong((*this)(object).ptr());
    if (n == -1 && PyErr_Occurred()) throw nb::python_error();
    return n;
  }

 private:
  PyObject *own_, *name_;
  PyTypeObject* of_ = nullptr;  // null: looked up by its name all the same
  PyCFunction method_ = nullptr;
  const PyGetSetDef* getter_ = nullptr;

  bool is_method() const { return method_ || PyCallable_Check(own_); }
};

struct Torch {
  PyTypeObject *tensor = type("torch", "Tensor"), *parameter = type("torch.nn", "Parameter");
  PyTypeObject *linear = type("torch.nn", "Linear"), *norm = type("torch.nn", "RMSNorm");
  PyTypeObject* out_proj = type("torch.nn.modules.linear", "NonDynamicallyQuantizableLinear");  // it only says so
  PyObject* dtypes[8];                                                                          // by Number
  PyObject* strided = nb::object(nb::module_::import_("torch").attr("strided")).release().ptr();
  const Exchange* exchange = nullptr;
  Descriptor requires_grad{tensor, "requires_grad"}, is_neg{tensor, "is_neg"}, is_zerotensor{tensor, "_is_zerotensor"};
  Descriptor storage{tensor, "untyped_storage"}, storage_offset{tensor, "storage_offset"};
  Descriptor nbytes{type("torch", "UntypedStorage"), "nbytes"};
  PyObject *contiguous = name("contiguous"), *to = name("to"), *dtype = name("dtype"), *is_cpu = name("is_cpu"),
           *layout = name("layout"), *shape = name("shape"), *stride = name("stride"), *data_ptr = name("data_ptr");
  PyObject *new_empty_strided = attribute_of(tensor, "new_empty_strided"),
           *new_empty = attribute_of(tensor, "new_empty");
  // Of a module: what must be empty, and what must not be there at all.
  PyObject* hooks[4] = {name("_forward_hooks"), name("_forward_pre_hooks"), name("_backward_hooks"),
                        name("_backward_pre_hooks")};
  PyObject *forward = name("forward"), *weight = name("weight"), *bias = name("bias");
  PyObject* own[3] = {forward, weight, bias};
  PyObject* parameters = name("_parameters");
  PyObject *normalized_shape = name("normalized_shape"), *eps = name("eps");
  PyObject *original = nullptr, *original_norm = nullptr;  // their forward, as it was when torch was first read
  PyTypeObject* ours = nullptr;  // of a forward of a module's own that only multiplies and adds

  explicit Torch(bool in_c) {
    original = PyDict_GetItemWithError(linear->tp_dict, forward);
    original_norm = PyDict_GetItemWithError(norm->tp_dict, forward);
    Py_XINCREF(original);
    Py_XINCREF(original_norm);
    for (int i = 0; i < 8; ++i)
      dtypes[i] = nb::object(nb::module_::import_("torch").attr(dtype_names[i])).release().ptr();
    const nb::object capsule =
        nb::getattr(nb::handle(reinterpret_cast<PyObject*>(tensor)), "__dlpack_c_exchange_api__", nb::none());
    if (!in_c || !PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
    exchange = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (exchange && exchange->version.major > 1) exchange = exchange->older;
    if (exchange && (exchange->version.major != 1 || !exchange->describe)) exchange = nullptr;
  }
};

Torch* known = nullptr;

const Torch& torch() {
  if (!known) remember_torch(true);
  return *known;
}

nb::object call(PyObject* object, PyObject* method) {
  PyObject* result = PyObject_CallMethodNoArgs(object, method);
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

index integer(PyObject* object, PyObject* method) {
  const index n = PyLong_AsLongLong(call(object, method).ptr());
  if (n == -1 && PyErr_Occurred()) throw nb::python_error();
  return n;
}

nb::object attribute(PyObject* object, PyObject* of_name) {
  PyObject* result = PyObject_GetAttr(object, of_name);
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

// What went wrong, as torch says it.
std::string error_in_words() {
  nb::python_error error;  // takes the error that is set
  return nb::str(error.value()).c_str();
}

// Each gives an empty string, or why the kernel cannot read the tensor.
std::string described_in_c(PyObject* object, Tensor& to) {
  nb::dlpack::dltensor t;
  if (torch().exchange->describe(object, &t)) return error_in_words();  // sparse or nested, say
  if (t.device.device_type != nb::device::cpu::value) return "is not on the CPU";
  if (t.dtype == nb::dtype<float>())
    to.number = Number::f32;
  else if (t.dtype == nb::dtype<double>())
    to.number = Number::f64;
  else if (t.dtype.lanes == 1 && t.dtype.bits == 16 && t.dtype.code == 4)
    to.number = Number::bf16;
  else if (t.dtype.lanes == 1 && t.dtype.bits == 16 && t.dtype.code == 2)
    to.number = Number::f16;
  else if (t.dtype == nb::dtype<bool>())
    to.number = Number::boolean;
  else if (t.dtype == nb::dtype<std::int32_t>())
    to.number = Number::i32;
  else if (t.dtype == nb::dtype<std::int64_t>())
    to.number = Number::i64;
  else if (t.dtype == nb::dtype<std::int8_t>())
    to.number = Number::i8;
  else
    return "is of a dtype that the kernel does not know";
  if (t.ndim > most_axes) return "has more than four axes";
  to.axes = t.ndim;
  to.data = static_cast<char*>(t.data) + t.byte_offset;
  if (!t.data) to.data = nullptr;
  index expected = 1;
  for (int i = t.ndim - 1; i >= 0; expected *= to.shape[i--]) {
    to.shape[i] = t.shape[i];
    to.strides[i] = t.strides ? t.strides[i] : expected;
  }
  return "";
}

std::string described_by_attributes(PyObject* object, Tensor& to) {
  const Torch& t = torch();
  if (attribute(object, t.layout).ptr() != t.strided) return "is not strided";
  if (attribute(object, t.is_cpu).ptr() != Py_True) return "is not on the CPU";
  const nb::object dtype = attribute(object, t.dtype);
  int number = 0;
  while (number < 8 && t.dtypes[number] != dtype.ptr()) ++number;
  if (number == 8) return "is of a dtype that the kernel does not know";
  to.number = static_cast<Number>(number);
  PyObject* shape = PyObject_GetAttr(object, t.shape);
  if (!shape) return error_in_words();  // nested
  const nb::object sizes = nb::steal(shape), strides = call(object, t.stride);
  const index axes = PyTuple_GET_SIZE(sizes.ptr());
  if (axes > most_axes) return "has more than four axes";
  to.axes = static_cast<int>(axes);
  for (int i = 0; i < to.axes; ++i) {
    to.shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
    to.strides[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides.ptr(), i));
  }
  if (PyErr_Occurred()) throw nb::python_error();
  to.data = reinterpret_cast<void*>(integer(object, t.data_ptr));
  return "";
}

// An error where the storage does not hold all that the tensor sees: torch itself would read beyond its end.
void require_storage(PyObject* object, const Tensor& t, const char* argument) {
  index last = torch().storage_offset.integer(object);
  for (int i = 0; i < t.axes; ++i) last += (t.shape[i] - 1) * t.strides[i];
  const index needed = (last + 1) * sizes_in_bytes[static_cast<int>(t.number)];
  const nb::object storage = torch().storage(object);
  const index there = torch().nbytes.integer(storage.ptr());
  if (t.data && needed <= there) return;
  const std::string message = std::string(argument) + " sees " + std::to_string(needed) +
                              " bytes of a storage that holds " + std::to_string(there) +
                              ": expected one that was not freed or made smaller";
  throw nb::value_error(message.c_str());
}

PyObject* entry(PyObject* of, PyObject* key) { return PyDict_GetItemWithError(of, key); }

// The parameters of a module that only does what its class does, and its dictionary, in place of its attributes:
// looking those up could run code. Null where it has a hook or a forward of its own, or somebody patched the class.
PyObject* parameters_of(PyObject* module, PyTypeObject* kind, PyObject* original, bool called, nb::object& dictionary) {
  const Torch& t = torch();
  if (PyDict_GetItemWithError(kind->tp_dict, t.forward) != original) return nullptr;
  dictionary = nb::steal(PyObject_GenericGetDict(module, nullptr));
  if (!dictionary.is_valid()) throw nb::python_error();
  for (PyObject* key : t.hooks) {
    if (called) break;
    PyObject* hooks = entry(dictionary.ptr(), key);
    if (!hooks || !PyDict_Check(hooks) || PyDict_Size(hooks) > 0) return nullptr;
  }
  for (PyObject* key : t.own) {
    PyObject* found = entry(dictionary.ptr(), key);
    if (found && (key != t.forward || Py_TYPE(found) != t.ours)) return nullptr;
  }
  PyObject* parameters = entry(dictionary.ptr(), t.parameters);
  return parameters && PyDict_Check(parameters) ? parameters : nullptr;
}

}  // namespace

// What it points to is torch's for as long as it lives.
void remember_torch(bool in_c) {
  auto* read = new Torch(in_c);
  if (known) read->ours = known->ours;
  known = read;
}

void remember_forward(nb::handle type) {
  if (!PyType_Check(type.ptr())) throw nb::type_error("a forward is known by its type");
  torch();
  known->ours = reinterpret_cast<PyTypeObject*>(nb::borrow(type).release().ptr());
}

bool Reader::tensor(nb::handle object, const char* argument, Tensor& to) {
  const Torch& t = torch();
  PyTypeObject* kind = Py_TYPE(object.ptr());
  if (kind != t.tensor && kind != t.parameter) {
    const bool subclass = PyType_IsSubtype(kind, t.tensor);
    return refuse(std::string(argument) + " is a " + kind->tp_name + (subclass ? ", which wants to see the call" : ""),
                  subclass);
  }
  if (gradients_ && t.requires_grad.holds(object.ptr()))
    return refuse(std::string("a gradient of ") + argument + " is wanted", true);
  const std::string wrong = t.exchange ? described_in_c(object.ptr(), to) : described_by_attributes(object.ptr(), to);
  if (!wrong.empty()) return refuse(std::string(argument) + " " + wrong);
  if (to.count() > 0 && !made_here_) {
    if (to.number != Number::boolean && t.is_neg.holds(object.ptr()))
      return refuse(std::string(argument) + " has its negative bit set", true);
    if (!to.data && t.is_zerotensor.holds(object.ptr()))
      return refuse(std::string(argument) + " is a tensor of zeros that torch has not made yet", true);
    require_storage(object.ptr(), to, argument);
  }
  if (kept.empty()) kept.reserve(12);  // a layer has ten
  kept.push_back(nb::borrow(object));
  return true;
}

bool Reader::floating(nb::handle object, const char* argument, Number number, Tensor& to) {
  if (!tensor(object, argument, to)) return false;
  if (to.number == number) return true;
  if (to.number > Number::f16) return refuse(std::string(argument) + " is not floating");
  const Torch& t = torch();
  PyObject* converted = PyObject_CallMethodOneArg(object.ptr(), t.to, t.dtypes[static_cast<int>(number)]);
  if (!converted) throw nb::python_error();
  return tensor(nb::steal(converted), argument, to);
}

bool Reader::rows(nb::handle object, const char* argument, Tensor& to) {
  if (!tensor(object, argument, to)) return false;
  if (to.axes < 1 || to.count() == 0 || to.contiguous_from(to.axes - 1)) return true;
  return tensor(call(object.ptr(), torch().contiguous), argument, to);
}

nb::object heads_like(nb::handle q, const Sizes& s) {
  const auto tuple = [](index a, index b, index c, index d) {
    return nb::steal(Py_BuildValue("(nnnn)", Py_ssize_t(a), Py_ssize_t(b), Py_ssize_t(c), Py_ssize_t(d)));
  };
  const nb::object shape = tuple(s.B, s.H, s.Q, s.V), strides = tuple(s.H * s.Q * s.V, s.V, s.H * s.V, 1);
  PyObject* const given[] = {q.ptr(), shape.ptr(), strides.ptr()};
  PyObject* made = PyObject_Vectorcall(torch().new_empty_strided, given, 3, nullptr);
  if (!made) throw nb::python_error();
  return nb::steal(made);
}

nb::object rows_like(nb::handle x, index width) {
  const nb::object sizes = attribute(x.ptr(), torch().shape);  // a tuple
  const Py_ssize_t axes = PyTuple_GET_SIZE(sizes.ptr());
  const nb::object shape = nb::steal(PyTuple_New(axes));
  if (!shape.is_valid()) throw nb::python_error();
  for (Py_ssize_t i = 0; i < axes; ++i) {
    PyObject* size = i + 1 == axes ? PyLong_FromLongLong(width) : Py_NewRef(PyTuple_GET_ITEM(sizes.ptr(), i));
    if (!size) throw nb::python_error();
    PyTuple_SET_ITEM(shape.ptr(), i, size);
  }
  PyObject* const given[] = {x.ptr(), shape.ptr()};
  PyObject* made = PyObject_Vectorcall(torch().new_empty, given, 2, nullptr);
  if (!made) throw nb::python_error();
  return nb::steal(made);
}

bool broadcast(const Tensor& t, const index* sizes, int axes, index* strides) {
  if (t.axes > axes) return false;
  for (int i = 0; i < axes; ++i) {
    const int own = i - (axes - t.axes);
    const bool one = own < 0 || t.shape[own] == 1;
    if (!one && t.shape[own] != sizes[i]) return false;
    strides[i] = one ? 0 : t.strides[own];
  }
  return true;
}

bool parameters_of_linear(PyObject* module, PyObject*& weight, PyObject*& bias, bool called) {
  const Torch& t = torch();
  if (!module || (Py_TYPE(module) != t.linear && Py_TYPE(module) != t.out_proj)) return false;
  nb::object dictionary;
  PyObject* parameters = parameters_of(module, t.linear, t.original, called, dictionary);
  if (!parameters) return false;
  weight = entry(parameters, t.weight), bias = entry(parameters, t.bias);
  if (bias == Py_None) bias = nullptr;
  return weight && weight != Py_None;
}

bool parameters_of_norm(PyObject* module, index width, PyObject*& weight, nb::object& eps) {
  const Torch& t = torch();
  if (!module || Py_TYPE(module) != t.norm) return false;
  nb::object dictionary;
  PyObject* parameters = parameters_of(module, t.norm, t.original_norm, false, dictionary);
  if (!parameters) return false;
  PyObject *shape = entry(dictionary.ptr(), t.normalized_shape), *small = entry(dictionary.ptr(), t.eps);
  if (!shape || !PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != 1 || !small) return false;
  if (PyLong_AsLongLong(PyTuple_GET_ITEM(shape, 0)) != width) return PyErr_Clear(), false;
  weight = entry(parameters, t.weight), eps = nb::borrow(small);
  if (weight == Py_None) weight = nullptr;
  return true;
}

}  // namespace multihead
