// Operations on all lanes at once, compiled for several instruction sets.
#include "lanes.h"

namespace nlgrpo {

// Entries are finite positive numbers. With this attribute GCC compiles a minimum to one instruction; otherwise it
// compares and blends, in case one is NaN or -0.
#if defined(__GNUC__) && !defined(__clang__)
#define NLGRPO_ORDINARY __attribute__((optimize("finite-math-only", "no-signed-zeros")))
#else
#define NLGRPO_ORDINARY
#endif

Network merge_exchange(int64_t n) {
  Network pairs;
  const int64_t top = n < 2 ? 0 : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))) / 2;
  for (int64_t p = top; p > 0; p /= 2) {
    for (int64_t q = top, r = 0, d = p;; d = q - p, q /= 2, r = p) {
      for (int64_t i = 0; i < n - d; i++) {
        if ((i & p) == r) {
          pairs.push_back({static_cast<uint16_t>(i), static_cast<uint16_t>(i + d)});
        }
      }
      if (q == p) {
        break;
      }
    }
  }
  return pairs;
}

void fill_lanes(double* tile, const uint32_t* codes, int64_t n) {
  typedef uint32_t Four __attribute__((vector_size(16), may_alias));
  typedef uint64_t Two __attribute__((vector_size(16), may_alias));
  const uint64_t one = std::bit_cast<uint64_t>(1.0);
  for (int64_t begin = 0; begin < n; begin += 4) {
    for (int64_t lane = 0; lane < kLanes; lane += 4) {
      // Transpose four codes of four lanes: interleave pairs of lanes, then pairs of pairs.
      Four in[4], half[4];
      for (int64_t i = 0; i < 4; i++) {
        in[i] = *reinterpret_cast<const Four*>(codes + (lane + i) * kLongestLane + begin);
      }
      for (int64_t i = 0; i < 2; i++) {
        half[i] = __builtin_shufflevector(in[i], in[i + 2], 0, 4, 1, 5);
        half[i + 2] = __builtin_shufflevector(in[i], in[i + 2], 2, 6, 3, 7);
      }
      for (int64_t i = 0; i < 4 && begin + i < n; i++) {
        const Four low = half[i / 2 * 2], high = half[i / 2 * 2 + 1];
        const Four all = i % 2 == 0 ? __builtin_shufflevector(low, high, 0, 4, 1, 5)
                                    : __builtin_shufflevector(low, high, 2, 6, 3, 7);
        const uint64_t position = one | static_cast<uint64_t>(begin + i);
        Two* to = reinterpret_cast<Two*>(tile + (begin + i) * kLanes + lane);
        to[0] = (Two)__builtin_shufflevector(all, Four{}, 0, 4, 1, 5) << kPositionBits | position;
        to[1] = (Two)__builtin_shufflevector(all, Four{}, 2, 6, 3, 7) << kPositionBits | position;
      }
    }
  }
}

NLGRPO_CLONES NLGRPO_ORDINARY void sort_lanes(double* tile, const Network& network) {
  for (const auto& [i, j] : network) {
    double *low = tile + i * kLanes, *high = tile + j * kLanes;
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const double a = low[lane], b = high[lane];
      low[lane] = a < b ? a : b;
      high[lane] = a < b ? b : a;
    }
  }
}

namespace {

template <class T>
NLGRPO_INLINE void rank(double* tile, int64_t n, Side side, const LaneRows<T>& rows) {
  // Positions are far below half the distance of two codes, so a smaller difference means that the codes are equal.
  constexpr double half_a_code = 0x1p-52 * kPositions / 2;
  double below[kLanes] = {}, before[kLanes] = {}, up_to[kLanes] = {}, all[kLanes], rank[kLanes];
  int32_t packed[kLanes], above[kLanes];
  for (int64_t k = 0; k < n; k++) {  // replace the code by the number of smaller ones: below * kPositions + position
    double* here = tile + k * kLanes;
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const double entry = here[lane];
      below[lane] = entry - before[lane] < half_a_code ? below[lane] : static_cast<double>(k);
      before[lane] = entry;
      here[lane] = below[lane] * kPositions + lane_position(entry);
    }
  }
  for (int64_t lane = 0; lane < kLanes; lane++) {
    all[lane] = static_cast<double>(whole(side, std::max<int64_t>(1, rows.size[lane])));
    above[lane] = -1;
  }
  for (int64_t k = n - 1; k >= 0; k--) {
    const double* here = tile + k * kLanes;
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; lane++) {
      packed[lane] = static_cast<int32_t>(here[lane]);
      const int32_t smaller = packed[lane] / kPositions;
      up_to[lane] = smaller == above[lane] ? up_to[lane] : static_cast<double>(k + 1);
      above[lane] = smaller;
      rank[lane] = count(side, static_cast<double>(smaller), up_to[lane]) / all[lane];
    }
    for (int64_t lane = 0; lane < kLanes; lane++) {
      if (k < rows.size[lane]) {
        rows.to[lane][packed[lane] % kPositions] = static_cast<T>(rank[lane]);
      }
    }
  }
}

template <class T>
NLGRPO_INLINE void linearize(const double* tile, int64_t n, const double* weights, const LaneRows<T>& rows) {
  double sum[kLanes] = {}, above[kLanes] = {}, reward[kLanes] = {};
  for (int64_t k = n - 1; k >= 0; k--) {
    const double* here = tile + k * kLanes;
    for (int64_t lane = 0; lane < kLanes; lane++) {
      if (k < rows.size[lane]) {
        reward[lane] = static_cast<double>(rows.from[lane][lane_position(here[lane])]);
      }
    }
    const double weight = k < n - 1 ? weights[k] : 0;  // there is no gap above the best reward
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const double step = weight * (above[lane] - reward[lane]);
      sum[lane] -= weight == 0 || reward[lane] == above[lane] ? 0 : step;
      above[lane] = reward[lane];
    }
    for (int64_t lane = 0; lane < kLanes; lane++) {
      if (k < rows.size[lane]) {
        rows.to[lane][lane_position(here[lane])] = static_cast<T>(sum[lane]);
      }
    }
  }
}

}  // namespace

NLGRPO_CLONES void rank_lanes(double* tile, int64_t n, Side side, const LaneRows<float>& rows) {
  rank(tile, n, side, rows);
}
NLGRPO_CLONES void rank_lanes(double* tile, int64_t n, Side side, const LaneRows<double>& rows) {
  rank(tile, n, side, rows);
}
NLGRPO_CLONES void linearize_lanes(const double* tile, int64_t n, const double* weights, const LaneRows<float>& rows) {
  linearize(tile, n, weights, rows);
}
NLGRPO_CLONES void linearize_lanes(const double* tile, int64_t n, const double* weights, const LaneRows<double>& rows) {
  linearize(tile, n, weights, rows);
}

}  // namespace nlgrpo
