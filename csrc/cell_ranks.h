// Ranks of a row that fits in the cache: values are counted in cells of equal width, without sorting.
#pragma once

#include "radix_sort.h"

namespace nlgrpo {

// Working arrays for the ranks of n values.
template <class F>
struct CellArrays {
  using Signed = std::make_signed_t<typename F::Key>;  // every processor compares vectors of signed integers

  int64_t cells;
  uint32_t* cell;  // (n) cell of each value
  uint32_t* ends;  // (cells + 1) 0, then the end of each cell in `sorted`
  int32_t* rank;   // (n) rank of each value; signed, as it is converted to floating point
  Signed* keys;    // (n) key of each value
  Signed* sorted;  // (n + kCompared) keys grouped by cell
};
constexpr int64_t kCompared = 8;  // keys compared at once

// arrays.rank = count of `side` for x[0 .. n), n >= 1. Returns false if this method does not apply: x contains an
// infinity or a NaN, all values are equal, or many different values share a cell.
bool rank_by_cells(const uint32_t* x, int64_t n, Side side, const CellArrays<Single>& arrays);
bool rank_by_cells(const uint64_t* x, int64_t n, Side side, const CellArrays<Double>& arrays);

// Ranks by cells, with memory that one thread reuses for all rows.
//
// The range of the values is divided into cells of equal width. The rank of a value is the number of values in lower
// cells, plus the number of smaller values in the same cell. If values are spread evenly, a cell has few values, it
// fits in a vector, and one comparison counts them. The rest of the vector belongs to higher cells and is greater.
template <class F>
class CellRanks {
 public:
  static constexpr int64_t kMost = 1 << 14;  // for larger rows, random accesses miss the L1 cache

  // Returns the ranks of x[0 .. n) by `cells` <= n cells, valid until the next call. Returns null if rank_by_cells
  // returns false, or if n is too small or too large for this method to be faster than sorting.
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
