// Empirical CDF of sorted rows at queries, and a search for the first NaN.
#include "partition.h"

#include <atomic>

namespace nlgrpo {
namespace {

constexpr int64_t kTogether = 16;  // binary searches run interleaved, to overlap their memory accesses
constexpr int64_t kManyQueries = 1 << 16, kManySamples = 1 << 20;  // queries are grouped by value from these sizes

// A sorted row, and the cumulative sums of its weights, or null.
template <class T>
struct Sorted {
  const T* x;
  int64_t n;
  const double* cumulative;

  // Call found(j, #{x < q_j}, #{x <= q_j}) for the queries q_j = query(j), j < queries <= kTogether. The first element
  // >= q_j must be in x[first .. last].
  template <class Query, class Found>
  void search(const Query& query, int64_t queries, int64_t first, int64_t last, const Found& found) const {
    int64_t at[kTogether];
    T q[kTogether];
    for (int64_t j = 0; j < queries; j++) {
      at[j] = first, q[j] = query(j);
    }
    int64_t left = last - first;
    for (; left > 1; left -= left / 2) {
      const int64_t half = left / 2;
      for (int64_t j = 0; j < queries; j++) {
        at[j] += x[at[j] + half - 1] < q[j] ? half : 0;
      }
    }
    for (int64_t j = 0; j < queries; j++) {
      const int64_t strict = at[j] + (left > 0 && x[at[j]] < q[j]);
      found(j, strict, after_equal(strict, q[j]));
    }
  }

  // End of the elements equal to q, which begin at `strict`; searched with doubling steps.
  int64_t after_equal(int64_t strict, T q) const {
    if (strict == n || x[strict] != q) {
      return strict;
    }
    int64_t step = 1;
    while (strict + step < n && x[strict + step] == q) {
      step *= 2;
    }
    return std::upper_bound(x + strict + step / 2, x + std::min(n, strict + step), q) - x;
  }

  double weight_of_first(int64_t k) const {
    return k > 0 ? cumulative[k - 1] : 0;
  }
};

template <class T, class Out>
void evaluate_short(const Sorted<T>& row, const T* queries, int64_t n, Side side, Out* out) {
  for (int64_t begin = 0; begin < n; begin += kTogether) {
    const auto query = [q = queries + begin](int64_t j) { return q[j]; };
    row.search(query, std::min(kTogether, n - begin), 0, row.n, [&](int64_t j, int64_t strict, int64_t weak) {
      if (row.cumulative == nullptr) {
        out[begin + j] = static_cast<Out>(static_cast<double>(count(side, strict, weak)) /
                                          static_cast<double>(whole(side, row.n)));
      } else {
        out[begin + j] = static_cast<Out>(count(side, row.weight_of_first(strict), row.weight_of_first(weak)) /
                                          whole(side, row.weight_of_first(row.n)));
      }
    });
  }
}

// Many queries and many samples: queries are grouped into buckets of neighbouring values. Those of a bucket are
// searched in the small part of the samples that they span, which stays in the cache. Then the counts are read in the
// order of the queries.
template <class T, class F, class Out>
void evaluate_long(const Sorted<T>& row, const T* queries, int64_t n, Side side, Out* out) {
  using Bits = typename F::Bits;
  const auto* bits = reinterpret_cast<const Bits*>(queries);
  const Cells<F> cells(bits, n);
  const Buffer<Bits> moved(n);
  const Partition<F> parts(cells, [&](int64_t i, int64_t position) { moved[position] = bits[i]; });
  parts.template in_buckets<Room<Bits>>([&](int64_t bucket, Room<Bits>& memory) {
    const int64_t size = parts.size(bucket);
    Bits* here = memory.of(size);  // first the queries, then their counts
    parts.gather(bucket, moved.data(), here);
    const auto less = [](Bits a, Bits b) { return std::bit_cast<T>(a) < std::bit_cast<T>(b); };
    const auto [least, greatest] = std::minmax_element(here, here + size, less);
    const int64_t first = std::lower_bound(row.x, row.x + row.n, std::bit_cast<T>(*least)) - row.x;
    const int64_t last = std::lower_bound(row.x + first, row.x + row.n, std::bit_cast<T>(*greatest)) - row.x;
    for (int64_t begin = 0; begin < size; begin += kTogether) {
      const auto query = [q = here + begin](int64_t j) { return std::bit_cast<T>(q[j]); };
      row.search(query, std::min(kTogether, size - begin), first, last, [&](int64_t j, int64_t strict, int64_t weak) {
        here[begin + j] = static_cast<Bits>(count(side, strict, weak));
      });
    }
    parts.bring_back(bucket, here, moved.data());
  });
  const double all = static_cast<double>(whole(side, row.n));
  parts.each([&](int64_t i, int64_t position, int64_t) {
    out[i] = static_cast<Out>(static_cast<double>(moved[position]) / all);
  });
}

template <class T, class F, class Out>
void evaluate_rows(const Tensor& ordered, const Rows& rows, const Tensor& queries, const Rows& query_rows,
                   const double* cumulative, Side side, const Tensor& result) {
  const T *x = ordered.const_data_ptr<T>(), *q = queries.const_data_ptr<T>();
  Out* out = result.mutable_data_ptr<Out>();
  const auto sorted_row = [&](int64_t row) {
    const int64_t begin = rows.begin(row);
    return Sorted<T>{x + begin, rows.size(row), cumulative ? cumulative + begin : nullptr};
  };
  const auto grouped = [&](int64_t row) {
    const int64_t n = rows.size(row);
    return query_rows.size(row) >= kManyQueries && n >= kManySamples && n < int64_t{1} << 31 && !cumulative;
  };
  for (int64_t row = 0; row < rows.count(); row++) {
    const int64_t begin = query_rows.begin(row), n = query_rows.size(row);
    if (grouped(row)) {
      evaluate_long<T, F>(sorted_row(row), q + begin, n, side, out + begin);
    } else if (n > kInCache) {
      torch::stable::parallel_for(begin, begin + n, kGrain / kTogether, [&](int64_t first, int64_t last) {
        evaluate_short(sorted_row(row), q + first, last - first, side, out + first);
      });
    }
  }
  query_rows.in_parts([&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const int64_t begin = query_rows.begin(row), n = query_rows.size(row);
      if (n <= kInCache) {
        evaluate_short(sorted_row(row), q + begin, n, side, out + begin);
      }
    }
  });
}

template <class F>
bool any_nan(const typename F::Bits* x, int64_t n) {
  typename F::Bits any = 0;
  for (int64_t i = 0; i < n; i++) {
    any |= F::is_nan(x[i]) ? 1 : 0;
  }
  return any != 0;
}

}  // namespace

// ordered (P, M), or (total,) with offsets, each row sorted; queries (P, Q), or (total,) with query_offsets; both
// float32 or both float64. cumulative: float64, of the shape of ordered. Returns float64 or float32, of the shape of
// queries.
Tensor ecdf_evaluate(const Tensor& ordered, const std::optional<Tensor>& offsets, const Tensor& queries,
                     const std::optional<Tensor>& query_offsets, const std::optional<Tensor>& cumulative, int64_t side,
                     bool double_result) {
  using torch::headeronly::ScalarType;
  const Rows rows(ordered, offsets, "ordered"), query_rows(queries, query_offsets, "queries");
  STD_TORCH_CHECK(rows.count() == query_rows.count(), "expected queries and samples with the same number of rows");
  STD_TORCH_CHECK(ordered.scalar_type() == queries.scalar_type(), "expected queries and samples of one dtype");
  for (int64_t row = 0; row < rows.count(); row++) {
    STD_TORCH_CHECK(rows.size(row) > 0, "row ", row, " has no samples");
  }
  const double* sums = nullptr;
  if (cumulative.has_value()) {
    check_weights(*cumulative, ordered, "cumulative");
    sums = cumulative->const_data_ptr<double>();
  }
  const Tensor out = new_result(queries, double_result ? ScalarType::Double : ScalarType::Float);
  const auto run = [&]<class T, class F>(T, F) {
    double_result ? evaluate_rows<T, F, double>(ordered, rows, queries, query_rows, sums, side_of(side), out)
                  : evaluate_rows<T, F, float>(ordered, rows, queries, query_rows, sums, side_of(side), out);
  };
  switch (ordered.scalar_type()) {
    case ScalarType::Float:
      run(float{}, Single{});
      break;
    case ScalarType::Double:
      run(double{}, Double{});
      break;
    default:
      STD_TORCH_CHECK(false, "ordered must be float32 or float64");
  }
  return out;
}

// x, contiguous -> flat index of the first NaN, or -1
int64_t ecdf_first_nan(const Tensor& x) {
  STD_TORCH_CHECK(x.is_cpu() && x.is_contiguous(), "x must be contiguous, on the CPU");
  constexpr int64_t block = 4096;
  const int64_t n = x.numel();
  std::atomic<int64_t> first_of_all = n;
  with_format(x, "x", [&](auto format) {
    using F = decltype(format);
    const auto* bits = bits_of<F>(x);
    torch::stable::parallel_for(0, n, kGrain, [&](int64_t first, int64_t last) {
      for (int64_t begin = first; begin < last && begin < first_of_all; begin += block) {
        const int64_t end = std::min(last, begin + block);
        if (any_nan<F>(bits + begin, end - begin)) {
          const int64_t here = std::find_if(bits + begin, bits + end, F::is_nan) - bits;
          int64_t before = first_of_all;
          while (here < before && !first_of_all.compare_exchange_weak(before, here)) {
          }
          return;
        }
      }
    });
  });
  return first_of_all == n ? -1 : first_of_all.load();
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("ecdf_evaluate", TORCH_BOX(&ecdf_evaluate));
  m.impl("ecdf_first_nan", TORCH_BOX(&ecdf_first_nan));
}

}  // namespace nlgrpo
