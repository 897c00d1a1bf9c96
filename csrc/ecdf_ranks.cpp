// Ranks: the empirical CDF of each row at its own samples.
#include "cell_ranks.h"
#include "lanes.h"
#include "partition.h"

#include <numeric>
#include <vector>

namespace nlgrpo {
namespace {

constexpr int64_t kSorted = 1 << 13;  // longer rows are faster to rank in parts

// Overwrites the key or weight of an element by its rank.
template <class T>
struct Put {
  T* to;
  template <class Rank>
  void operator()(int64_t i, Rank rank) const {
    to[i] = static_cast<T>(rank);
  }
};

// Memory of one thread.
template <class F>
struct Memory {
  CellRanks<F> cells;
  Sorter sorter;
  Room<typename F::Bits> values;
  Room<double> weights;
};

// Call write(i, count of `side`) for the n elements of a row that fits in the cache.
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

// The same by `count` cells. Returns false if CellRanks does not apply.
template <class F, class Write>
bool count_in_cells(const typename F::Bits* x, int64_t n, int64_t count, Side side, CellRanks<F>& cells,
                    const Write& write) {
  const int32_t* ranks = cells.rank(x, n, count, side);
  if (ranks == nullptr) {
    return false;
  }
  for (int64_t i = 0; i < n; i++) {
    write(i, ranks[i]);
  }
  return true;
}

// The same for a long row with few different keys: all elements of a cell are equal and have one rank.
template <class F, class Write>
void count_by_cell(const Cells<F>& cells, Side side, const Write& write) {
  std::vector<int64_t> rank = cells.count();
  int64_t before = 0;
  for (int64_t& here : rank) {
    const int64_t up_to = before + here;
    here = count(side, before, up_to);
    before = up_to;
  }
  cells.all([&](int64_t i, uint32_t cell) { write(i, rank[cell]); });
}

// The same for any long row, in parallel. Each element is moved to its bucket and overwritten by its rank. Then the
// ranks are read in the order of the row. This touches only twice the memory of the row.
template <class F, class Write>
void count_long(const typename F::Bits* x, int64_t n, Side side, const Write& write) {
  using Bits = typename F::Bits;
  const Cells<F> cells(x, n);
  if (cells.exact()) {
    return count_by_cell(cells, side, write);
  }
  if constexpr (sizeof(Bits) >= 4) {  // each narrower key has a cell of its own
    const Buffer<Bits> moved(n);
    const Partition<F> parts(cells, [&](int64_t i, int64_t position) { moved[position] = x[i]; });
    parts.template in_buckets<Memory<F>>([&](int64_t bucket, Memory<F>& memory) {
      const int64_t size = parts.size(bucket);
      Bits* values = memory.values.of(size);
      parts.gather(bucket, moved.data(), values);
      const Put<Bits> put{values};
      if (size > kInCache) {
        STD_TORCH_CHECK(size < int64_t{1} << 31, "expected fewer than 2^31 samples in a small range of values");
        count_long<F>(values, size, side, put);
      } else if (!count_in_cells(values, size, size / 2, side, memory.cells, put)) {  // fewer cells suffice
        count_sorted<F>(values, size, side, memory.sorter, put);
      }
      parts.bring_back(bucket, values, moved.data());
    });
    parts.each([&](int64_t i, int64_t position, int64_t bucket) {
      write(i, whole(side, parts.begin(bucket)) + static_cast<int64_t>(moved[position]));
    });
  }
}

// As count_sorted, with sums of weights instead of counts. Returns the sum of all weights.
template <class F, class Write>
double weigh_sorted(const typename F::Bits* x, const double* weights, int64_t n, Side side, Memory<F>& memory,
                    const Write& write) {
  const uint64_t* sorted = memory.sorter.template sort<F>(x, n);
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

// The same for a long row. Weights are summed within each bucket, then over the buckets, so the order of the sums does
// not depend on the threads.
template <class F, class Write>
double weigh_long(const typename F::Bits* x, const double* weights, int64_t n, Side side, const Write& write) {
  using Bits = typename F::Bits;
  const Cells<F> cells(x, n);
  const Buffer<Bits> moved(n);
  const Buffer<double> sums(n);  // initially the weights
  const Partition<F> parts(cells, [&](int64_t i, int64_t position) {
    moved[position] = x[i];
    sums[position] = weights[i];
  });
  std::vector<double> before(parts.buckets() + 1);
  parts.template in_buckets<Memory<F>>([&](int64_t bucket, Memory<F>& memory) {
    const int64_t size = parts.size(bucket);
    Bits* values = memory.values.of(size);
    double* sum = memory.weights.of(size);
    parts.gather(bucket, moved.data(), values);
    parts.gather(bucket, sums.data(), sum);
    double& all = before[bucket + 1];
    if (size <= kInCache) {
      all = weigh_sorted<F>(values, sum, size, side, memory, Put<double>{sum});
    } else if (cells.cells() > 1) {
      all = weigh_long<F>(values, sum, size, side, Put<double>{sum});
    } else {  // all keys are equal
      all = std::accumulate(sum, sum + size, 0.0);
      std::fill_n(sum, size, count(side, 0.0, all));
    }
    parts.bring_back(bucket, sum, sums.data());
  });
  std::partial_sum(before.begin(), before.end(), before.begin());
  parts.each([&](int64_t i, int64_t position, int64_t bucket) {
    write(i, whole(side, before[bucket]) + sums[position]);
  });
  return before.back();
}

// out = ranks of all rows. Out is double or float.
template <class F, class Out>
void rank_rows(const typename F::Bits* x, const Rows& rows, Side side, Out* out) {
  const auto divide = [side, out](int64_t begin, int64_t n) {
    const double all = static_cast<double>(whole(side, n));
    return [to = out + begin, all](int64_t i, auto rank) {
      to[i] = static_cast<Out>(static_cast<double>(rank) / all);
    };
  };
  rows.long_ones([&](int64_t begin, int64_t n) { count_long<F>(x + begin, n, side, divide(begin, n)); });
  for_short_rows<F, Memory<F>>(
      x, rows, kInCache,
      [&](int64_t begin, int64_t n, Memory<F>& memory) {
        return count_in_cells(x + begin, n, n, side, memory.cells, divide(begin, n));
      },
      [&](Lanes<F>& lanes) { lanes.ranks(side, out); },
      [&](int64_t begin, int64_t n, Memory<F>& memory) {
        if (n > kSorted) {
          count_long<F>(x + begin, n, side, divide(begin, n));
        } else {
          count_sorted<F>(x + begin, n, side, memory.sorter, divide(begin, n));
        }
      });
}

template <class F, class Out>
void weigh_rows(const typename F::Bits* x, const double* weights, const Rows& rows, Side side, Out* out) {
  // The total weight is known only after the whole row is summed; until then the sums are stored in float64.
  const auto divide = [side](const double* sums, int64_t n, double all, Out* to) {
    std::transform(sums, sums + n, to, [by = whole(side, all)](double sum) { return static_cast<Out>(sum / by); });
  };
  rows.long_ones([&](int64_t begin, int64_t n) {
    const Buffer<double> sums(n);
    const double all = weigh_long<F>(x + begin, weights + begin, n, side, Put<double>{sums.data()});
    divide(sums.data(), n, all, out + begin);
  });
  rows.in_parts([&](int64_t first, int64_t last) {
    Memory<F> memory;
    for (int64_t row = first; row < last; row++) {
      const int64_t n = rows.size(row), begin = rows.begin(row);
      if (0 < n && n <= kInCache) {
        double* sums = memory.weights.of(n);
        const double all = weigh_sorted<F>(x + begin, weights + begin, n, side, memory, Put<double>{sums});
        divide(sums, n, all, out + begin);
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

// samples (P, M), or (total,) with offsets (P + 1,); weights float64, of the shape of samples. Returns float64 or
// float32, of the shape of samples.
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
