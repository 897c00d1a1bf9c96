// Stable radix sorting of keys: in the cache by the least significant digit first, and of a long row by parts.
#pragma once

#include "keys.h"
#include "rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <utility>
#include <vector>

namespace nlgrpo {

// The least and the greatest key of n >= 1 elements.
template <class F>
NLGRPO_INLINE std::pair<typename F::Key, typename F::Key> range_of(const typename F::Bits* x, int64_t n) {
  using Key = typename F::Key;
  Key low = std::numeric_limits<Key>::max(), high = 0;
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int64_t i = 0; i < n; i++) {
    const Key key = F::key(x[i]);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  return {low, high};
}

// The keys of a row less its least one, cut to 32 bits. Only 64-bit keys need a cut, which may make different ones equal.
template <class F>
class Codes {
 public:
  Codes(const typename F::Bits* x, int64_t n) : x_(x) {
    const auto [low, high] = range_of<F>(x, n);
    const int bits = std::bit_width(static_cast<uint64_t>(high - low));
    low_ = low, cut_ = std::max(0, bits - 32), bits_ = bits - cut_;
  }
  NLGRPO_INLINE uint32_t operator()(int64_t i) const {
    const auto over = static_cast<typename F::Key>(F::key(x_[i]) - low_);
    return static_cast<uint32_t>(sizeof(over) > 4 ? over >> cut_ : over);
  }
  int bits() const {
    return bits_;
  }
  bool cut() const {
    return cut_ > 0;
  }

 private:
  const typename F::Bits* x_;
  typename F::Key low_;
  int cut_, bits_;
};

// Sorted positions of the elements of a row; the memory is kept from row to row.
//
// An entry is code << 32 | position. Codes ascend, and are equal where the elements are: where the cut of keys made
// different ones equal, these are put right.
class Sorter {
 public:
  static uint32_t position(uint64_t entry) {
    return static_cast<uint32_t>(entry);
  }
  static uint32_t code(uint64_t entry) {
    return static_cast<uint32_t>(entry >> 32);
  }

  // Entries of x[0 .. n), 1 <= n < 2^32, in stable ascending order. They stay until the next call.
  template <class F>
  const uint64_t* sort(const typename F::Bits* x, int64_t n) {
    const Codes<F> codes(x, n);
    reserve(n);
    uint64_t* sorted = n <= kFew ? insert(codes, n) : by_digits(codes, n, codes.bits());
    if (codes.cut()) {
      put_right(sorted, n, [x](uint64_t entry) { return F::key(x[position(entry)]); });
    }
    return sorted;
  }

 private:
  static constexpr int kFew = 24, kDigits = 4, kWidest = 11;

  void reserve(int64_t n) {
    if (n > room_) {
      from_ = Buffer<uint64_t>(n), to_ = Buffer<uint64_t>(n);
      room_ = n;
    }
  }

  template <class Codes>
  uint64_t* insert(const Codes& codes, int64_t n) {
    uint64_t* sorted = from_.data();
    for (int64_t i = 0; i < n; i++) {
      const uint64_t entry = static_cast<uint64_t>(codes(i)) << 32 | static_cast<uint64_t>(i);
      int64_t k = i;
      for (; k > 0 && sorted[k - 1] > entry; k--) {
        sorted[k] = sorted[k - 1];
      }
      sorted[k] = entry;
    }
    return sorted;
  }

  // As few digits as pay: each one costs a pass over the row, its width a pass over the counts.
  static int digits_for(int64_t n, int bits) {
    int best = 1;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int digits = 1; digits <= kDigits; digits++) {
      const int width = (bits + digits - 1) / digits;
      const int64_t cost = digits * (2 * n + (int64_t{1} << width));
      if (width <= kWidest && cost < least) {
        least = cost, best = digits;
      }
    }
    return best;
  }

  template <class Codes>
  uint64_t* by_digits(const Codes& codes, int64_t n, int bits) {
    switch (digits_for(n, bits)) {
      case 1:
        return passes<1>(codes, n, bits);
      case 2:
        return passes<2>(codes, n, bits);
      case 3:
        return passes<3>(codes, n, bits);
      default:
        return passes<4>(codes, n, bits);
    }
  }

  template <int digits, class Codes>
  uint64_t* passes(const Codes& codes, int64_t n, int bits) {
    const int width = (bits + digits - 1) / digits;
    const uint32_t size = uint32_t{1} << width, mask = size - 1;
    for (int d = 0; d < digits; d++) {
      std::fill_n(counts_[d].data(), size, 0);
    }
    for (int64_t i = 0; i < n; i++) {
      const uint32_t code = codes(i);
      for (int d = 0; d < digits; d++) {
        counts_[d][code >> (d * width) & mask]++;
      }
    }
    for (int d = 0; d < digits; d++) {
      uint32_t before = 0;
      for (uint32_t digit = 0; digit < size; digit++) {
        before += std::exchange(counts_[d][digit], before);
      }
    }
    uint64_t *from = from_.data(), *to = to_.data();
    uint32_t* next = counts_[0].data();
    for (int64_t i = 0; i < n; i++) {
      const uint32_t code = codes(i);
      from[next[code & mask]++] = static_cast<uint64_t>(code) << 32 | static_cast<uint64_t>(i);
    }
    for (int d = 1; d < digits; d++) {
      const int shift = 32 + d * width;
      next = counts_[d].data();
      for (int64_t i = 0; i < n; i++) {
        const uint64_t entry = from[i];
        to[next[entry >> shift & mask]++] = entry;
      }
      std::swap(from, to);
    }
    return from;
  }

  // Sort the entries of equal code by the whole key where it differs, and then number the codes anew.
  template <class Key>
  void put_right(uint64_t* sorted, int64_t n, const Key& key_of) {
    bool differ = false;
    for (int64_t begin = 0, end; begin < n; begin = end) {
      end = begin + 1;
      bool mixed = false;
      for (; end < n && code(sorted[end]) == code(sorted[begin]); end++) {
        mixed |= key_of(sorted[end]) != key_of(sorted[begin]);
      }
      if (mixed) {
        std::stable_sort(sorted + begin, sorted + end,
                         [&](uint64_t a, uint64_t b) { return key_of(a) < key_of(b); });
        differ = true;
      }
    }
    if (!differ) {
      return;
    }
    uint64_t number = 0;
    auto before = key_of(sorted[0]);
    for (int64_t k = 0; k < n; k++) {
      const auto key = key_of(sorted[k]);
      number += std::exchange(before, key) != key;
      sorted[k] = number << 32 | position(sorted[k]);
    }
  }

  int64_t room_ = 0;
  Buffer<uint64_t> from_, to_;
  std::array<std::array<uint32_t, 1 << kWidest>, kDigits> counts_;
};

// f(begin, end) for every run of equal elements among n sorted entries.
template <class F>
NLGRPO_INLINE void for_runs(const uint64_t* sorted, int64_t n, const F& f) {
  for (int64_t begin = 0, end; begin < n; begin = end) {
    const uint32_t code = Sorter::code(sorted[begin]);
    for (end = begin + 1; end < n && Sorter::code(sorted[end]) == code; end++) {
    }
    f(begin, end);
  }
}

// The elements of a long row counted by key: the range of the keys in up to 2^16 cells of one size.
//
// The row is counted, and later moved, in chunks side by side; their number changes no result.
template <class F>
class Cells {
 public:
  using Key = typename F::Key;

  // n >= 1 elements.
  Cells(const typename F::Bits* row, int64_t n) : row_(row), n_(n) {
    chunks_ = std::clamp<int64_t>(n / kInCache, 1, torch::stable::get_num_threads());
    chunks_ = std::max(chunks_, (n >> 31) + 1);  // so that 32 bits count a chunk
    find_range();
    count();
  }

  int64_t elements() const {
    return n_;
  }
  int64_t cells() const {
    return cells_;
  }
  int64_t chunks() const {
    return chunks_;
  }
  // Whether the elements of a cell are equal.
  bool exact() const {
    return shift_ == 0;
  }
  // Elements of a chunk in a cell.
  int64_t size(int64_t chunk, int64_t cell) const {
    return counts_[chunk * cells_ + cell];
  }
  // Elements in a cell.
  int64_t size(int64_t cell) const {
    int64_t sum = 0;
    for (int64_t chunk = 0; chunk < chunks_; chunk++) {
      sum += size(chunk, cell);
    }
    return sum;
  }

  // visit(chunk, first, last) for every chunk of the row, in parallel.
  template <class Visit>
  void in_chunks(const Visit& visit) const {
    torch::stable::parallel_for(0, chunks_, 1, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; chunk++) {
        visit(chunk, chunk_begin(chunk), chunk_begin(chunk + 1));
      }
    });
  }

  NLGRPO_INLINE int64_t cell_of(int64_t i) const {
    return static_cast<int64_t>(static_cast<Key>(F::key(row_[i]) - low_) >> shift_);
  }

 private:
  int64_t chunk_begin(int64_t chunk) const {
    return n_ / chunks_ * chunk + std::min(chunk, n_ % chunks_);
  }

  void find_range() {
    std::vector<std::pair<Key, Key>> ranges(chunks_);
    in_chunks([&](int64_t chunk, int64_t first, int64_t last) {
      ranges[chunk] = range_of<F>(row_ + first, last - first);
    });
    low_ = ranges[0].first;
    Key high = ranges[0].second;
    for (const auto& [least, greatest] : ranges) {
      low_ = std::min(low_, least), high = std::max(high, greatest);
    }
    const int fewer = std::clamp(static_cast<int>(std::bit_width(static_cast<uint64_t>(n_))) - 4, 8, 16);
    const int cell_bits = sizeof(Key) == 2 ? 16 : fewer;  // a key of 16 bits always has a cell of its own
    shift_ = std::max(0, static_cast<int>(std::bit_width(static_cast<uint64_t>(high - low_))) - cell_bits);
    cells_ = static_cast<int64_t>(static_cast<Key>(high - low_) >> shift_) + 1;
  }

  void count() {
    counts_.resize(chunks_ * cells_);
    in_chunks([&](int64_t chunk, int64_t first, int64_t last) {
      uint32_t* count = counts_.data() + chunk * cells_;
      for (int64_t i = first; i < last; i++) {
        count[cell_of(i)]++;
      }
    });
  }

  const typename F::Bits* row_;
  int64_t n_, chunks_ = 1, cells_ = 1;
  Key low_ = 0;
  int shift_ = 0;
  std::vector<uint32_t> counts_;  // (chunks, cells)
};

// A long row in buckets of ascending keys, equal ones in one bucket, small enough for the cache unless many lie close.
//
// Neighbouring cells are joined to buckets of about one size. `each` tells where every element of the row belongs when
// the buckets stand one behind the other and keep the row's order inside. It can be asked again: what was found for the
// elements in the buckets is brought back by reading as many streams as there are buckets, where a scatter by index
// would touch all of the memory at random.
template <class F>
class Partition {
 public:
  explicit Partition(const Cells<F>& cells) : cells_(cells) {
    join();
    begin_chunks();
  }

  int64_t buckets() const {
    return static_cast<int64_t>(begin_.size()) - 1;
  }
  int64_t begin(int64_t bucket) const {
    return begin_[bucket];
  }
  int64_t size(int64_t bucket) const {
    return begin_[bucket + 1] - begin_[bucket];
  }

  // visit(i, position, bucket) for every element i, in parallel; inside a bucket positions ascend with i.
  template <class Visit>
  void each(const Visit& visit) const {
    cells_.in_chunks([&](int64_t chunk, int64_t first, int64_t last) {
      std::vector<int64_t> next(next_.begin() + chunk * buckets(), next_.begin() + (chunk + 1) * buckets());
      for (int64_t i = first; i < last; i++) {
        const int64_t bucket = bucket_of_[cells_.cell_of(i)];
        visit(i, next[bucket]++, bucket);
      }
    });
  }

  // f(bucket, sorter) for every bucket: those too large for the cache in turn, as f itself uses the threads for them,
  // then the others side by side.
  template <class Work>
  void in_buckets(const Work& f) const {
    Sorter own;
    for (int64_t bucket = 0; bucket < buckets(); bucket++) {
      if (size(bucket) > kInCache) {
        f(bucket, own);
      }
    }
    const int64_t grain = std::max<int64_t>(1, kGrain * buckets() / cells_.elements());
    torch::stable::parallel_for(0, buckets(), grain, [&](int64_t first, int64_t last) {
      Sorter sorter;
      for (int64_t bucket = first; bucket < last; bucket++) {
        if (size(bucket) <= kInCache) {
          f(bucket, sorter);
        }
      }
    });
  }

 private:
  static constexpr int64_t kBucket = 1 << 11, kMost = 2048;  // elements of a bucket, and buckets, about

  void join() {
    const int64_t enough = std::max(kBucket, cells_.elements() / kMost);
    bucket_of_.resize(cells_.cells());
    int64_t here = 0;
    for (int64_t cell = 0; cell < cells_.cells(); cell++) {
      const int64_t more = cells_.size(cell);
      if (here > 0 && here + more > enough) {
        begin_.push_back(begin_.back() + here);
        here = 0;
      }
      here += more;
      bucket_of_[cell] = static_cast<uint16_t>(begin_.size() - 1);
    }
    begin_.push_back(begin_.back() + here);
  }

  void begin_chunks() {
    std::vector<int64_t> next(begin_.begin(), begin_.end() - 1);
    for (int64_t chunk = 0; chunk < cells_.chunks(); chunk++) {
      next_.insert(next_.end(), next.begin(), next.end());
      for (int64_t cell = 0; cell < cells_.cells(); cell++) {
        next[bucket_of_[cell]] += cells_.size(chunk, cell);
      }
    }
  }

  const Cells<F>& cells_;
  std::vector<uint16_t> bucket_of_;   // of a cell
  std::vector<int64_t> begin_ = {0};  // of a bucket, and the end
  std::vector<int64_t> next_;         // (chunks, buckets): where the bucket's first element of the chunk goes
};

}  // namespace nlgrpo
