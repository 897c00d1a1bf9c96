// Partition of a long row into ranges of values that fit in the cache.
#pragma once

#include "radix_sort.h"

#include <numeric>
#include <vector>

namespace nlgrpo {

// Smallest and largest key of x[0 .. n), n >= 1.
void find_range(const uint16_t* x, int64_t n, uint16_t& low, uint16_t& high);
void find_range(const uint32_t* x, int64_t n, uint32_t& low, uint32_t& high);
void find_range(const uint64_t* x, int64_t n, uint64_t& low, uint64_t& high);

// cells[i] = (key of x[i] - low) / 2^shift for i in [0, n)
void find_cells(const uint16_t* x, int64_t n, uint16_t low, int shift, uint32_t* cells);
void find_cells(const uint32_t* x, int64_t n, uint32_t low, int shift, uint32_t* cells);
void find_cells(const uint64_t* x, int64_t n, uint64_t low, int shift, uint32_t* cells);

// The range of the keys of a long row, divided into up to 2^20 cells of equal width.
template <class F>
class Cells {
 public:
  using Bits = typename F::Bits;
  using Key = typename F::Key;

  // n >= 1
  Cells(const Bits* row, int64_t n) : row_(row), n_(n) {
    parts_ = std::clamp<int64_t>(n / kInCache, 1, torch::stable::get_num_threads());
    parts_ = std::max(parts_, (n >> 31) + 1);  // so that 32 bits suffice to count the elements of a part
    std::vector<Key> lows(parts_), highs(parts_);
    in_parts([&](int64_t part, int64_t first, int64_t last) {
      find_range(row + first, last - first, lows[part], highs[part]);
    });
    low_ = *std::min_element(lows.begin(), lows.end());
    const Key high = *std::max_element(highs.begin(), highs.end());
    const int fewer = std::clamp(static_cast<int>(std::bit_width(static_cast<uint64_t>(n))) - 4, 8, 20);
    const int cell_bits = sizeof(Key) == 2 ? 16 : fewer;  // each 16-bit key has a cell of its own
    shift_ = std::max(0, static_cast<int>(std::bit_width(static_cast<uint64_t>(high - low_))) - cell_bits);
    cells_ = static_cast<int64_t>(static_cast<Key>(high - low_) >> shift_) + 1;
  }

  int64_t elements() const {
    return n_;
  }
  int64_t cells() const {
    return cells_;
  }
  // Whether all elements of a cell are equal, and the counts of the cells fit in the cache.
  bool exact() const {
    return shift_ == 0 && cells_ <= 1 << 16;
  }

  // Call visit(i, cell) for i in [first, last). The cells of a block are computed first, in vectors.
  template <class Visit>
  NLGRPO_INLINE void each(int64_t first, int64_t last, const Visit& visit) const {
    constexpr int64_t block = 1024;
    uint32_t cells[block];
    for (int64_t begin = first; begin < last; begin += block) {
      const int64_t n = std::min(block, last - begin);
      find_cells(row_ + begin, n, low_, shift_, cells);
      for (int64_t i = 0; i < n; i++) {
        visit(begin + i, cells[i]);
      }
    }
  }

  // `each` for all elements, in parallel.
  template <class Visit>
  void all(const Visit& visit) const {
    in_parts([&](int64_t, int64_t first, int64_t last) { each(first, last, visit); });
  }

  // Number of elements of each cell.
  std::vector<int64_t> count() const {
    std::vector<uint32_t> counts(parts_ * cells_);
    in_parts([&](int64_t part, int64_t first, int64_t last) {
      uint32_t* count = counts.data() + part * cells_;
      each(first, last, [count](int64_t, uint32_t cell) { count[cell]++; });
    });
    std::vector<int64_t> sums(cells_);
    for (int64_t part = 0; part < parts_; part++) {
      for (int64_t cell = 0; cell < cells_; cell++) {
        sums[cell] += counts[part * cells_ + cell];
      }
    }
    return sums;
  }

  // Estimated number of elements of each cell, from a sample of one in `step` runs of kRun elements.
  std::vector<int64_t> estimate(int64_t step) const {
    constexpr uint64_t mix = 0x9e3779b97f4a7c15;  // irregular positions of the runs, in case the row is periodic
    std::vector<int64_t> sums(cells_);
    for (int64_t run = 0; (run + 1) * step * kRun <= n_; run++) {
      const auto skipped = static_cast<int64_t>((static_cast<uint64_t>(run) * mix >> 32) % static_cast<uint64_t>(step));
      const int64_t first = (run * step + skipped) * kRun;
      each(first, first + kRun, [&](int64_t, uint32_t cell) { sums[cell] += step; });
    }
    return sums;
  }

 private:
  static constexpr int64_t kRun = 16;

  // Call f(part, first, last) for every part of the row, in parallel. The number of parts does not change any result.
  template <class Work>
  void in_parts(const Work& f) const {
    torch::stable::parallel_for(0, parts_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; part++) {
        f(part, n_ * part / parts_, n_ * (part + 1) / parts_);
      }
    });
  }

  const Bits* row_;
  int64_t n_, parts_ = 1, cells_ = 1;
  Key low_ = 0;
  int shift_ = 0;
};

// The elements of a long row, grouped into buckets. A bucket joins neighbouring cells; buckets have similar sizes.
//
// Elements are moved only within chunks that fit in the cache, so a bucket has one segment per chunk. To process a
// bucket, its segments are gathered in the order of the row, and the results are written back to them. Finally the
// results are read in the order of the row. There are no random accesses to memory outside the cache.
template <class F>
class Partition {
 public:
  // Calls put(i, position) for every element i, in parallel: its position in an array ordered by chunk, then bucket.
  template <class Put>
  Partition(const Cells<F>& cells, const Put& put) : cells_(cells) {
    const int64_t n = cells.elements();
    enough_ = std::max(std::clamp(n / kMany, kBucket, kLargest), n / kMost);
    while (chunk_bits_ < kChunkBits && n / enough_ * kSegment > int64_t{1} << chunk_bits_) {
      chunk_bits_++;
    }
    join(cells.estimate(enough_ / kSample));
    spread(put);
    if (misled()) {
      join(cells.count());
      spread(put);
    }
  }

  int64_t buckets() const {
    return static_cast<int64_t>(begin_.size()) - 1;
  }
  // Number of elements in the previous buckets.
  int64_t begin(int64_t bucket) const {
    return begin_[bucket];
  }
  int64_t size(int64_t bucket) const {
    return begin_[bucket + 1] - begin_[bucket];
  }

  // Call f(position, length) for each segment of a bucket.
  template <class Work>
  void segments(int64_t bucket, Work&& f) const {
    const uint32_t* begin = start_.data() + bucket;
    for (int64_t chunk = 0; chunk < chunks_; chunk++, begin += buckets() + 1) {
      f((chunk << chunk_bits_) + begin[0], begin[1] - begin[0]);
    }
  }
  template <class T>
  void gather(int64_t bucket, const T* from, T* to) const {
    segments(bucket, [&](int64_t position, int64_t n) { to = std::copy_n(from + position, n, to); });
  }
  template <class T>
  void bring_back(int64_t bucket, const T* from, T* to) const {
    segments(bucket, [&](int64_t position, int64_t n) {
      std::copy_n(from, n, to + position);
      from += n;
    });
  }

  // Call f(bucket, memory) for every bucket: first for those too large for the cache, one by one, as f is parallel for
  // them, then for the others in parallel. A thread reuses its Memory for all its buckets.
  template <class Memory, class Work>
  void in_buckets(const Work& f) const {
    for (int64_t bucket = 0; bucket < buckets(); bucket++) {
      if (size(bucket) > kInCache) {
        Memory memory;
        f(bucket, memory);
      }
    }
    const int64_t grain = std::max<int64_t>(1, kGrain * buckets() / cells_.elements());
    torch::stable::parallel_for(0, buckets(), grain, [&](int64_t first, int64_t last) {
      Memory memory;
      for (int64_t bucket = first; bucket < last; bucket++) {
        if (0 < size(bucket) && size(bucket) <= kInCache) {
          f(bucket, memory);
        }
      }
    });
  }

  // Call visit(i, position, bucket) for every element i, in parallel.
  template <class Visit>
  void each(const Visit& visit) const {
    in_chunks([&](int64_t chunk, int64_t first, int64_t last) {
      const auto row = start_.begin() + chunk * (buckets() + 1);
      std::vector<uint32_t> next(row, row + buckets());
      cells_.each(first, last, [&](int64_t i, uint32_t cell) {
        const int64_t bucket = bucket_of_[cell];
        visit(i, first + next[bucket]++, bucket);
      });
    });
  }

 private:
  // Limits of the size of a bucket, which grows if there would be too many buckets.
  static constexpr int64_t kBucket = 1 << 11, kMany = 1 << 11, kLargest = 1 << 14, kMost = 1 << 14;
  static constexpr int64_t kSample = 64, kSegment = 32;  // per bucket; minimum average size of a segment
  static constexpr int kChunkBits = 18;

  template <class Work>
  void in_chunks(const Work& f) const {
    const int64_t n = cells_.elements();
    torch::stable::parallel_for(0, chunks_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; chunk++) {
        f(chunk, chunk << chunk_bits_, std::min(n, (chunk + 1) << chunk_bits_));
      }
    });
  }

  // Join cells into buckets of about `enough_` elements, from the counts of the cells.
  void join(const std::vector<int64_t>& counts) {
    bucket_of_.resize(cells_.cells()), first_cell_ = {0};
    int64_t here = 0;
    for (int64_t cell = 0; cell < cells_.cells(); cell++) {
      if (cell > first_cell_.back() && here + counts[cell] > enough_) {  // a full cell gets a bucket of its own
        first_cell_.push_back(cell);
        here = 0;
      }
      here += counts[cell];
      bucket_of_[cell] = static_cast<uint16_t>(first_cell_.size() - 1);
    }
    first_cell_.push_back(cells_.cells());
  }

  template <class Put>
  void spread(const Put& put) {
    const int64_t buckets = static_cast<int64_t>(first_cell_.size()) - 1;
    chunks_ = ((cells_.elements() - 1) >> chunk_bits_) + 1;
    start_.assign(chunks_ * (buckets + 1), 0);
    in_chunks([&](int64_t chunk, int64_t first, int64_t last) {
      const Buffer<uint16_t> moves_to(last - first);
      uint32_t* start = start_.data() + chunk * (buckets + 1);
      cells_.each(first, last, [&](int64_t i, uint32_t cell) {
        const uint16_t bucket = bucket_of_[cell];
        moves_to[i - first] = bucket;
        start[bucket]++;
      });
      uint32_t before = 0;
      for (int64_t bucket = 0; bucket <= buckets; bucket++) {
        before += std::exchange(start[bucket], before);
      }
      std::vector<uint32_t> next(start, start + buckets);
      for (int64_t i = first; i < last; i++) {
        put(i, first + next[moves_to[i - first]]++);
      }
    });
    begin_.assign(buckets + 1, 0);
    for (int64_t chunk = 0; chunk < chunks_; chunk++) {
      const uint32_t* start = start_.data() + chunk * (buckets + 1);
      for (int64_t bucket = 0; bucket < buckets; bucket++) {
        begin_[bucket + 1] += start[bucket + 1] - start[bucket];
      }
    }
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
  }

  // Whether a bucket is far larger than estimated and can be split.
  bool misled() const {
    for (int64_t bucket = 0; bucket < buckets(); bucket++) {
      if (size(bucket) > 4 * enough_ && first_cell_[bucket + 1] - first_cell_[bucket] > 1) {
        return true;
      }
    }
    return false;
  }

  const Cells<F>& cells_;
  int64_t enough_, chunks_ = 0;
  int chunk_bits_ = 16;  // log2 of the number of elements of a chunk
  std::vector<uint16_t> bucket_of_;  // bucket of each cell
  std::vector<int64_t> first_cell_;  // first cell of each bucket, and the end
  std::vector<int64_t> begin_;       // number of elements before each bucket, and the total
  std::vector<uint32_t> start_;      // (chunks, buckets + 1): start of each segment in its chunk, and the end
};

}  // namespace nlgrpo
