// Positions of each row's samples in ascending order, equal ones in the row's order.
#include "lanes.h"
#include "radix_sort.h"

#include <numeric>

namespace nlgrpo {
namespace {

// indices[k] = indices[order(k)] for all k.
template <class Order>
void permute(int64_t* indices, int64_t n, const Order& order) {
  const Buffer<int64_t> old(n);
  std::copy_n(indices, n, old.data());
  for (int64_t k = 0; k < n; k++) {
    indices[k] = old[order(k)];
  }
}

// out = positions of a row of any length, in parallel. Indices move to the buckets with the keys, and are sorted there.
template <class F>
void argsort_long(const typename F::Bits* x, int64_t n, int64_t* out) {
  using Key = typename F::Key;
  const Cells<F> cells(x, n);
  if (cells.cells() == 1) {  // all are equal
    std::iota(out, out + n, int64_t{0});
    return;
  }
  const Partition<F> parts(cells);
  const Buffer<Key> keys(n);
  parts.each([&](int64_t i, int64_t position, int64_t) {
    keys[position] = F::key(x[i]);
    out[position] = i;
  });
  parts.in_buckets([&](int64_t bucket, Sorter& sorter) {
    const Key* here = keys.data() + parts.begin(bucket);
    int64_t* indices = out + parts.begin(bucket);
    const int64_t size = parts.size(bucket);
    if (size <= kInCache) {
      const uint64_t* sorted = sorter.sort<Made<Key>>(here, size);
      permute(indices, size, [sorted](int64_t k) { return Sorter::position(sorted[k]); });
    } else {
      const Buffer<int64_t> order(size);
      argsort_long<Made<Key>>(here, size, order.data());
      permute(indices, size, [&order](int64_t k) { return order[k]; });
    }
  });
}

template <class F>
void argsort_rows(const typename F::Bits* x, const Rows& rows, int64_t* out) {
  rows.long_ones([&](int64_t begin, int64_t n) { argsort_long<F>(x + begin, n, out + begin); });
  const Networks networks(rows);
  rows.in_parts([&](int64_t first, int64_t last) {
    Sorter sorter;
    Lanes<F> lanes(networks);
    for (int64_t row = first; row < last; row++) {
      const int64_t n = rows.size(row), begin = rows.begin(row);
      if (const int64_t together = lanes.take(x, rows, row, last); together > 0) {
        lanes.order(out);
        row += together - 1;
      } else if (0 < n && n <= kInCache) {
        const uint64_t* sorted = sorter.sort<F>(x + begin, n);
        std::transform(sorted, sorted + n, out + begin, Sorter::position);
      }
    }
  });
}

}  // namespace

// samples (P, M), or (total) with offsets (P + 1) -> as samples, int64: indices within the row
Tensor ecdf_argsort(const Tensor& samples, const std::optional<Tensor>& offsets) {
  const Rows rows(samples, offsets, "samples");
  Tensor out = new_result(samples, torch::headeronly::ScalarType::Long);
  with_format(samples, "samples", [&](auto format) {
    using F = decltype(format);
    argsort_rows<F>(bits_of<F>(samples), rows, out.mutable_data_ptr<int64_t>());
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("ecdf_argsort", TORCH_BOX(&ecdf_argsort));
}

}  // namespace nlgrpo
