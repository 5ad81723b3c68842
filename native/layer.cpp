#include "layer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <vector>

#include "attend.h"
#include "threads.h"

namespace multihead {
namespace {

// Up to so many rows, a product reads W in rows and keeps x in the cache; beyond, x lies in vector lanes.
constexpr index few_rows = 16;

// Up to three products of the same rows of x, and how they are cut into tasks: blocks of `outputs` outputs, and of many
// rows, strips of them. All blocks of a strip follow each other, so that a thread lays x in lanes once for them.
struct Products {
  std::array<Linear, 3> linears;
  std::array<index, 3> until = {};  // blocks of each product and those before it
  int count = 0;
  index outputs = 0, strips = 1;

  bool few() const { return linears[0].rows <= few_rows; }
  index across() const { return until[count - 1]; }
  index tasks() const { return strips * across(); }

  void cut(index size) {
    outputs = size;
    index sum = 0;
    for (int i = 0; i < count; ++i) until[i] = sum += (linears[i].outputs + outputs - 1) / outputs;
  }
};

Products products_of(std::initializer_list<Linear> linears, const Kernels& kernels, int threads) {
  Products p;
  for (const Linear& linear : linears) p.linears[p.count++] = linear;
  if (p.few()) {
    p.cut(32);  // a few hundred kilobytes of weights
  } else {
    p.strips = (p.linears[0].rows + kernels.lanes - 1) / kernels.lanes;
    p.cut(256);  // fine enough to end together on all threads
    while (p.outputs > 64 && p.tasks() < 8 * threads) p.cut(p.outputs / 2);
  }
  return p;
}

struct Run {
  const Kernels* kernels;
  std::initializer_list<Products> all;
  std::uint64_t number;  // of this run among all
};

// What lies in the lanes of this thread's scratch.
thread_local struct {
  std::uint64_t run = 0;
  const Products* products = nullptr;
  index strip = 0;
} laid;

void run_one(const void* context, index i, void* scratch) {
  const Run& run = *static_cast<const Run*>(context);
  const Products* p = run.all.begin();
  for (; i >= p->tasks(); ++p) i -= p->tasks();
  const index strip = p->few() ? 0 : i / p->across(), block = i - strip * p->across();
  int which = 0;
  while (block >= p->until[which]) ++which;
  const Linear& linear = p->linears[which];
  const index first = (which ? block - p->until[which - 1] : block) * p->outputs;
  const index last = std::min(first + p->outputs, linear.outputs);
  if (p->few()) return run.kernels->linear(linear, first, last);
  const bool same = laid.run == run.number && laid.products == p && laid.strip == strip;
  run.kernels->linear_block(linear, strip * run.kernels->lanes, first, last, same, scratch);
  laid = {run.number, p, strip};
}

void run_all(const Kernels& kernels, std::initializer_list<Products> all, int threads) {
  static std::atomic<std::uint64_t> runs{0};
  index count = 0, scratch = 0;
  for (const Products& p : all) {
    count += p.tasks();
    if (!p.few()) scratch = std::max(scratch, kernels.linear_scratch(p.linears[0]));
  }
  const Run run{&kernels, all, ++runs};
  if (!parallel_run(threads, count, scratch, run_one, &run)) throw std::bad_alloc();
}

// Memory of one call: kept by the thread where it is little, so that none is asked for in each call of a few tokens.
class Room {
 public:
  explicit Room(index numbers) {
    constexpr index most_kept = 1 << 20;
    if (numbers > most_kept) {
      own.reset(new float[static_cast<std::size_t>(numbers)]);
    } else if (static_cast<index>(kept.size()) < numbers) {
      kept.resize(static_cast<std::size_t>(numbers));
    }
    next = own ? own.get() : kept.data();
  }
  float* take(index numbers) {
    float* piece = next;
    next += numbers;
    return piece;
  }

 private:
  static thread_local std::vector<float> kept;
  std::unique_ptr<float[]> own;
  float* next;
};

thread_local std::vector<float> Room::kept;

// The rows that a product reads, (B, N, width): as they lie, or, of few, side by side and padded as `linear` asks.
struct Rows {
  const float* data;
  index batch, row, B, N, width;

  index count() const { return B * N; }
  // Rows whole pages apart would crowd each other, and those of W, out of the cache: 5 lines more, or fewer than 16.
  index step() const {
    const index lines = (width + 15) / 16;
    return 16 * (lines + (21 - lines % 16) % 16);
  }
  index numbers() const { return count() <= few_rows ? (count() + 3) * step() : 0; }

  void settle(Room& room) {
    if (count() > few_rows) return;
    float* to = room.take(numbers());
    for (index i = 0; i < count(); ++i) {
      std::memcpy(to + i * step(), data + i / N * batch + i % N * row, sizeof(float) * static_cast<std::size_t>(width));
      std::memset(to + i * step() + width, 0, sizeof(float) * static_cast<std::size_t>(step() - width));
    }
    data = to, batch = N * step(), row = step();
  }
};

// y (B, N, outputs), contiguous.
Linear linear_of(const Rows& x, const Projection& p, index outputs, float* y) {
  return {x.data,  x.batch, x.row, x.N,           x.count(), p.weight, p.row,  p.bias,
          x.width, outputs, y,     x.N * outputs, 0,         outputs,  outputs};
}

// y in heads of `width`, and where it lies: of many rows a head's own lie together, as attention reads them, unless
// that would cut the outputs into pieces of no whole vectors.
Linear heads_of(const Rows& x, const Projection& p, index heads, index width, float* y, View& view) {
  Linear linear = linear_of(x, p, heads * width, y);
  const bool apart = x.count() > few_rows && width % 16 == 0;
  view = apart ? View{y, heads * x.N * width, x.N * width, width} : View{y, x.N * heads * width, width, heads * width};
  if (apart) linear.y_head = view.head, linear.y_row = view.row, linear.y_width = width;
  return linear;
}

}  // namespace

void run_layer(Layer layer, const Isa& isa, int threads) {
  Plan& plan = layer.plan;
  const Sizes& s = plan.sizes;
  const Kernels& kernels = *isa.f32;
  const bool self = layer.context == layer.x && layer.context_batch == layer.x_batch &&
                    layer.context_row == layer.x_row && s.K == s.Q && layer.C == layer.E;
  Rows x{layer.x, layer.x_batch, layer.x_row, s.B, s.Q, layer.E};
  Rows context{layer.context, layer.context_batch, layer.context_row, s.B, s.K, layer.C};
  Rows merged{nullptr, s.Q * s.H * s.V, s.H * s.V, s.B, s.Q, s.H * s.V};
  const index q_size = x.count() * s.H * s.D, k_size = context.count() * s.G * s.D,
              v_size = context.count() * s.G * s.V;
  const index merged_size = merged.count() * merged.width;
  Room room(x.numbers() + context.numbers() + merged.numbers() + q_size + k_size + v_size + merged_size);
  float *q = room.take(q_size), *k = room.take(k_size), *v = room.take(v_size), *mixed = room.take(merged_size);
  x.settle(room);
  if (!self) context.settle(room);
  const Rows& source = self ? x : context;
  const Linear to_q = heads_of(x, layer.q, s.H, s.D, q, plan.q), to_k = heads_of(source, layer.k, s.G, s.D, k, plan.k),
               to_v = heads_of(source, layer.v, s.G, s.V, v, plan.v);
  const auto products = [&](std::initializer_list<Linear> linears) { return products_of(linears, kernels, threads); };
  if (self)
    run_all(kernels, {products({to_q, to_k, to_v})}, threads);
  else
    run_all(kernels, {products({to_q}), products({to_k, to_v})}, threads);
  plan.out = {mixed, merged.batch, s.V, merged.row};
  attend(plan, isa, threads);
  merged.data = mixed;
  merged.settle(room);
  run_all(kernels, {products({linear_of(merged, layer.o, layer.E, layer.y)})}, threads);
}

}  // namespace multihead
