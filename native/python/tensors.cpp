// Reads torch's objects as they are, without running any Python: what the kernel has pushed out of the caches makes
// every line of Python several times as long as it is in a loop by itself.
#include "torch_layer.h"

#include <nanobind/ndarray.h>

#include <cstdint>

namespace nb = nanobind;

namespace multihead {
namespace {

using Tensor = nb::dlpack::dltensor;

// The functions that torch offers for exchanging tensors in C, by DLPack's specification of version 1.
struct Exchange {
  struct {
    std::uint32_t major, minor;
  } version;
  const Exchange* older;
  void *allocate, *give, *take;
  int (*describe)(void* tensor, Tensor* description);  // 0, or -1 with an error set
  void* stream;
};

PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

PyTypeObject* type(const char* module, const char* text) {
  return reinterpret_cast<PyTypeObject*>(nb::object(nb::module_::import_(module).attr(text)).release().ptr());
}

struct Torch {
  PyTypeObject *tensor = type("torch", "Tensor"), *parameter = type("torch.nn", "Parameter");
  PyTypeObject* linear = type("torch.nn", "Linear");
  PyTypeObject* out_proj = type("torch.nn.modules.linear", "NonDynamicallyQuantizableLinear");  // it only says so
  const Exchange* exchange = nullptr;
  // Of a module: what must be empty, and what must not be there at all.
  PyObject* hooks[4] = {name("_forward_hooks"), name("_forward_pre_hooks"), name("_backward_hooks"),
                        name("_backward_pre_hooks")};
  PyObject *forward = name("forward"), *weight = name("weight"), *bias = name("bias");
  PyObject* own[3] = {forward, weight, bias};
  PyObject* parameters = name("_parameters");
  PyObject* original = nullptr;  // nn.Linear's forward, as it was when torch was met
  PyObject* projections[4] = {name("q_proj"), name("k_proj"), name("v_proj"), name("o_proj")};

  Torch() {
    original = PyDict_GetItemWithError(linear->tp_dict, forward);
    Py_XINCREF(original);
    const nb::object capsule =
        nb::getattr(nb::handle(reinterpret_cast<PyObject*>(tensor)), "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
    exchange = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (exchange && exchange->version.major > 1) exchange = exchange->older;
    if (exchange && (exchange->version.major != 1 || !exchange->describe)) exchange = nullptr;
  }

  // Whether a tensor is of fp32, on the CPU, and contiguous along its last axis.
  bool describe(PyObject* object, Tensor& to) const {
    if (exchange->describe(object, &to)) {  // sparse, say
      PyErr_Clear();
      return false;
    }
    const bool fp32 = to.dtype == nb::dtype<float>(), cpu = to.device.device_type == nb::device::cpu::value;
    if (!fp32 || !cpu || to.ndim < 1 || !to.strides) return false;
    to.data = static_cast<char*>(to.data) + to.byte_offset;
    return to.strides[to.ndim - 1] == 1 || to.shape[to.ndim - 1] == 1;
  }

  // Rows (N, width) or (B, N, width).
  bool rows(nb::handle object, index width, Tensor& to) const {
    if (Py_TYPE(object.ptr()) != tensor || !describe(object.ptr(), to)) return false;
    return (to.ndim == 2 || to.ndim == 3) && to.shape[to.ndim - 1] == width;
  }

  // The weight and the bias, or null, of an nn.Linear that only multiplies and adds. Its dictionary in place of its
  // attributes: looking those up could run code.
  bool held(PyObject* module, PyObject*& matrix, PyObject*& added) const {
    if (!module || (Py_TYPE(module) != linear && Py_TYPE(module) != out_proj)) return false;
    if (PyDict_GetItemWithError(linear->tp_dict, forward) != original) return false;  // somebody patched the class
    const nb::object dictionary = nb::steal(PyObject_GenericGetDict(module, nullptr));
    if (!dictionary.is_valid()) throw nb::python_error();
    const auto entry = [](PyObject* of, PyObject* key) { return PyDict_GetItemWithError(of, key); };
    for (PyObject* key : hooks) {
      PyObject* kept = entry(dictionary.ptr(), key);
      if (!kept || !PyDict_Check(kept) || PyDict_Size(kept) > 0) return false;
    }
    for (PyObject* key : own)
      if (entry(dictionary.ptr(), key)) return false;
    PyObject* kept = entry(dictionary.ptr(), parameters);
    if (!kept || !PyDict_Check(kept)) return false;
    matrix = entry(kept, weight), added = entry(kept, bias);
    if (added == Py_None) added = nullptr;
    return matrix && matrix != Py_None;
  }

  bool numbers(PyObject* object, int axes, Tensor& into) const {
    const PyTypeObject* kind = object ? Py_TYPE(object) : nullptr;
    return (kind == parameter || kind == tensor) && describe(object, into) && into.ndim == axes;
  }

  // `added` may be null.
  bool projection(PyObject* matrix, PyObject* added, index inputs, Projection& to, index& outputs) const {
    Tensor weights, shift;
    if (!numbers(matrix, 2, weights) || weights.shape[1] != inputs) return false;
    if (added && (!numbers(added, 1, shift) || shift.shape[0] != weights.shape[0])) return false;
    to = {static_cast<const float*>(weights.data), weights.strides[0],
          added ? static_cast<const float*>(shift.data) : nullptr};
    outputs = weights.shape[0];
    return true;
  }
};

const Torch* met = nullptr;

}  // namespace

void meet_torch() {
  if (met) return;
  const Torch* torch = new Torch;
  if (torch->exchange) met = torch;
}

bool read_layer(nb::handle x, nb::handle context, nb::handle children, const Widths& w, Layer& layer) {
  if (!met || !PyDict_Check(children.ptr())) return false;
  const Torch& torch = *met;
  Tensor from_x, from_context;
  if (!torch.rows(x, w.E, from_x)) return false;
  if (context.is_none()) {
    if (w.C != w.E) return false;
    from_context = from_x;
  } else if (!torch.rows(context, w.C, from_context) || from_context.ndim != from_x.ndim) {
    return false;
  }
  const bool batched = from_x.ndim == 3;
  const int row = from_x.ndim - 2;  // the axis of positions
  const index B = batched ? from_x.shape[0] : 1, Q = from_x.shape[row], K = from_context.shape[row];
  if ((batched && from_context.shape[0] != B) || B < 1 || Q < 1 || K < 1) return false;
  layer.x = static_cast<const float*>(from_x.data), layer.context = static_cast<const float*>(from_context.data);
  layer.x_batch = batched ? from_x.strides[0] : 0, layer.x_row = from_x.strides[row];
  layer.context_batch = batched ? from_context.strides[0] : 0, layer.context_row = from_context.strides[row];
  layer.E = w.E, layer.C = w.C;

  const auto child = [&](int i, index inputs, Projection& to, index& outputs) {
    PyObject *matrix, *added;
    return torch.held(PyDict_GetItemWithError(children.ptr(), torch.projections[i]), matrix, added) &&
           torch.projection(matrix, added, inputs, to, outputs);
  };
  index q, k, v, o;  // what the projections put out
  if (!child(0, w.E, layer.q, q) || !child(1, w.C, layer.k, k) || !child(2, w.C, layer.v, v)) return false;
  const index H = q / w.D, G = k / w.D;
  if (H < 1 || G < 1 || H * w.D != q || G * w.D != k || H % G || v != G * w.V) return false;
  if (!child(3, H * w.V, layer.o, o) || o != w.E) return false;
  layer.plan.sizes = {B, H, G, Q, K, w.D, w.V};
  return true;
}

nb::object held_by(nb::handle module) {
  PyObject *matrix, *added;
  if (!met || !met->held(module.ptr(), matrix, added)) return nb::none();
  return nb::make_tuple(nb::handle(matrix), nb::handle(added ? added : Py_None));
}

bool read_linear(nb::handle x, nb::handle weight, nb::handle bias, nb::handle y, Linear& linear) {
  if (!met || Py_TYPE(x.ptr()) != met->tensor || Py_TYPE(y.ptr()) != met->tensor) return false;
  Tensor from, to;
  if (!met->describe(x.ptr(), from) || !met->describe(y.ptr(), to)) return false;
  if ((from.ndim != 2 && from.ndim != 3) || to.ndim != from.ndim) return false;
  const int last = from.ndim - 1;
  Projection projection;
  index outputs, expected = 1;
  if (!met->projection(weight.ptr(), bias.is_none() ? nullptr : bias.ptr(), from.shape[last], projection, outputs))
    return false;
  if (to.shape[last] != outputs || outputs < 1 || from.shape[last] < 1) return false;
  for (int axis = last; axis >= 0; expected *= to.shape[axis--]) {
    if (axis < last && (from.shape[axis] != to.shape[axis] || from.shape[axis] < 1)) return false;
    if (to.strides[axis] != expected && to.shape[axis] > 1) return false;
  }
  const bool batched = last == 2;
  const index N = from.shape[last - 1], rows = (batched ? from.shape[0] : 1) * N;
  linear = {from.data,
            batched ? from.strides[0] : 0,
            from.strides[last - 1],
            N,
            rows,
            projection.weight,
            projection.row,
            projection.bias,
            from.shape[last],
            outputs,
            to.data,
            N * outputs,
            0,
            outputs,
            outputs};
  return true;
}

}  // namespace multihead
