// Calls of modules around attention: the gated feed-forward part, and RMS norm.
#include <nanobind/stl/string.h>

#include <utility>

#include "core/dispatch.h"
#include "python/reading.h"

namespace nb = nanobind;

namespace multihead {
namespace {

bool product(Reader& reader, nb::handle module, const char* name, index inputs, Number number, Projection& to,
             index& outputs) {
  PyObject *weight, *bias;
  if (!parameters_of_linear(module.ptr(), weight, bias))
    return reader.refuse(std::string(name) + " does more than multiply and add");
  Tensor matrix;
  if (!projection(reader, weight, bias, inputs, to, matrix)) return false;
  outputs = matrix.shape[0];
  return matrix.number == number || reader.refuse(std::string(name) + " is not of the dtype of x");
}

bool feed_forward(Reader& reader, const Gated& of, nb::handle x, Mlp& to) {
  Tensor from;
  if (!tokens(reader, x, "x", from)) return false;
  const bool batched = from.axes == 3;
  const int row = from.axes - 2;
  to.type = static_cast<Type>(from.number);
  to.x = from.data, to.x_batch = batched ? from.strides[0] : 0, to.x_row = from.strides[row];
  to.batch_rows = from.shape[row], to.rows = (batched ? from.shape[0] : 1) * from.shape[row];
  to.inputs = from.shape[row + 1], to.tanh = of.tanh;
  index up;
  if (!product(reader, of.gate, "the gate", to.inputs, from.number, to.gate, to.width)) return false;
  if (of.up.is_none()) {  // its rows are those of the gate, then those of up
    if (to.width % 2) return reader.refuse("gate and up in one weight are not of one width");
    to.width /= 2;
    to.up = to.gate;
    to.up.weight = static_cast<const char*>(to.gate.weight) + to.width * to.gate.row * bytes(to.type);
    if (to.gate.bias) to.up.bias = static_cast<const char*>(to.gate.bias) + to.width * bytes(to.type);
  } else {
    if (!product(reader, of.up, "up", to.inputs, from.number, to.up, up)) return false;
    if (up != to.width) return reader.refuse("gate and up are not of one width");
  }
  return product(reader, of.down, "down", to.width, from.number, to.down, to.outputs);
}

}  // namespace

nb::object read_feed_forward(const Gated& of, nb::handle x, bool gradients) {
  Reader reader(gradients);
  FeedForwardCall read;
  if (!feed_forward(reader, of, x, read.mlp)) return as_tuple(reader.reason);
  read.kept = std::move(reader.kept);
  return nb::cast(std::move(read));
}

void run_feed_forward(FeedForwardCall& call, nb::handle y, nb::handle middle, int threads, const std::string& isa) {
  Mlp mlp = call.mlp;
  mlp.y = room(y, "y", mlp.type, mlp.rows * mlp.outputs);
  mlp.middle = room(middle, "middle", mlp.type, mlp.rows * 2 * mlp.width);
  const Isa& chosen = choose(isa);
  nb::gil_scoped_release release;
  run_mlp(mlp, chosen, threads);
}

nb::object norm_rows(nb::handle x, nb::handle weight, double eps, nb::handle y, bool gradients, int threads) {
  Reader reader(gradients);
  Tensor from, factors;
  if (!tokens(reader, x, "x", from) || !reader.floating(weight, "the norm's weight", Number::f32, factors))
    return as_tuple(reader.reason);
  const int row = from.axes - 2;
  const index width = from.shape[row + 1], N = from.shape[row];
  if (factors.axes != 1 || factors.shape[0] != width || !factors.contiguous_from(0)) {
    reader.refuse("the norm's weight is not a number for each column of x, one behind the other");
    return as_tuple(reader.reason);
  }
  const Type type = static_cast<Type>(from.number);
  Heads heads;
  heads.from = {from.data, row ? from.strides[0] : 0, 0, from.strides[row]};
  heads.to = {room(y, "y", type, from.count()), N * width, 0, width};
  heads.from_type = heads.to_type = type;
  heads.heads = 1, heads.N = N, heads.width = width;
  heads.norm = {true, static_cast<const float*>(factors.data), eps};
  const index tokens = from.count() / width;
  const Isa& chosen = choose("");
  nb::gil_scoped_release release;
  run_heads(heads, tokens, chosen, threads);
  return nb::none();
}

}  // namespace multihead
