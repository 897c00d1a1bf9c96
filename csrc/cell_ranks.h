// Ranks of a row in the cache by counting its values in cells of one width, without sorting it.
#pragma once

#include "radix_sort.h"

namespace nlgrpo {

// What the ranks of n values are computed in.
template <class F>
struct CellArrays {
  using Signed = std::make_signed_t<typename F::Key>;  // keys as every processor can compare vectors of them

  int64_t cells;
  uint32_t* cell;  // (n) of each value
  uint32_t* ends;  // (cells + 1) of each cell, after a 0
  int32_t* rank;   // (n) of each value: signed, as it becomes floating-point
  Signed* keys;    // (n) of each value
  Signed* sorted;  // (n + kCompared) the keys, by cells
};
constexpr int64_t kCompared = 8;  // keys that are compared at once

// arrays.rank = count of `side` for x[0 .. n), n >= 1. False where this is not the way: an infinity, a NaN, one value
// only, or values so uneven that many different ones share a cell.
bool rank_by_cells(const uint32_t* x, int64_t n, Side side, const CellArrays<Single>& arrays);
bool rank_by_cells(const uint64_t* x, int64_t n, Side side, const CellArrays<Double>& arrays);

// The memory of one thread for it, kept from row to row.
//
// The range of the values is cut into cells of one width. The rank of a value is how many lie in the cells below, plus
// how many of its own cell are smaller. Where values spread evenly these are few, so that a vector holds the cell, and
// one comparison counts it: what else is in the vector is of cells above, and greater.
template <class F>
class CellRanks {
 public:
  static constexpr int64_t kMost = 1 << 14;  // beyond, what is reached at random leaves the first cache

  // The ranks of x[0 .. n) by `cells` <= n cells, which stay until the next call; or null where there are too few or too
  // many values for it to pay, or rank_by_cells is false.
  const int32_t* rank(const typename F::Bits* x, int64_t n, int64_t cells, Side side) {
    if constexpr (sizeof(typename F::Key) < 4) {
      return nullptr;
    } else {
      if (n < kFewest || n > kMost) {
        return nullptr;
      }
      if (keys_.data() == nullptr) {
        counts_ = Buffer<uint32_t>(2 * kMost + 1), ranks_ = Buffer<int32_t>(kMost);
        keys_ = Buffer<Signed>(2 * kMost + kCompared);
      }
      const CellArrays<F> arrays{.cells = cells,
                                 .cell = counts_.data() + kMost + 1,
                                 .ends = counts_.data(),
                                 .rank = ranks_.data(),
                                 .keys = keys_.data(),
                                 .sorted = keys_.data() + kMost};
      return rank_by_cells(x, n, side, arrays) ? ranks_.data() : nullptr;
    }
  }

 private:
  using Signed = typename CellArrays<F>::Signed;
  static constexpr int64_t kFewest = 32;

  Buffer<uint32_t> counts_;
  Buffer<int32_t> ranks_;
  Buffer<Signed> keys_;
};

}  // namespace nlgrpo
