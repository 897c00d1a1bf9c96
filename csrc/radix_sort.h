// Stable radix sort (least significant digit first) of the keys of a row that fits in the cache.
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

// Smallest and largest key of n >= 1 elements.
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

// Keys of a row minus the smallest one, shortened to 32 bits. Shortening 64-bit keys may make different ones equal.
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

// Sorts rows; its memory is reused for all rows.
//
// An entry is code << 32 | position. Codes ascend, and two codes are equal only if the elements are: different keys
// that became equal when shortened are corrected.
class Sorter {
 public:
  static uint32_t position(uint64_t entry) {
    return static_cast<uint32_t>(entry);
  }
  static uint32_t code(uint64_t entry) {
    return static_cast<uint32_t>(entry >> 32);
  }

  // Entries of x[0 .. n), 1 <= n < 2^32, in stable ascending order, valid until the next call.
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

  // Choose the number of digits: each digit costs a pass over the row, and its width a pass over the counts.
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

  // Sort entries of equal code by their full keys if these differ, then renumber the codes.
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

// Call f(begin, end) for every run of equal elements among n sorted entries.
template <class F>
NLGRPO_INLINE void for_runs(const uint64_t* sorted, int64_t n, const F& f) {
  for (int64_t begin = 0, end; begin < n; begin = end) {
    const uint32_t code = Sorter::code(sorted[begin]);
    for (end = begin + 1; end < n && Sorter::code(sorted[end]) == code; end++) {
    }
    f(begin, end);
  }
}

}  // namespace nlgrpo
