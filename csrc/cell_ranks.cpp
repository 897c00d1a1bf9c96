// Ranks by counting in cells, compiled for several instruction sets.
#include "cell_ranks.h"

#include <cmath>

namespace nlgrpo {
namespace {

constexpr uint32_t kMostInCell = 32;  // different values; sorting is faster for more

// Compute the cell and the key of each value. Returns false if the range or its scale is not finite.
template <class F>
NLGRPO_INLINE bool cut_range(const typename F::Bits* x, int64_t n, const CellArrays<F>& arrays) {
  using Number = typename F::Number;
  const auto [low, high] = range_of<F>(x, n);
  const Number least = F::number(low), range = F::number(high) - least;
  const Number scale = static_cast<Number>(arrays.cells - 1) / range;
  if (!std::isfinite(range) || !std::isfinite(scale)) {  // also true if a value is not finite
    return false;
  }
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    arrays.cell[i] = static_cast<uint32_t>(static_cast<int32_t>((std::bit_cast<Number>(x[i]) - least) * scale));
    arrays.keys[i] = static_cast<typename CellArrays<F>::Signed>(F::key(x[i]) ^ F::sign);
  }
  return true;
}

// Put the keys into their cells. Returns the number of keys in the fullest cell.
template <class F>
NLGRPO_INLINE uint32_t fill_cells(int64_t n, const CellArrays<F>& arrays) {
  std::fill_n(arrays.ends, arrays.cells + 1, 0u);
  uint32_t* next = arrays.ends + 1;
  for (int64_t i = 0; i < n; i++) {
    next[arrays.cell[i]]++;
  }
  uint32_t before = 0, most = 0;
  for (int64_t cell = 0; cell < arrays.cells; cell++) {
    const uint32_t here = std::exchange(next[cell], before);
    before += here;
    most = std::max(most, here);
  }
  for (int64_t i = 0; i < n; i++) {
    arrays.sorted[next[arrays.cell[i]]++] = arrays.keys[i];
  }
  std::fill_n(arrays.sorted + n, kCompared, std::numeric_limits<typename CellArrays<F>::Signed>::max());
  return most;
}

// Whether all keys of each cell are equal.
template <class F>
NLGRPO_INLINE bool one_value_a_cell(int64_t n, const CellArrays<F>& arrays) {
  int64_t i = 0;
  for (; i < n && arrays.keys[i] == arrays.sorted[arrays.ends[arrays.cell[i]]]; i++) {
  }
  return i == n;
}

template <Side side, class F>
NLGRPO_INLINE void compare_in_cells(int64_t n, const CellArrays<F>& arrays) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t begin = arrays.ends[arrays.cell[i]], end = arrays.ends[arrays.cell[i] + 1];
    const auto key = arrays.keys[i];
    uint32_t rank = whole(side, begin);
    for (uint32_t first = begin; first < end; first += kCompared) {
      const auto* other = arrays.sorted + first;
      uint32_t sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t k = 0; k < kCompared; k++) {
        sum += count<uint32_t>(side, other[k] < key, other[k] <= key);
      }
      rank += sum;
    }
    arrays.rank[i] = static_cast<int32_t>(rank);
  }
}

template <class F>
NLGRPO_INLINE bool rank(const typename F::Bits* x, int64_t n, Side side, const CellArrays<F>& arrays) {
  if (!cut_range(x, n, arrays)) {
    return false;
  }
  const uint32_t most = fill_cells(n, arrays);
  if (most > kCompared && one_value_a_cell(n, arrays)) {  // ties; without ties nearly always most <= kCompared
    for (int64_t i = 0; i < n; i++) {
      const uint32_t begin = arrays.ends[arrays.cell[i]], end = arrays.ends[arrays.cell[i] + 1];
      arrays.rank[i] = static_cast<int32_t>(count(side, begin, end));
    }
    return true;
  }
  if (most > kMostInCell) {
    return false;
  }
  switch (side) {
    case Side::strict:
      compare_in_cells<Side::strict>(n, arrays);
      break;
    case Side::weak:
      compare_in_cells<Side::weak>(n, arrays);
      break;
    default:
      compare_in_cells<Side::mid>(n, arrays);
  }
  return true;
}

}  // namespace

NLGRPO_CLONES bool rank_by_cells(const uint32_t* x, int64_t n, Side side, const CellArrays<Single>& arrays) {
  return rank(x, n, side, arrays);
}
NLGRPO_CLONES bool rank_by_cells(const uint64_t* x, int64_t n, Side side, const CellArrays<Double>& arrays) {
  return rank(x, n, side, arrays);
}

}  // namespace nlgrpo
