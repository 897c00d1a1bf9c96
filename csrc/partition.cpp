// Vectorised loops over a long row, compiled for several instruction sets.
#include "partition.h"

#include <tuple>

namespace nlgrpo {
namespace {

template <class F>
NLGRPO_INLINE void cut(const typename F::Bits* x, int64_t n, typename F::Key low, int shift, uint32_t* cells) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    cells[i] = static_cast<uint32_t>(static_cast<typename F::Key>(F::key(x[i]) - low) >> shift);
  }
}

}  // namespace

NLGRPO_CLONES void find_range(const uint16_t* x, int64_t n, uint16_t& low, uint16_t& high) {
  std::tie(low, high) = range_of<Half>(x, n);
}
NLGRPO_CLONES void find_range(const uint32_t* x, int64_t n, uint32_t& low, uint32_t& high) {
  std::tie(low, high) = range_of<Single>(x, n);
}
NLGRPO_CLONES void find_range(const uint64_t* x, int64_t n, uint64_t& low, uint64_t& high) {
  std::tie(low, high) = range_of<Double>(x, n);
}

NLGRPO_CLONES void find_cells(const uint16_t* x, int64_t n, uint16_t low, int shift, uint32_t* cells) {
  cut<Half>(x, n, low, shift, cells);
}
NLGRPO_CLONES void find_cells(const uint32_t* x, int64_t n, uint32_t low, int shift, uint32_t* cells) {
  cut<Single>(x, n, low, shift, cells);
}
NLGRPO_CLONES void find_cells(const uint64_t* x, int64_t n, uint64_t low, int shift, uint32_t* cells) {
  cut<Double>(x, n, low, shift, cells);
}

}  // namespace nlgrpo
