// Sorting of eight short rows at once by a sorting network, with one row in each lane of a vector.
//
// A network compares the same positions for any data. So there are no mispredicted branches and no counts to sum, and
// each comparison is one minimum and one maximum for all lanes.
#pragma once

#include "radix_sort.h"

#include <array>
#include <map>
#include <vector>

namespace nlgrpo {

constexpr int64_t kLanes = 8, kLongestLane = 1024;

// An element of a tile is a double in [1, 2) with a code and a position in its mantissa. Doubles are used because their
// minimum is one instruction on every processor.
constexpr int kPositionBits = 12, kPositions = 1 << kPositionBits;
constexpr uint64_t kBehindAll = uint64_t{1} << 32;  // code of padding, above all others
static_assert(kLongestLane < kPositions / 2);

NLGRPO_INLINE double lane_entry(uint64_t code, uint64_t position) {
  return std::bit_cast<double>(uint64_t{0x3ff} << 52 | code << kPositionBits | position);
}
NLGRPO_INLINE uint32_t lane_position(double entry) {
  return static_cast<uint32_t>(std::bit_cast<uint64_t>(entry)) & (kPositions - 1);
}
NLGRPO_INLINE uint32_t lane_code(double entry) {
  return static_cast<uint32_t>(std::bit_cast<uint64_t>(entry) >> kPositionBits);
}

// Batcher's merge exchange (Knuth, The Art of Computer Programming, 5.2.2, algorithm M): pairs i < j to compare in turn.
using Network = std::vector<std::array<uint16_t, 2>>;
Network merge_exchange(int64_t n);

// Fill tile (n, kLanes) with the entries of codes (kLanes, kLongestLane) and their positions.
void fill_lanes(double* tile, const uint32_t* codes, int64_t n);

// Sort all lanes: for each pair (i, j) of the network, move the smaller element to i and the greater one to j.
void sort_lanes(double* tile, const Network& network);

// Input, output and length of the row in each lane; length 0 for an empty lane.
template <class T>
struct LaneRows {
  std::array<const T*, kLanes> from{};
  std::array<T*, kLanes> to{};
  std::array<int64_t, kLanes> size{};
};

// Write the rank of each element of a sorted tile (n, kLanes), count of `side` / length. Overwrites the tile.
void rank_lanes(double* tile, int64_t n, Side side, const LaneRows<float>& rows);
void rank_lanes(double* tile, int64_t n, Side side, const LaneRows<double>& rows);

// Write -sum_{l=k}^{n-2} weights_l (r_{l+1} - r_l) of the rewards r in the order of a sorted tile.
void linearize_lanes(const double* tile, int64_t n, const double* weights, const LaneRows<float>& rows);
void linearize_lanes(const double* tile, int64_t n, const double* weights, const LaneRows<double>& rows);

// Networks for the lengths of `rows`: for the exact length if all rows have one, else for lengths rounded up.
class Networks {
 public:
  explicit Networks(const Rows& rows) {
    const int64_t lengths = rows.same_size() ? 1 : rows.count();
    for (int64_t row = 0; row < lengths && rows.count() >= kFewest; row++) {
      const int64_t n = rows.size(row), length = rows.same_size() ? n : rounded(n);
      if (0 < n && n <= kLongestLane && !networks_.contains(length)) {
        networks_[length] = merge_exchange(length);
      }
    }
  }

  // Minimum number of rows for a tile; sorting fewer rows one by one is faster.
  static constexpr int64_t kFewest = kLanes / 2;

  // The shortest network for n elements, 0 < n <= kLongestLane, and its length.
  const std::pair<const int64_t, Network>& at_least(int64_t n) const {
    return *networks_.lower_bound(n);
  }

 private:
  // Round up to a number of the form 2^k or 3 2^k: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..
  static int64_t rounded(int64_t n) {
    const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(n))) / 2);
    return (n + step - 1) / step * step;
  }

  std::map<int64_t, Network> networks_;
};

// Memory of one thread for eight rows, and operations on them.
template <class F>
class Lanes {
 public:
  explicit Lanes(const Networks& networks) : networks_(networks) {}

  // Sort up to eight rows that start at `row`, before `end`, and fit in a tile. Returns their number, 0 if too few fit.
  int64_t take(const typename F::Bits* x, const Rows& rows, int64_t row, int64_t end) {
    int64_t longest = 0, sum = 0, taken = 0;
    size_.fill(0), begin_.fill(0);
    for (; taken < std::min(kLanes, end - row); taken++) {
      const int64_t n = rows.size(row + taken);
      if (n == 0 || n > kLongestLane) {
        break;
      }
      begin_[taken] = rows.begin(row + taken), size_[taken] = n;
      longest = std::max(longest, n), sum += n;
    }
    if (taken < Networks::kFewest || 2 * sum < kLanes * longest) {
      return 0;
    }
    const auto& [length, network] = networks_.at_least(longest);
    sort(x, length, network);
    return taken;
  }

  // out = argsort of the rows from `take`.
  void order(int64_t* out) const {
    for (int64_t lane = 0; lane < kLanes; lane++) {
      for (int64_t k = 0; k < size_[lane]; k++) {
        out[begin_[lane] + k] = lane_position(tile_[k * kLanes + lane]);
      }
    }
  }

  // out = ranks of the rows from `take`. Overwrites the tile.
  template <class T>
  void ranks(Side side, T* out) {
    rank_lanes(tile_.data(), length_, side, rows_of<T>(nullptr, out));
  }

  // out = linearised rewards of the rows from `take`, which must all have one length.
  template <class T>
  void linearize(const T* rewards, const double* weights, T* out) const {
    linearize_lanes(tile_.data(), length_, weights, rows_of(rewards, out));
  }

 private:
  void sort(const typename F::Bits* x, int64_t length, const Network& network) {
    if (tile_.data() == nullptr) {
      tile_ = Buffer<double>(kLanes * kLongestLane), codes_ = Buffer<uint32_t>(kLanes * kLongestLane);
    }
    length_ = length;
    for (int64_t lane = 0; lane < kLanes; lane++) {
      load(x + begin_[lane], lane);
    }
    fill_lanes(tile_.data(), codes_.data(), length);
    for (int64_t lane = 0; lane < kLanes; lane++) {
      for (int64_t k = size_[lane]; k < length; k++) {
        tile_[k * kLanes + lane] = lane_entry(kBehindAll, k);
      }
    }
    sort_lanes(tile_.data(), network);
    if constexpr (sizeof(typename F::Key) > 4) {
      for (int64_t lane = 0; lane < kLanes; lane++) {
        put_right(x + begin_[lane], lane);
      }
    }
  }

  void load(const typename F::Bits* row, int64_t lane) {
    uint32_t* codes = codes_.data() + lane * kLongestLane;
    if constexpr (sizeof(typename F::Key) > 4) {
      const Codes<F> code_of(row, size_[lane]);
      for (int64_t k = 0; k < size_[lane]; k++) {
        codes[k] = code_of(k);
      }
    } else {
      for (int64_t k = 0; k < size_[lane]; k++) {
        codes[k] = F::key(row[k]);
      }
    }
    std::fill(codes + size_[lane], codes + length_, 0u);
  }

  // Sort a single row again if different keys have one code.
  void put_right(const typename F::Bits* row, int64_t lane) {
    double* tile = tile_.data() + lane;
    bool mixed = false;
    for (int64_t k = 1; k < size_[lane]; k++) {
      const double a = tile[(k - 1) * kLanes], b = tile[k * kLanes];
      mixed |= lane_code(a) == lane_code(b) && F::key(row[lane_position(a)]) != F::key(row[lane_position(b)]);
    }
    if (mixed) {
      const uint64_t* sorted = sorter_.sort<F>(row, size_[lane]);
      for (int64_t k = 0; k < size_[lane]; k++) {
        tile[k * kLanes] = lane_entry(Sorter::code(sorted[k]), Sorter::position(sorted[k]));
      }
    }
  }

  template <class T>
  LaneRows<T> rows_of(const T* from, T* to) const {
    LaneRows<T> rows{.size = size_};
    for (int64_t lane = 0; lane < kLanes; lane++) {
      rows.from[lane] = from ? from + begin_[lane] : nullptr;
      rows.to[lane] = to + begin_[lane];
    }
    return rows;
  }

  const Networks& networks_;
  Sorter sorter_;
  Buffer<double> tile_;     // (kLongestLane, kLanes)
  Buffer<uint32_t> codes_;  // (kLanes, kLongestLane)
  int64_t length_ = 0;
  std::array<int64_t, kLanes> begin_{}, size_{};
};

// Process every row of 1 to `longest` elements, in parallel. first(begin, n, memory) returns whether it has processed
// the row. If not, together(lanes) processes this row and the next ones that fit in a tile, or alone(begin, n, memory)
// only this row. A thread reuses its Memory for all its rows.
template <class F, class Memory, class First, class Together, class Alone>
void for_short_rows(const typename F::Bits* x, const Rows& rows, int64_t longest, const First& first,
                    const Together& together, const Alone& alone) {
  const Networks networks(rows);
  rows.in_parts([&](int64_t row, int64_t end) {
    Memory memory;
    Lanes<F> lanes(networks);
    while (row < end) {
      const int64_t begin = rows.begin(row), n = rows.size(row);
      int64_t done = 1;
      if (0 < n && n <= longest && !first(begin, n, memory)) {
        if (const int64_t taken = lanes.take(x, rows, row, end); taken > 0) {
          together(lanes);
          done = taken;
        } else {
          alone(begin, n, memory);
        }
      }
      row += done;
    }
  });
}

// The same without `first`.
template <class F, class Memory, class Together, class Alone>
void for_short_rows(const typename F::Bits* x, const Rows& rows, int64_t longest, const Together& together,
                    const Alone& alone) {
  for_short_rows<F, Memory>(x, rows, longest, [](int64_t, int64_t, Memory&) { return false; }, together, alone);
}

}  // namespace nlgrpo
