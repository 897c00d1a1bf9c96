// Merge of two arrays of sorted rows, row by row, with their weights.
#include "radix_sort.h"

#include <tuple>

namespace nlgrpo {
namespace {

// Sorted elements, and their weights or null.
template <class T>
struct Run {
  T* x;
  int64_t n;
  double* weights;
};

// Number of elements of a among the first d merged elements. Elements of a come before equal elements of b.
template <class F>
int64_t split(const typename F::Bits* a, int64_t na, const typename F::Bits* b, int64_t nb, int64_t d) {
  int64_t low = std::max<int64_t>(0, d - nb), high = std::min(d, na);
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (F::key(a[middle]) <= F::key(b[d - middle - 1])) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Write out[first .. last) of the merge of a and b.
template <class F>
void merge_part(const Run<const typename F::Bits>& a, const Run<const typename F::Bits>& b, int64_t first, int64_t last,
                const Run<typename F::Bits>& out) {
  int64_t i = split<F>(a.x, a.n, b.x, b.n, first), j = first - i;
  for (int64_t k = first; k < last; k++) {
    const bool from_b = i == a.n || (j < b.n && F::key(b.x[j]) < F::key(a.x[i]));
    out.x[k] = from_b ? b.x[j] : a.x[i];
    if (out.weights != nullptr) {
      out.weights[k] = from_b ? b.weights[j] : a.weights[i];
    }
    i += !from_b, j += from_b;
  }
}

template <class F>
void merge_rows(const Tensor& a, const Rows& a_rows, const Tensor& b, const Rows& b_rows, const double* a_weights,
                const double* b_weights, const Tensor& merged, double* weights) {
  using Bits = typename F::Bits;
  const Bits *from_a = bits_of<F>(a), *from_b = bits_of<F>(b);
  Bits* to = static_cast<Bits*>(merged.mutable_data_ptr());
  const auto row_of = [](auto* x, auto* weights, int64_t begin, int64_t n) {
    return Run<std::remove_pointer_t<decltype(x)>>{x + begin, n, const_cast<double*>(weights ? weights + begin : nullptr)};
  };
  const auto part = [&](int64_t row, int64_t first, int64_t last) {
    const int64_t begin_a = a_rows.begin(row), begin_b = b_rows.begin(row), na = a_rows.size(row),
                  nb = b_rows.size(row);
    merge_part<F>(row_of(from_a, a_weights, begin_a, na), row_of(from_b, b_weights, begin_b, nb), first, last,
                  row_of(to, weights, begin_a + begin_b, na + nb));
  };
  torch::stable::parallel_for(0, a.numel() + b.numel(), kGrain, [&](int64_t first, int64_t last) {
    // Rows that overlap [first, last) of the result; the first and the last row may overlap in part.
    int64_t low = 0, high = a_rows.count();
    while (low < high) {  // first row that ends after `first`
      const int64_t row = low + (high - low) / 2;
      a_rows.begin(row + 1) + b_rows.begin(row + 1) > first ? high = row : low = row + 1;
    }
    for (int64_t row = low; row < a_rows.count(); row++) {
      const int64_t begin = a_rows.begin(row) + b_rows.begin(row), n = a_rows.size(row) + b_rows.size(row);
      if (begin >= last) {
        break;
      }
      part(row, std::max<int64_t>(0, first - begin), std::min(n, last - begin));
    }
  });
}

}  // namespace

// a (P, M) and b (P, M'), or (total,) with offsets, each row sorted -> merged rows, flat (total,), and their weights
// (total,), empty if a and b have none
std::tuple<Tensor, Tensor> ecdf_merge(const Tensor& a, const std::optional<Tensor>& a_offsets, const Tensor& b,
                                      const std::optional<Tensor>& b_offsets, const std::optional<Tensor>& a_weights,
                                      const std::optional<Tensor>& b_weights) {
  const Rows a_rows(a, a_offsets, "a"), b_rows(b, b_offsets, "b");
  STD_TORCH_CHECK(a_rows.count() == b_rows.count(), "expected a and b with the same number of rows");
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), "expected a and b of one dtype");
  STD_TORCH_CHECK(a_weights.has_value() == b_weights.has_value(), "expected weights for both a and b, or for neither");
  const int64_t total = a.numel() + b.numel();
  const Tensor merged = torch::stable::new_empty(a, {total});
  const Tensor weights = torch::stable::new_empty(a, {a_weights.has_value() ? total : 0},
                                                  torch::headeronly::ScalarType::Double);
  if (a_weights.has_value()) {
    check_weights(*a_weights, a, "a_weights"), check_weights(*b_weights, b, "b_weights");
  }
  const auto data = [](const std::optional<Tensor>& x) {
    return x.has_value() ? x->const_data_ptr<double>() : nullptr;
  };
  with_format(a, "a", [&](auto format) {
    merge_rows<decltype(format)>(a, a_rows, b, b_rows, data(a_weights), data(b_weights), merged,
                                 a_weights.has_value() ? weights.mutable_data_ptr<double>() : nullptr);
  });
  return {merged, weights};
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("ecdf_merge", TORCH_BOX(&ecdf_merge));
}

}  // namespace nlgrpo
