// What is done to a head between its projection and attention: QK-norm, RoPE, and its place in the cache.
#pragma once

#include "kernel/convert.inl"

namespace multihead {
namespace {

template <class A>
class PrepareHeads {
 public:
  using F = typename A::F;
  static constexpr int W = A::W;

  // Tokens [from, to), of all batch rows. Products and sums are floats and nothing is contracted: a turned head has the
  // bits that torch's separate operations give.
  static void run(const Heads& heads, index from, index to, void* scratch) {
    auto* row = static_cast<float*>(scratch);
    for (index token = from; token < to; ++token) {
      const index b = token / heads.N, n = token % heads.N;
      if (heads.real && n >= heads.real[b]) continue;
      const index place = n + heads.first + (heads.firsts ? heads.firsts[b] : 0);
      const Rotation& turn = heads.rotation;
      const index at = turn.cos ? turn.offset(b, n) : 0;
      for (index h = 0; h < heads.heads; ++h) {
        widen<A>(row_of(heads.from, heads.from_type, b, h, n), heads.from_type, heads.width, row);
        if (heads.norm.wanted) norm(heads.norm, heads.width, row);
        if (turn.cos && turn.interleaved) rotate_neighbours(turn.cos + at, turn.sin + at, turn.pairs, row);
        if (turn.cos && !turn.interleaved) rotate_halves(turn.cos + at, turn.sin + at, turn.pairs, row);
        char* const to = row_of(heads.to, heads.to_type, b, h, place);
        if (heads.to_type == Type::i8)
          quantise(row, heads.width, reinterpret_cast<std::int8_t*>(to), scale_of(heads.scales, b, h, place));
        else
          narrow<A>(row, heads.to_type, heads.width, to);
      }
    }
  }

 private:
  static float* scale_of(const View& scales, index b, index h, index row) {
    return static_cast<float*>(scales.data) + b * scales.batch + h * scales.head + row * scales.row;
  }

  // Numbers as integers of at most 127 times one scale, rounded to nearest even. Where one is not finite the scale is
  // NaN, and so is the row.
  static void quantise(const float* row, index width, std::int8_t* to, float* scale) {
    float largest = 0;
    bool finite = true;
    for (index i = 0; i < width; ++i) {
      const float size = __builtin_fabsf(row[i]);
      largest = size > largest ? size : largest;
      finite &= size - size == 0;
    }
    const bool some = finite && largest > 1e-30f;  // the inverse of less than that may be infinite
    const float by = some ? 127 / largest : 0;
    *scale = !finite ? __builtin_nanf("") : some ? largest / 127 : 0;
    for (index i = 0; i < width; ++i)
      to[i] = some ? static_cast<std::int8_t>(__builtin_rintf(row[i] * by)) : std::int8_t(0);
  }

  static void norm(const Norm& norm, index width, float* row) {
    F squares = F{};
    index d = 0;
    for (; d + W <= width; d += W) squares = A::fma(A::load(row + d), A::load(row + d), squares);
    if (d < width) {
      const F last = A::load_some(row + d, static_cast<int>(width - d));
      squares = A::fma(last, last, squares);
    }
    const float mean = A::sum(squares) / static_cast<float>(width);
    const float factor = 1 / __builtin_sqrtf(mean + static_cast<float>(norm.eps));
    for (index i = 0; i < width; ++i) row[i] = row[i] * factor;
    if (norm.weight)
      for (index i = 0; i < width; ++i) row[i] = row[i] * norm.weight[i];
  }

  static void rotate_halves(const float* __restrict cos, const float* __restrict sin, index pairs,
                            float* __restrict row) {
    float* __restrict other = row + pairs;
    for (index p = 0; p < pairs; ++p) {
      const float a = row[p], b = other[p];
      row[p] = a * cos[p] - b * sin[p];
      other[p] = b * cos[p] + a * sin[p];
    }
  }

  static void rotate_neighbours(const float* __restrict cos, const float* __restrict sin, index pairs,
                                float* __restrict row) {
    for (index p = 0; p < pairs; ++p) {
      const float a = row[2 * p], b = row[2 * p + 1];
      row[2 * p] = a * cos[p] - b * sin[p];
      row[2 * p + 1] = b * cos[p] + a * sin[p];
    }
  }
};

}  // namespace
}  // namespace multihead
