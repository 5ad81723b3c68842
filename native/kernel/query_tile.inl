// Tiles of queries, for passes that have keys in lanes: a tile at a time, with the keys each query sees.
#pragma once

#include "kernel/scores.inl"
#include "kernel/tile.inl"

namespace multihead {
namespace {

constexpr index tile_rows = tile_keys;

// Some queries of one head, side by side in memory.
struct QueryRun {
  index head, query, count;
  const index *start, *stop;
  bool ragged;  // some query does not see some key
};

// The bounds of a tile of queries, and which of them see something of a strip of keys.
struct QueryTile {
  index head, query, rows;
  index start[tile_rows], stop[tile_rows];

  // False where no query sees any of the keys [low, high).
  bool fill(const Plan& plan, index b, index h, index first, index low, index high) {
    const index K = plan.sizes.K, left = plan.sizes.Q - first;
    head = h, query = first, rows = left < tile_rows ? left : tile_rows;
    bool any = false;
    for (index i = 0; i < rows; ++i) {
      const index from = plan.start.at(b, h, first + i), to = plan.stop.at(b, h, first + i);
      start[i] = from < 0 ? 0 : from > K ? K : from;
      stop[i] = to < 0 ? 0 : to > K ? K : to;
      any |= start[i] < high && stop[i] > low && start[i] < stop[i];
    }
    return any;
  }

  // The queries from the first to the last that sees some of the keys [low, high); none: count 0.
  QueryRun over(index low, index high) const {
    const auto misses = [&](index r) { return start[r] >= high || stop[r] <= low || start[r] >= stop[r]; };
    index first = 0, last = rows;
    while (first < last && misses(first)) ++first;
    while (first < last && misses(last - 1)) --last;
    bool ragged = false;
    for (index r = first; r < last; ++r) ragged |= start[r] > low || stop[r] < high;
    return {head, query + first, last - first, start + first, stop + first, ragged};
  }
};

// Assigns a strip's lanes to keys [key, key + rows): query[lane] is the key, beyond the last one that again.
template <class A>
void over_keys(Strip<A>& strip, index g, index key, index rows) {
  strip.resize(rows);
  for (int lane = 0; lane < strip.nr * A::W; ++lane) {
    strip.query[lane] = key + (lane < strip.rows ? lane : strip.rows - 1);
    strip.head[lane] = g;
  }
}

// The lanes of a row of a dense (B,H,Q,K) tensor.
template <class A, class Element>
typename A::F across(const Dense& dense, const Strip<A>& strip, index b, index h, index q, int c) {
  const Element* at = static_cast<const Element*>(dense.data) + b * dense.batch + h * dense.head + q * dense.query;
  typename A::T lanes[A::W];
  for (int i = 0; i < A::W; ++i) lanes[i] = static_cast<typename A::T>(at[strip.query[c * A::W + i] * dense.key]);
  return A::load(lanes);
}

}  // namespace
}  // namespace multihead
