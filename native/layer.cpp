#include "layer.h"

#include <algorithm>
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

// A product and how it is cut: `across` blocks of `outputs` outputs, for few rows, or for each of `down` strips of
// rows.
struct Job {
  Linear linear;
  index outputs, across, down;
};

struct Run {
  const Kernels* kernels;
  std::vector<Job> jobs;
};

Job job_of(const Linear& linear, const Kernels& kernels, int threads) {
  const auto blocks = [&](index outputs) { return (linear.outputs + outputs - 1) / outputs; };
  if (linear.rows <= few_rows) return {linear, 32, blocks(32), 1};  // a few hundred kilobytes of weights
  const index down = (linear.rows + kernels.lanes - 1) / kernels.lanes;
  index outputs = 1024;  // each block lays x in lanes anew, which costs as much as about eight outputs
  while (outputs > 64 && down * blocks(outputs) < 8 * threads) outputs /= 2;
  return {linear, outputs, blocks(outputs), down};
}

void run_one(const void* context, index i, void* scratch) {
  const Run& run = *static_cast<const Run*>(context);
  for (const Job& job : run.jobs) {
    if (i < job.across * job.down) {
      const index first = i / job.down * job.outputs, last = std::min(first + job.outputs, job.linear.outputs);
      if (job.linear.rows <= few_rows)
        run.kernels->linear(job.linear, first, last);
      else
        run.kernels->linear_block(job.linear, i % job.down * run.kernels->lanes, first, last, scratch);
      return;
    }
    i -= job.across * job.down;
  }
}

void run_all(const Kernels& kernels, std::initializer_list<Linear> linears, int threads) {
  Run run{&kernels, {}};
  index count = 0, scratch = 0;
  for (const Linear& linear : linears) {
    run.jobs.push_back(job_of(linear, kernels, threads));
    count += run.jobs.back().across * run.jobs.back().down;
    if (linear.rows > few_rows) scratch = std::max(scratch, kernels.linear_scratch(linear));
  }
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
  index step() const { return (width + 15) / 16 * 16; }
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
  run_all(kernels,
          {heads_of(x, layer.q, s.H, s.D, q, plan.q), heads_of(source, layer.k, s.G, s.D, k, plan.k),
           heads_of(source, layer.v, s.G, s.V, v, plan.v)},
          threads);
  plan.out = {mixed, merged.batch, s.V, merged.row};
  attend(plan, isa, threads);
  merged.data = mixed;
  merged.settle(room);
  run_all(kernels, {linear_of(merged, layer.o, layer.E, layer.y)}, threads);
}

}  // namespace multihead
