// Ranks: the empirical CDF of each row of samples at the row's own samples.
#include "lanes.h"
#include "radix_sort.h"

#include <vector>

namespace nlgrpo {
namespace {

// Writes a rank in the place of the key or weight that it belongs to.
template <class T>
struct Put {
  T* to;
  template <class Rank>
  void operator()(int64_t i, Rank rank) const {
    to[i] = static_cast<T>(rank);
  }
};

// write(i, count of `side`) for the n elements of a row that lie in the cache.
template <class F, class Write>
void count_sorted(const typename F::Bits* x, int64_t n, Side side, Sorter& sorter, const Write& write) {
  const uint64_t* sorted = sorter.sort<F>(x, n);
  for_runs(sorted, n, [&](int64_t begin, int64_t end) {
    const int64_t rank = count(side, begin, end);
    for (int64_t k = begin; k < end; k++) {
      write(Sorter::position(sorted[k]), rank);
    }
  });
}

// Few different keys: what a cell's elements have in common is their rank.
template <class F, class Write>
void count_by_cell(const Cells<F>& cells, Side side, const Write& write) {
  std::vector<int64_t> rank(cells.cells());
  int64_t before = 0;
  for (int64_t cell = 0; cell < cells.cells(); cell++) {
    const int64_t here = cells.size(cell);
    rank[cell] = count(side, before, before + here);
    before += here;
  }
  cells.in_chunks([&](int64_t, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      write(i, rank[cells.cell_of(i)]);
    }
  });
}

// The same for a row of any length, in parallel. Each key moves to its bucket, gives way to its rank there, which is
// read back from there: twice the row's own size is all that is touched.
template <class F, class Write>
void count_long(const typename F::Bits* x, int64_t n, Side side, const Write& write) {
  using Key = typename F::Key;
  const Cells<F> cells(x, n);
  if (cells.exact()) {
    return count_by_cell(cells, side, write);
  }
  if constexpr (sizeof(Key) >= 4) {  // a narrower key has its own cell
    const Partition<F> parts(cells);
    const Buffer<Key> keys(n);
    parts.each([&](int64_t i, int64_t position, int64_t) { keys[position] = F::key(x[i]); });
    parts.in_buckets([&](int64_t bucket, Sorter& sorter) {
      Key* here = keys.data() + parts.begin(bucket);
      const int64_t size = parts.size(bucket);
      if (size <= kInCache) {
        return count_sorted<Made<Key>>(here, size, side, sorter, Put<Key>{here});
      }
      STD_TORCH_CHECK(size < int64_t{1} << 31, "2^31 samples too close to each other");
      count_long<Made<Key>>(here, size, side, Put<Key>{here});
    });
    parts.each([&](int64_t i, int64_t position, int64_t bucket) {
      write(i, whole(side, parts.begin(bucket)) + static_cast<int64_t>(keys[position]));
    });
  }
}

// As count_sorted, with sums of weights for counts; returns the sum of all.
template <class F, class Write>
double weigh_sorted(const typename F::Bits* x, const double* weights, int64_t n, Side side, Sorter& sorter,
                    const Write& write) {
  const uint64_t* sorted = sorter.sort<F>(x, n);
  double before = 0;
  for_runs(sorted, n, [&](int64_t begin, int64_t end) {
    double up_to = before;
    for (int64_t k = begin; k < end; k++) {
      up_to += weights[Sorter::position(sorted[k])];
    }
    const double rank = count(side, before, up_to);
    for (int64_t k = begin; k < end; k++) {
      write(Sorter::position(sorted[k]), rank);
    }
    before = up_to;
  });
  return before;
}

// The same for a row of any length. Sums run inside the buckets, then over them: the threads have no part in their order.
template <class F, class Write>
double weigh_long(const typename F::Bits* x, const double* weights, int64_t n, Side side, const Write& write) {
  using Key = typename F::Key;
  const Cells<F> cells(x, n);
  const Partition<F> parts(cells);
  const Buffer<Key> keys(n);
  const Buffer<double> sums(n);  // the weights at first
  std::vector<double> before(parts.buckets() + 1);
  parts.each([&](int64_t i, int64_t position, int64_t) {
    keys[position] = F::key(x[i]);
    sums[position] = weights[i];
  });
  parts.in_buckets([&](int64_t bucket, Sorter& sorter) {
    const Key* key = keys.data() + parts.begin(bucket);
    double* sum = sums.data() + parts.begin(bucket);
    const int64_t size = parts.size(bucket);
    const Put<double> put{sum};
    if (size > kInCache && cells.cells() > 1) {
      before[bucket + 1] = weigh_long<Made<Key>>(key, sum, size, side, put);
    } else if (size > kInCache) {  // one key
      double up_to = 0;
      for (int64_t k = 0; k < size; k++) {
        up_to += sum[k];
      }
      std::fill_n(sum, size, count(side, 0.0, up_to));
      before[bucket + 1] = up_to;
    } else {
      before[bucket + 1] =
          weigh_sorted<Made<Key>>(key, sum, size, side, sorter, put);
    }
  });
  for (int64_t bucket = 0; bucket < parts.buckets(); bucket++) {
    before[bucket + 1] += before[bucket];
  }
  parts.each([&](int64_t i, int64_t position, int64_t bucket) {
    write(i, whole(side, before[bucket]) + sums[position]);
  });
  return before.back();
}

// out = ranks of every row; Out is double or float.
template <class F, class Out>
void rank_rows(const typename F::Bits* x, const Rows& rows, Side side, Out* out) {
  const auto divide = [side, out](int64_t begin, int64_t n) {
    const double all = static_cast<double>(whole(side, n));
    return [to = out + begin, all](int64_t i, int64_t rank) {
      to[i] = static_cast<Out>(static_cast<double>(rank) / all);
    };
  };
  rows.long_ones([&](int64_t begin, int64_t n) { count_long<F>(x + begin, n, side, divide(begin, n)); });
  const Networks networks(rows);
  rows.in_parts([&](int64_t first, int64_t last) {
    Sorter sorter;
    Lanes<F> lanes(networks);
    for (int64_t row = first; row < last; row++) {
      const int64_t n = rows.size(row), begin = rows.begin(row);
      if (const int64_t together = lanes.take(x, rows, row, last); together > 0) {
        lanes.ranks(side, out);
        row += together - 1;
      } else if (0 < n && n <= kInCache) {
        count_sorted<F>(x + begin, n, side, sorter, divide(begin, n));
      }
    }
  });
}

template <class F, class Out>
void weigh_rows(const typename F::Bits* x, const double* weights, const Rows& rows, Side side, Out* out) {
  // The whole is known when all of a row is summed: until then its sums wait in float64.
  const auto divide = [side](const double* sums, int64_t n, double all, Out* to) {
    std::transform(sums, sums + n, to, [by = whole(side, all)](double sum) { return static_cast<Out>(sum / by); });
  };
  rows.long_ones([&](int64_t begin, int64_t n) {
    const Buffer<double> sums(n);
    const double all = weigh_long<F>(x + begin, weights + begin, n, side, Put<double>{sums.data()});
    divide(sums.data(), n, all, out + begin);
  });
  rows.in_parts([&](int64_t first, int64_t last) {
    Sorter sorter;
    std::vector<double> sums;
    for (int64_t row = first; row < last; row++) {
      const int64_t n = rows.size(row), begin = rows.begin(row);
      if (0 < n && n <= kInCache) {
        sums.resize(std::max<size_t>(sums.size(), n));
        const double all = weigh_sorted<F>(x + begin, weights + begin, n, side, sorter, Put<double>{sums.data()});
        divide(sums.data(), n, all, out + begin);
      }
    }
  });
}

template <class F, class Out>
void fill(const Tensor& samples, const std::optional<Tensor>& weights, const Rows& rows, Side side, const Tensor& out) {
  Out* to = out.mutable_data_ptr<Out>();
  if (weights.has_value()) {
    weigh_rows<F>(bits_of<F>(samples), weights->const_data_ptr<double>(), rows, side, to);
  } else {
    rank_rows<F>(bits_of<F>(samples), rows, side, to);
  }
}

}  // namespace

// samples (P, M), or (total) with offsets (P + 1); weights as samples, float64; -> as samples, float64 or float32
Tensor ecdf_ranks(const Tensor& samples, const std::optional<Tensor>& offsets, const std::optional<Tensor>& weights,
                  int64_t side, bool double_result) {
  const Rows rows(samples, offsets, "samples");
  if (weights.has_value()) {
    check_weights(*weights, samples, "weights");
  }
  using torch::headeronly::ScalarType;
  const Tensor out = new_result(samples, double_result ? ScalarType::Double : ScalarType::Float);
  with_format(samples, "samples", [&](auto format) {
    using F = decltype(format);
    double_result ? fill<F, double>(samples, weights, rows, side_of(side), out)
                  : fill<F, float>(samples, weights, rows, side_of(side), out);
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("ecdf_ranks", TORCH_BOX(&ecdf_ranks));
}

}  // namespace nlgrpo
