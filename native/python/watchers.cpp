#include "python/watchers.h"

namespace nb = nanobind;

namespace multihead {
namespace {

// Functions of torch that are asked in every call, found once.
class Question {
 public:
  Question(const char* module, const char* text)
      : function_(nb::object(nb::module_::import_(module).attr(text)).release().ptr()) {}

  nb::object operator()() const {
    PyObject* answer = PyObject_CallNoArgs(function_);
    if (!answer) throw nb::python_error();
    return nb::steal(answer);
  }

  long integer() const {
    const long n = PyLong_AsLong((*this)().ptr());
    if (n == -1 && PyErr_Occurred()) throw nb::python_error();
    return n;
  }

  nb::handle function() const { return function_; }

 private:
  PyObject* function_;
};

struct Watchers {
  Question interpreter{"torch._C._functorch", "peek_interpreter_stack"};
  Question dispatch_modes{"torch._C", "_len_torch_dispatch_stack"},
      function_modes{"torch._C", "_len_torch_function_stack"};
  Question function_mode{"torch._C", "_get_function_stack_at"}, tracing{"torch._C", "_get_tracing_state"};
  Question autocast{"torch._C", "_is_any_autocast_enabled"};
  Question gradients{"torch._C", "is_grad_enabled"}, threads{"torch._C", "get_num_threads"};
  nb::object forward_ad = nb::module_::import_("torch.autograd.forward_ad").attr("__dict__");
  PyObject* level = PyUnicode_InternFromString("_current_level");
  nb::object device_context = nb::module_::import_("torch.utils._device").attr("DeviceContext");

  bool inside_torch_func() const {
    if (!interpreter().is_none()) return true;
    PyObject* found = PyDict_GetItemWithError(forward_ad.ptr(), level);
    if (!found) throw nb::attribute_error("torch.autograd.forward_ad has no _current_level");
    const long n = PyLong_AsLong(found);
    if (n == -1 && PyErr_Occurred()) throw nb::python_error();
    return n >= 0;
  }

  // torch.set_default_device, and `with torch.device(...)`: here every tensor is made on a device that is named.
  bool only_default_devices(long count) const {
    for (long i = 0; i < count; ++i) {
      const int is = PyObject_IsInstance(function_mode.function()(i).ptr(), device_context.ptr());
      if (is < 0) throw nb::python_error();
      if (!is) return false;
    }
    return true;
  }
};

const Watchers& watchers() {
  static const Watchers* known = new Watchers;  // what it points to is torch's for as long as it lives
  return *known;
}

}  // namespace

nb::object watched(bool modules) {
  const Watchers& w = watchers();
  if (modules && w.autocast().ptr() != Py_False) return nb::make_tuple("autocast chooses the dtype", true);
  if (w.inside_torch_func())
    return nb::make_tuple("the kernel has no rule for torch.func or forward-mode derivatives", false);
  if (w.dispatch_modes.integer()) return nb::make_tuple("a dispatch mode watches every operator", true);
  if (const long modes = w.function_modes.integer(); modes && !w.only_default_devices(modes))
    return nb::make_tuple("a function mode watches every call of torch", true);
  if (!w.tracing().is_none()) return nb::make_tuple("torch.jit traces the call", true);
  return nb::none();
}

bool records_gradients() { return watchers().gradients().ptr() == Py_True; }

int torch_threads() { return static_cast<int>(watchers().threads.integer()); }

}  // namespace multihead
