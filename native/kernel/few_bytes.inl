// Attention of a few query rows to keys and values of a byte (a cache of int8), where an instruction sums products of
// bytes in integers. A row of q, and a row's weights of a tile, become integers of three digits of a byte, by
// a scale of the row's own: off by at most 2^-22 of the row's largest number, half a unit and the roundings of the
// scale, where a number of a key of int8 is off by up to 1/254 of its own largest. The sums of products are exact then.
#pragma once

#include "core/kernels.h"
#include "kernel/blocks.inl"
#include "kernel/few.inl"
#include "kernel/merge.inl"

namespace multihead {
namespace {

template <class Bytes>
struct DigitReader : ByteReader<typename Bytes::A> {
  static constexpr int step = Bytes::step;  // rows are padded to whole vectors of bytes
};

template <class Bytes>
class FewBytes : Few<DigitReader<Bytes>> {
  using Base = Few<DigitReader<Bytes>>;
  using A = typename Bytes::A;
  using F = typename A::F;
  using Ints = typename Bytes::Ints;
  using Number = std::int8_t;
  using Base::line;
  using Base::padded;
  using Base::plan;
  using Base::task;
  static constexpr int W = A::W, step = Bytes::step, digits = 3;
  static_assert(4 * W == step, "a word of four bytes in each lane");

  // How a row became integers.
  struct Digits {
    float scale = 0;          // a number is its digits times this
    int raised[digits] = {};  // -128 times the sum of each digit, of q: what raising the keys by 128 adds, taken off
    bool exact = true;        // false: not finite, or too small to be scaled, and to be multiplied as it is
  };
  Digits of_q[8], of_weights[8];
  const int rows;  // 4 or 8, of which the last may repeat the one before
  // Four digits of a row side by side are a word, the lowest digit first: of q from -128 to 127, (padded D / 4, rows,
  // digits); of weights from 0 to 255, (rows, digits, line / 4), where they are written as they are made.
  std::int32_t *q_words, *weight_words;

 public:
  static constexpr index most_rows = Base::most_rows;

  static index scratch_bytes(const Plan& plan) {
    return Base::scratch_bytes(plan) + most_rows * digits * (padded(plan.sizes.D) + line) + 4 * 64;
  }

  static void run(const Plan& plan, const Task& task, void* scratch) {
    if (task.rows <= 4)
      FewBytes(plan, task, scratch, 4).template attend<4>();
    else
      FewBytes(plan, task, scratch, 8).template attend<8>();
  }

 private:
  FewBytes(const Plan& p, const Task& t, void* scratch, int rows) : Base(p, t, scratch, rows), rows(rows) {
    Arena arena{static_cast<char*>(scratch) + (Base::scratch_bytes(p) + 63) / 64 * 64};
    q_words = arena.take<std::int32_t>(rows * digits * padded(p.sizes.D) / 4);
    weight_words = arena.take<std::int32_t>(rows * digits * line / 4);
    for (int r = 0; r < rows; ++r) split_query(r);
  }

  // Digit p of W numbers of row r of q, the first of which is number d.
  void put(int r, int p, index d, Ints digit) {
    std::int32_t four[W / 4];
    Bytes::store_bytes(four, digit);
    for (int w = 0; w < W / 4; ++w) q_words[((d / 4 + w) * rows + r) * digits + p] = four[w];
  }

  static bool can_be_scaled(float largest) { return largest > 1e-30f && largest < 1e30f; }  // false for NaN

  void split_query(int r) {
    constexpr float most = 8355000;  // below 127 * (65536 + 256 + 1), the largest number of three digits
    const index width = padded(plan.sizes.D);
    const float* q = this->q + r * width;
    float largest = 0, unlike = 0;
    for (index d = 0; d < width; ++d) {
      const float size = q[d] < 0 ? -q[d] : q[d];
      largest = size > largest ? size : largest;
      unlike += q[d] - q[d];
    }
    Digits& of = of_q[r];
    of = {};
    of.exact = unlike == 0 && can_be_scaled(largest);
    of.scale = of.exact ? largest / most : 0;
    const F factor = A::all(of.exact ? most / largest : 0);
    Ints sums[digits] = {};
    for (index d = 0; d < width; d += W) {
      Ints rest = of.exact ? Bytes::rounded(A::load(q + d) * factor) : Ints{};
      for (int p = 0; p < digits; ++p) {
        const Ints digit = ((rest + 128) & 255) - 128;
        rest = (rest - digit) >> 8;
        sums[p] += digit;
        put(r, p, d, digit);
      }
    }
    for (int p = 0; p < digits; ++p) {
      int sum = 0;
      for (int i = 0; i < W; ++i) sum += sums[p][i];
      of.raised[p] = -128 * sum;
    }
  }

  void split_weights(int r, index keys) {
    constexpr float most = 16777200;  // below 2^24
    const float* weights = this->scores + r * line;
    F top = F{}, unlike = F{};
    for (index i = 0; i < keys; i += W) {
      const F w = A::load(weights + i);
      top = A::max(w, top);
      unlike += w - w;
    }
    float largest = 0, odd = A::sum(unlike);
    for (int i = 0; i < W; ++i) largest = top[i] > largest ? top[i] : largest;
    Digits& of = of_weights[r];
    of.exact = odd == 0 && (largest == 0 || can_be_scaled(largest));
    of.scale = of.exact ? largest / most : 0;
    const F factor = A::all(of.exact && largest > 0 ? most / largest : 0.0f);
    for (index i = 0; i < keys; i += W) {
      const Ints integers = of.exact ? Bytes::rounded(A::load(weights + i) * factor) : Ints{};
      for (int p = 0; p < digits; ++p)
        Bytes::store_bytes(weight_words + ((r * digits + p) * line + i) / 4, integers >> (8 * p));
    }
  }

  template <int R>
  void attend() {
    for (index tile = this->first / tile_keys * tile_keys; tile < this->last; tile += tile_keys) {
      const index from = tile > this->first ? tile : this->first;
      const index to = tile + tile_keys < this->last ? tile + tile_keys : this->last, keys = to - from;
      const auto* k = reinterpret_cast<const Number*>(row_of(plan.k, plan.kv_type, task.b, task.g, from));
      const auto* v = reinterpret_cast<const Number*>(row_of(plan.v, plan.kv_type, task.b, task.g, from));
      score<R>(k, v, keys);
      this->scale_scores(R, from, keys);
      float decay[R];
      for (int r = 0; r < R; ++r) this->weigh(this->row[r], this->scores + r * line, from, keys, decay[r]);
      this->scale_weights(R, from, keys);
      for (int r = 0; r < R; ++r) split_weights(r, keys);
      for (index j = 0; j < plan.sizes.V; j += step) mix<R>(v, k + tile_keys * plan.k.row, j, keys, decay);
      for (int r = 0; r < R; ++r)
        if (!of_weights[r].exact) mix_as_they_are(r, v, keys);
    }
    for (int r = 0; r < task.rows; ++r) {
      put_in_order(this->mixed + r * padded(plan.sizes.V));
      this->finish(r);
    }
  }

  // scores[r][key] = q_r . k_key: a key in each lane, so that four numbers of q are multiplied with those of W keys.
  // The tile's values are prefetched meanwhile.
  template <int R>
  void score(const Number* k, const Number* v, index keys) {
    constexpr int both = R <= 4 ? 2 : 1;  // vectors of keys that share the reading of q, as far as the registers reach
    const index D = plan.sizes.D;
    for (index key = 0; key < keys; key += both * W) {
      Ints sum[both][R][digits];
#pragma GCC unroll 2
      for (int b = 0; b < both; ++b)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
          for (int p = 0; p < digits; ++p) sum[b][r][p] = A::all_int(of_q[r].raised[p]);
      for (index d = 0; d < D; d += step) {
        const int some = static_cast<int>(D - d < step ? D - d : step);
        alignas(64) F words[both][W];
#pragma GCC unroll 1
        for (int b = 0; b < both; ++b) turn(k, v, key + b * W, d, keys, some, words[b]);
        const std::int32_t* from = q_words + d / 4 * R * digits;
#pragma GCC unroll 1
        for (int w = 0; w < W; ++w, from += R * digits)
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
            for (int p = 0; p < digits; ++p)
#pragma GCC unroll 2
              for (int b = 0; b < both; ++b)
                sum[b][r][p] = Bytes::dot((Ints)words[b][w], A::all_int(from[r * digits + p]), sum[b][r][p]);
      }
#pragma GCC unroll 2
      for (int b = 0; b < both; ++b)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          A::store(this->scores + r * line + key + b * W, total(sum[b][r]) * A::all(of_q[r].scale));
    }
    for (int r = 0; r < R; ++r)
      if (!of_q[r].exact) score_as_it_is(r, k, keys);
  }

  // Numbers [d, d + some) of W keys from `key` on: words[w] has word w of each of them.
  void turn(const Number* k, const Number* v, index key, index d, index keys, int some, F (&words)[W]) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      const index at = key + i < keys ? key + i : keys - 1;
      words[i] = (F)Bytes::raised(Bytes::load_some(k + at * plan.k.row + d, some));
      prefetch(v + at * plan.v.row + d);
    }
    A::transpose(words);
  }

  static F total(const Ints (&sum)[digits]) {
    const F low = A::fma(Bytes::floats(sum[1]), A::all(256), Bytes::floats(sum[0]));
    return A::fma(Bytes::floats(sum[2]), A::all(65536), low);
  }

  void score_as_it_is(int r, const Number* k, index keys) {
    const float* q = this->q + r * padded(plan.sizes.D);
    for (index i = 0; i < keys; ++i) {
      float sum = 0;
      for (index d = 0; d < plan.sizes.D; ++d) sum += q[d] * k[i * plan.k.row + d];
      this->scores[r * line + i] = sum;
    }
  }

  // Columns [column, column + width) of a tile's values, and what to prefetch meanwhile: the next tile's keys.
  struct Page {
    const Number *v, *next;
    index column, keys;
    int width;
  };

  // mixed[r] = mixed[r] * decay[r] + weights[r] . v for `step` columns from j on, in the order of Bytes::place_of.
  template <int R>
  void mix(const Number* v, const Number* next, index j, index keys, const float (&decay)[R]) {
    const Page page{v + j, next + j, j, keys, static_cast<int>(plan.sizes.V - j < step ? plan.sizes.V - j : step)};
    if constexpr (R <= 4) {
      mix_quarters<R, 0, 2>(page, decay);
      mix_quarters<R, 2, 2>(page, decay);
    } else {
      mix_quarters<R, 0, 1>(page, decay);
      mix_quarters<R, 1, 1>(page, decay);
      mix_quarters<R, 2, 1>(page, decay);
      mix_quarters<R, 3, 1>(page, decay);
    }
  }

  template <int R, int first_quarter, int quarters>
  inline __attribute__((always_inline)) void mix_quarters(const Page& page, const float (&decay)[R]) {
    const index stride = plan.v.row, next_stride = plan.k.row, keys = page.keys;
    const Number *v = page.v, *next = page.next;
    Ints sum[R][quarters][digits];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < quarters; ++c)
#pragma GCC unroll 3
        for (int p = 0; p < digits; ++p) sum[r][c][p] = Ints{};
    const std::int32_t* from = weight_words;
    for (index i = 0; i < keys; i += 4, ++from, v += 4 * stride, next += 4 * next_stride) {
      Ints rows[4], x[quarters];
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        if (first_quarter == 0) prefetch(next + t * next_stride);
        rows[t] = i + t < keys ? Bytes::load_some(v + t * stride, page.width) : Ints{};
      }
      x[0] = Bytes::template columns<first_quarter>(rows);
      if constexpr (quarters == 2) x[1] = Bytes::template columns<first_quarter + 1>(rows);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
        for (int p = 0; p < digits; ++p) {
          const Ints weight = A::all_int(from[(r * digits + p) * (line / 4)]);
#pragma GCC unroll 2
          for (int c = 0; c < quarters; ++c) sum[r][c][p] = Bytes::dot(weight, x[c], sum[r][c][p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < quarters; ++c) {
        float* to = this->mixed + r * padded(plan.sizes.V) + page.column + (first_quarter + c) * W;
        const F more = total(sum[r][c]) * A::all(of_weights[r].scale);
        A::store(to, A::fma(A::load(to), A::all(decay[r]), more));
      }
  }

  void mix_as_they_are(int r, const Number* v, index keys) {
    const float* weights = this->scores + r * line;
    float* to = this->mixed + r * padded(plan.sizes.V);
    for (index j = 0; j < plan.sizes.V; ++j)
      for (index i = 0; i < keys; ++i) to[Bytes::place_of(j)] += weights[i] * v[i * plan.v.row + j];
  }

  void put_in_order(float* mixed) {
    for (index j = 0; j < plan.sizes.V; j += step) {
      float copy[step];
      std::memcpy(copy, mixed + j, sizeof copy);
      for (index c = 0; c < step; ++c) mixed[j + c] = copy[Bytes::place_of(c)];
    }
  }
};

template <class Bytes>
constexpr Kernels make_byte_kernels() {
  using A = typename Bytes::A;
  Kernels k{};
  k.lanes = A::NR * A::W;
  k.few = FewBytes<Bytes>::most_rows;
  k.block_rows = block_rows<A>;
  k.scratch_bytes = FewBytes<Bytes>::scratch_bytes;
  k.attend_few = FewBytes<Bytes>::run;
  k.merge = merge<A>;
  return k;
}

template <class Bytes>
constexpr Kernels byte_kernels_of = make_byte_kernels<Bytes>();

}  // namespace
}  // namespace multihead
