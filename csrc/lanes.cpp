// What is computed in all lanes at once: compiled for several instruction sets.
#include "lanes.h"

// How vectors are handed over depends on the instruction set. Here they are not: the functions that take or return one
// are inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace nlgrpo {
namespace {

typedef int64_t EightIntegers __attribute__((vector_size(64)));
typedef uint32_t EightBits __attribute__((vector_size(32), aligned(4), may_alias));
typedef float EightFloats __attribute__((vector_size(32)));

// -1 in the lanes where the elements' codes are equal, else 0.
NLGRPO_INLINE EightIntegers same_code(const Eightfold& a, const Eightfold& b) {
  return (((EightIntegers)a ^ (EightIntegers)b) >> kPositionBits) == 0;
}

// The float32 whose key the code is.
NLGRPO_INLINE Eightfold number(const Eightfold& entry) {
  const EightBits key = __builtin_convertvector((EightIntegers)entry >> kPositionBits, EightBits);
  const EightBits positive = (EightBits)((key & Single::sign) != 0);
  const EightBits bits = (positive & (key ^ Single::sign)) | (~positive & ~key);
  return __builtin_convertvector((EightFloats)bits, Eightfold);
}

// rows.to[lane][position of the lane's element k] = value[lane] in the lanes whose rows are so long.
template <class Out>
NLGRPO_INLINE void write(const LaneRows<Out>& rows, int64_t k, const Eightfold& entry, const Eightfold& value) {
  for (int64_t lane = 0; lane < kLanes; lane++) {
    if (k < rows.size[lane]) {
      rows.to[lane][lane_position(entry[lane])] = static_cast<Out>(value[lane]);
    }
  }
}

template <class Out>
NLGRPO_INLINE void rank(Eightfold* tile, int64_t n, Side side, const LaneRows<Out>& rows) {
  const Eightfold none = {};
  Eightfold whole_row = none, below = none, up_to = none;
  for (int64_t lane = 0; lane < kLanes; lane++) {
    whole_row[lane] = static_cast<double>(whole(side, std::max<int64_t>(1, rows.size[lane])));
  }
  // How many are smaller is found from below and takes the code's place; it also is equal where elements are.
  Eightfold before = none;
  for (int64_t k = 0; k < n; k++) {
    const Eightfold entry = tile[k];
    below = same_code(entry, before) ? below : none + static_cast<double>(k);
    before = entry;
    const EightIntegers smaller = __builtin_convertvector(below, EightIntegers);
    tile[k] = (Eightfold)((smaller << kPositionBits) | ((EightIntegers)entry & ((1 << kPositionBits) - 1)));
  }
  Eightfold above = none - 1;
  for (int64_t k = n - 1; k >= 0; k--) {
    const Eightfold entry = tile[k];
    up_to = same_code(entry, above) ? up_to : none + static_cast<double>(k + 1);
    above = entry;
    below = __builtin_convertvector((EightIntegers)entry >> kPositionBits, Eightfold);
    const Eightfold counted = side == Side::strict ? below : side == Side::weak ? up_to : below + up_to;
    write(rows, k, entry, counted / whole_row);
  }
}

}  // namespace

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

NLGRPO_CLONES void fill_lanes(Eightfold* tile, const uint32_t* codes, int64_t n) {
  const EightIntegers one = (EightIntegers)(Eightfold{} + 1);
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    // Eight elements of eight rows, turned: pairs of rows are interleaved until a vector holds an element of each.
    EightBits row[kLanes], pair[kLanes], four[kLanes];
    for (int64_t lane = 0; lane < kLanes; lane++) {
      row[lane] = *reinterpret_cast<const EightBits*>(codes + lane * kLongestLane + begin);
    }
    for (int64_t i = 0; i < kLanes; i += 2) {
      pair[i] = __builtin_shufflevector(row[i], row[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
      pair[i + 1] = __builtin_shufflevector(row[i], row[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int64_t i = 0; i < kLanes; i += 4) {
      four[i] = __builtin_shufflevector(pair[i], pair[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      four[i + 1] = __builtin_shufflevector(pair[i], pair[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
      four[i + 2] = __builtin_shufflevector(pair[i + 1], pair[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
      four[i + 3] = __builtin_shufflevector(pair[i + 1], pair[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int64_t i = 0; i < kLanes; i++) {
      if (begin + i < n) {
        const EightBits all = i < 4 ? __builtin_shufflevector(four[i % 4], four[i % 4 + 4], 0, 1, 2, 3, 8, 9, 10, 11)
                                    : __builtin_shufflevector(four[i % 4], four[i % 4 + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        const EightIntegers code = __builtin_convertvector(all, EightIntegers);
        tile[begin + i] = (Eightfold)(one | code << kPositionBits | (begin + i));
      }
    }
  }
}

NLGRPO_CLONES void sort_lanes(Eightfold* tile, const Network& network) {
  for (const auto& [i, j] : network) {
    const Eightfold a = tile[i], b = tile[j];
    tile[i] = a < b ? a : b;
    tile[j] = a < b ? b : a;
  }
}

NLGRPO_CLONES void rank_lanes(Eightfold* tile, int64_t n, Side side, const LaneRows<double>& rows) {
  rank(tile, n, side, rows);
}

NLGRPO_CLONES void rank_lanes(Eightfold* tile, int64_t n, Side side, const LaneRows<float>& rows) {
  rank(tile, n, side, rows);
}

NLGRPO_CLONES void linearize_lanes(const Eightfold* tile, const float* weights, int64_t n,
                                   const LaneRows<float>& rows) {
  Eightfold sum = {}, above = number(tile[n - 1]);
  write(rows, n - 1, tile[n - 1], sum);
  for (int64_t k = n - 2; k >= 0; k--) {
    const Eightfold here = number(tile[k]);
    const double weight = weights[k];
    if (weight != 0) {
      sum = here == above ? sum : sum - weight * (above - here);
    }
    above = here;
    write(rows, k, tile[k], sum);
  }
}

}  // namespace nlgrpo
