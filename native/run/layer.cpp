#include "run/layer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <vector>

#include "core/threads.h"
#include "run/attend.h"

namespace multihead {
namespace {

// Up to so many rows, a product reads W in rows and keeps x in the first-level cache; beyond, x lies in vector lanes.
constexpr index few_rows = 16;

// Below this many multiplications waking another thread takes longer than it saves.
constexpr double worth_waking = 2e5;

// Up to three products of the same rows of x, and how they are cut into tasks, fine enough to end together on all
// threads: blocks of `outputs` outputs, and of many rows, strips of them. All blocks of a strip follow each other, so
// that a thread packs x once for them.
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
    p.cut(p.linears[0].weight_column == 1 ? 16 : 128);  // outputs that lie side by side are read together
  } else {
    p.strips = (p.linears[0].rows + kernels.lanes - 1) / kernels.lanes;
    p.cut(256);
    while (p.outputs > 64 && p.tasks() < 8 * threads) p.cut(p.outputs / 2);
  }
  return p;
}

struct Run {
  const Kernels* kernels;
  std::initializer_list<Products> all;
  std::uint64_t number;  // of this run among all
};

// Which rows of x are packed in this thread's scratch.
thread_local struct {
  std::uint64_t run = 0;
  const Products* products = nullptr;
  index strip = 0;
} packed;

void run_tasks(const void* context, index from, index to, void* scratch) {
  const Run& run = *static_cast<const Run*>(context);
  const Products* p = run.all.begin();
  for (; from < to && from >= p->tasks(); ++p) from -= p->tasks(), to -= p->tasks();
  while (from < to) {
    if (from == p->tasks()) to -= from, from = 0, ++p;
    const index strip = from / p->across(), block = from - strip * p->across();
    int which = 0;
    while (block >= p->until[which]) ++which;
    const Linear& linear = p->linears[which];
    // Blocks of one product behind each other are one.
    const index blocks = std::min(to - from, p->until[which] - block),
                first = block - (which ? p->until[which - 1] : 0);
    const index begin = first * p->outputs, end = std::min((first + blocks) * p->outputs, linear.outputs);
    const bool same = packed.run == run.number && packed.products == p && packed.strip == strip;
    const auto multiply = p->few() ? run.kernels->linear_few : run.kernels->linear_block;
    multiply(linear, strip * run.kernels->lanes, begin, end, same, scratch);
    packed = {run.number, p, strip};
    from += blocks;
  }
}

void run_all(const Kernels& kernels, std::initializer_list<Products> all, int threads) {
  static std::atomic<std::uint64_t> runs{0};
  index count = 0, scratch = 0;
  double work = 0;
  for (const Products& p : all) {
    count += p.tasks();
    for (int i = 0; i < p.count; ++i) work += double(p.linears[i].rows) * p.linears[i].inputs * p.linears[i].outputs;
    const auto bytes = p.few() ? kernels.linear_few_scratch : kernels.linear_block_scratch;
    scratch = std::max(scratch, bytes(p.linears[0]));
  }
  if (work < worth_waking) threads = 1;
  const Run run{&kernels, all, ++runs};
  if (!parallel_run(threads, count, scratch, run_tasks, &run)) throw std::bad_alloc();
}

// Memory of one call: kept by the thread where it is little, so that none is allocated in each call of a few tokens.
class Room {
 public:
  explicit Room(index bytes) {
    constexpr index most_kept = 4 << 20;
    if (bytes > most_kept) {
      own.reset(new char[static_cast<std::size_t>(bytes)]);
    } else if (static_cast<index>(kept.size()) < bytes) {
      kept.resize(static_cast<std::size_t>(bytes));
    }
    next = own ? own.get() : kept.data();
  }
  char* take(index bytes) {
    char* piece = next;
    next += bytes;
    return piece;
  }

 private:
  static thread_local std::vector<char> kept;
  std::unique_ptr<char[]> own;
  char* next;
};

thread_local std::vector<char> Room::kept;

// Kernels of products: pairs of bfloat16 numbers where the CPU multiplies them, else floats; weights whose outputs lie
// side by side are turned, and widened then.
const Kernels& kernels_of(const Isa& isa, Type x, Type weight, bool turned = false) {
  return isa.bf16 && x == Type::bf16 && weight == Type::bf16 && !turned ? *isa.bf16 : *isa.f32;
}

// y in heads, where `view` says: side by side, or of many rows anywhere.
Linear heads_at(const Rows& x, const Projection& p, Type weights, index heads, index width, const View& view) {
  Linear linear = linear_of(x, p, weights, heads * width, view.data);
  if (view.head != width || view.row != heads * width)
    linear.y_batch = view.batch, linear.y_head = view.head, linear.y_row = view.row, linear.y_width = width;
  return linear;
}

// Where the heads of a product lie: of many rows a head's own lie together, as attention reads them, unless that would
// cut the outputs into pieces of no whole vectors.
View view_of(const Rows& x, index heads, index width, void* y) {
  const bool apart = x.count() > few_rows && width % 16 == 0;
  return apart ? View{y, heads * x.N * width, x.N * width, width} : View{y, x.N * heads * width, width, heads * width};
}

View from_row(View view, Type type, index row) {
  view.data = static_cast<char*>(view.data) + row * view.row * bytes(type);
  return view;
}

// Whether a product of x may be written into the store while x is still read.
bool apart(const Rows& x, const View& store, index heads, index rows, index width) {
  const auto* from = static_cast<const char*>(x.data);
  const auto* to = static_cast<const char*>(store.data);
  const index size = bytes(x.type);
  const index x_bytes = ((x.B - 1) * x.batch + (x.N - 1) * x.row + x.width) * size;
  const index store_bytes =
      ((x.B - 1) * store.batch + (heads - 1) * store.head + (rows - 1) * store.row + width) * size;
  return x.batch >= 0 && x.row >= 0 && store.batch >= 0 && store.head >= 0 && store.row >= 0 &&
         (from + x_bytes <= to || to + store_bytes <= from);
}

struct Preparation {
  const Kernels* kernels;
  std::initializer_list<Heads> all;
};

void prepare_tokens(const void* context, index from, index to, void* scratch) {
  const auto& run = *static_cast<const Preparation*>(context);
  for (const Heads& heads : run.all)
    if (heads.heads) run.kernels->prepare_heads(heads, from, to, scratch);
}

// What is left to do to the heads of `tokens` tokens; `heads` of 0 have nothing left.
void prepare(const Isa& isa, std::initializer_list<Heads> all, index tokens, int threads) {
  index width = 0;
  for (const Heads& heads : all) width = std::max(width, heads.heads ? heads.width : 0);
  if (!width) return;
  const Preparation run{isa.f32, all};
  const index scratch = width * static_cast<index>(sizeof(float));
  if (!parallel_run(tokens <= few_rows ? 1 : threads, tokens, scratch, prepare_tokens, &run)) throw std::bad_alloc();
}

}  // namespace

Linear linear_of(const Rows& x, const Projection& p, Type weights, index outputs, void* y) {
  Linear linear{};
  linear.x = x.data, linear.x_type = x.type;
  linear.x_batch = x.batch, linear.x_row = x.row, linear.batch_rows = x.N, linear.rows = x.count();
  linear.weight = p.weight, linear.weight_row = p.row, linear.weight_column = p.column;
  linear.bias = p.bias, linear.type = weights;
  linear.inputs = x.width, linear.outputs = outputs;
  linear.y = y, linear.y_batch = x.N * outputs, linear.y_row = outputs, linear.y_width = outputs;
  return linear;
}

void run_linear(const Linear& linear, const Isa& isa, int threads) {
  const Kernels& kernels = kernels_of(isa, linear.x_type, linear.type);
  run_all(kernels, {products_of({linear}, kernels, threads)}, threads);
}

void run_pair(const Linear& a, const Linear& b, const Isa& isa, int threads) {
  const Kernels& kernels = kernels_of(isa, a.x_type, a.type);
  run_all(kernels, {products_of({a, b}, kernels, threads)}, threads);
}

void run_heads(const Heads& heads, index tokens, const Isa& isa, int threads) {
  prepare(isa, {heads}, tokens, threads);
}

void run_layer(Layer layer, const Isa& isa, int threads) {
  Plan& plan = layer.plan;
  const Sizes& s = plan.sizes;
  const Type type = plan.type;
  const Store& store = layer.store;
  bool turned = false;
  for (const Projection* p : {&layer.q, &layer.k, &layer.v, &layer.o}) turned |= p->column != 1;
  const Kernels& kernels = kernels_of(isa, type, layer.weights, turned);
  const bool self = layer.N > 0 && layer.context == layer.x && layer.context_batch == layer.x_batch &&
                    layer.context_row == layer.x_row && layer.N == s.Q && layer.C == layer.E;
  const Rows x{layer.x, layer.x_batch, layer.x_row, s.B, s.Q, layer.E, type};
  const Rows context{layer.context, layer.context_batch, layer.context_row, s.B, layer.N, layer.C, type};
  const Rows& source = self ? x : context;
  const bool stored = store.k.data != nullptr;
  // Many rows go straight into the store, where they are turned.
  const bool straight = stored && plan.kv_type == type && source.count() > few_rows && !store.firsts && !store.real &&
                        s.D % 16 == 0 && s.V % 16 == 0 && apart(source, store.k, s.G, s.K, s.D) &&
                        apart(source, store.v, s.G, s.K, s.V);
  const index q_size = x.count() * s.H * s.D, k_size = straight ? 0 : source.count() * s.G * s.D,
              v_size = straight ? 0 : source.count() * s.G * s.V, merged_size = x.count() * s.H * s.V;
  const index size = bytes(type);
  Room room((q_size + k_size + v_size + merged_size) * size);
  plan.q = view_of(x, s.H, s.D, room.take(q_size * size));
  plan.k = view_of(source, s.G, s.D, room.take(k_size * size));
  plan.v = view_of(source, s.G, s.V, room.take(v_size * size));
  if (straight) plan.k = from_row(store.k, type, store.first), plan.v = from_row(store.v, type, store.first);
  const Rows merged{room.take(merged_size * size), s.Q * s.H * s.V, s.H * s.V, s.B, s.Q, s.H * s.V, type};
  const Linear to_q = heads_at(x, layer.q, layer.weights, s.H, s.D, plan.q),
               to_k = heads_at(source, layer.k, layer.weights, s.G, s.D, plan.k),
               to_v = heads_at(source, layer.v, layer.weights, s.G, s.V, plan.v);
  const auto products = [&](std::initializer_list<Linear> linears) { return products_of(linears, kernels, threads); };
  if (self)
    run_all(kernels, {products({to_q, to_k, to_v})}, threads);
  else if (layer.N == 0)
    run_all(kernels, {products({to_q})}, threads);
  else
    run_all(kernels, {products({to_q}), products({to_k, to_v})}, threads);

  const bool moved = stored && !straight;
  Heads q{plan.q, plan.q, type, type, s.H, s.Q, s.D, layer.q_norm, layer.q_rotation},
      k{plan.k, plan.k, type, type, s.G, layer.N, s.D, layer.k_norm, layer.k_rotation},
      v{plan.v, plan.v, type, type, s.G, layer.N, s.V, {}, {}};
  if (moved) {
    k.to = store.k, v.to = store.v, k.scales = store.k_scales, v.scales = store.v_scales;
    for (Heads* heads : {&k, &v})
      heads->to_type = plan.kv_type, heads->first = store.first, heads->firsts = store.firsts, heads->real = store.real;
  }
  const auto wanted = [](const Heads& heads) { return heads.norm.wanted || heads.rotation.cos; };
  if (!wanted(q)) q.heads = 0;
  if (!wanted(k) && !moved) k.heads = 0;
  if (!moved) v.heads = 0;
  if (self) {
    prepare(isa, {q, k, v}, x.count(), threads);
  } else {
    prepare(isa, {q}, x.count(), threads);
    if (layer.N > 0) prepare(isa, {k, v}, source.count(), threads);
  }
  if (stored)
    plan.k = store.k, plan.v = store.v, plan.k_scales = store.k_scales, plan.v_scales = store.v_scales;
  else
    plan.kv_type = type;
  plan.out = {const_cast<void*>(merged.data), merged.batch, s.V, merged.row};
  attend(plan, isa, threads);
  run_all(kernels, {products({linear_of(merged, layer.o, layer.weights, layer.outputs, layer.y)})}, threads);
}

}  // namespace multihead
