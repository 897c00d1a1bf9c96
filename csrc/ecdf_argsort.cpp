// Stable argsort of each row.
#include "lanes.h"
#include "partition.h"

#include <numeric>

namespace nlgrpo {
namespace {

// Memory of one thread.
template <class F>
struct Memory {
  Sorter sorter;
  Room<typename F::Bits> values;
  Room<int64_t> indices, order;
};

// out = argsort of a row of any length, in parallel. Indices are moved to the buckets together with the elements.
template <class F>
void argsort_long(const typename F::Bits* x, int64_t n, int64_t* out) {
  using Bits = typename F::Bits;
  const Cells<F> cells(x, n);
  if (cells.cells() == 1) {  // all are equal
    std::iota(out, out + n, int64_t{0});
    return;
  }
  const Buffer<Bits> moved(n);
  const Buffer<int32_t> came(n);  // distance of the move, which stays within a chunk
  const Partition<F> parts(cells, [&](int64_t i, int64_t position) {
    moved[position] = x[i];
    came[position] = static_cast<int32_t>(i - position);
  });
  parts.template in_buckets<Memory<F>>([&](int64_t bucket, Memory<F>& memory) {
    const int64_t size = parts.size(bucket);
    Bits* values = memory.values.of(size);
    int64_t* index = memory.indices.of(size);
    int64_t* to = out + parts.begin(bucket);
    parts.gather(bucket, moved.data(), values);
    parts.segments(bucket, [&, k = int64_t{0}](int64_t position, int64_t length) mutable {
      for (const int64_t end = position + length; position < end; position++) {
        index[k++] = position + came[position];
      }
    });
    if (size <= kInCache) {
      const uint64_t* sorted = memory.sorter.template sort<F>(values, size);
      std::transform(sorted, sorted + size, to, [index](uint64_t entry) { return index[Sorter::position(entry)]; });
    } else {
      int64_t* order = memory.order.of(size);
      argsort_long<F>(values, size, order);
      std::transform(order, order + size, to, [index](int64_t k) { return index[k]; });
    }
  });
}

template <class F>
void argsort_rows(const typename F::Bits* x, const Rows& rows, int64_t* out) {
  rows.long_ones([&](int64_t begin, int64_t n) { argsort_long<F>(x + begin, n, out + begin); });
  for_short_rows<F, Sorter>(
      x, rows, kInCache, [&](const Lanes<F>& lanes) { lanes.order(out); },
      [&](int64_t begin, int64_t n, Sorter& sorter) {
        const uint64_t* sorted = sorter.sort<F>(x + begin, n);
        std::transform(sorted, sorted + n, out + begin, Sorter::position);
      });
}

}  // namespace

// samples (P, M), or (total,) with offsets (P + 1,) -> indices within the row, int64, of the shape of samples
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
