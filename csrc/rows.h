// Rows of a dense (P, M) or ragged (total,) tensor, their distribution over threads, and working memory.
#pragma once

#include "simd.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nlgrpo {

constexpr int64_t kGrain = 16384;  // minimum number of elements per thread
constexpr int64_t kInCache = 1 << 16;  // rows up to this size are sorted in one piece, in 1 MiB
constexpr size_t kLargePage = size_t{1} << 21;

// Advise the system to map `bytes` at `memory` in large pages: with small ones, the first write to new memory takes
// longer than most passes over it. Only speed depends on it.
inline void advise_large_pages(void* memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kLargePage - 1) & ~(kLargePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) & ~(kLargePage - 1);
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#else
  (void)memory, (void)bytes;
#endif
}

// Uninitialised memory for n elements of a trivial type.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n) {
    // Aligned to cache lines, which also suit the largest vectors, or to large pages.
    const size_t bytes = std::max<size_t>(1, n) * sizeof(T), align = bytes < kLargePage ? 64 : kLargePage;
    void* data = nullptr;
    const bool got = posix_memalign(&data, align, bytes) == 0;  // not aligned_alloc, which would need padding
    data_.reset(static_cast<T*>(data));
    STD_TORCH_CHECK(got, "out of memory: ", n, " elements of ", sizeof(T), " bytes");
    advise_large_pages(data_.get(), bytes);
  }
  T* data() const {
    return data_.get();
  }
  T& operator[](int64_t i) const {
    return data_.get()[i];
  }

 private:
  struct Free {
    void operator()(void* data) const {
      std::free(data);
    }
  };
  std::unique_ptr<T, Free> data_;
};

// A reusable buffer that grows to the largest size requested.
template <class T>
class Room {
 public:
  T* of(int64_t n) {
    if (n > size_) {
      buffer_ = Buffer<T>(n), size_ = n;
    }
    return buffer_.data();
  }

 private:
  Buffer<T> buffer_;
  int64_t size_ = 0;
};

class Rows {
 public:
  // x (P, M), or (total,) with non-decreasing offsets (P + 1,) from 0 to total.
  Rows(const Tensor& x, const std::optional<Tensor>& offsets, const char* name) {
    STD_TORCH_CHECK(x.is_cpu(), name, " must be on the CPU");
    STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
    if (!offsets.has_value()) {
      STD_TORCH_CHECK(x.dim() == 2, name, " without offsets must have 2 dimensions, got ", x.dim());
      count_ = x.size(0), length_ = x.size(1);
      return;
    }
    STD_TORCH_CHECK(x.dim() == 1, name, " with offsets must have 1 dimension, got ", x.dim());
    STD_TORCH_CHECK(offsets->is_cpu() && offsets->is_contiguous() && offsets->dim() == 1 && offsets->size(0) >= 1 &&
                        offsets->scalar_type() == torch::headeronly::ScalarType::Long,
                    "offsets of ", name, " must be (P + 1,), int64, contiguous, on the CPU");
    count_ = offsets->size(0) - 1;
    offsets_ = offsets->const_data_ptr<int64_t>();
    STD_TORCH_CHECK(offsets_[0] == 0 && offsets_[count_] == x.size(0), "offsets of ", name, " must go from 0 to ",
                    x.size(0));
    STD_TORCH_CHECK(std::is_sorted(offsets_, offsets_ + count_ + 1), "offsets of ", name, " must not decrease");
  }

  int64_t count() const {
    return count_;
  }
  int64_t begin(int64_t row) const {
    return offsets_ ? offsets_[row] : row * length_;
  }
  int64_t size(int64_t row) const {
    return offsets_ ? offsets_[row + 1] - offsets_[row] : length_;
  }
  bool same_size() const {
    return offsets_ == nullptr;
  }
  int64_t total() const {
    return begin(count_);
  }
  // First row that begins at or after `position`.
  int64_t first_from(int64_t position) const {
    if (offsets_) {
      return std::lower_bound(offsets_, offsets_ + count_, position) - offsets_;
    }
    return length_ ? std::min(count_, (position + length_ - 1) / length_) : 0;
  }

  // Call f(begin, size) for each row too long for the cache, one after the other.
  template <class F>
  void long_ones(const F& f) const {
    for (int64_t row = 0; row < count_; row++) {
      if (size(row) > kInCache) {
        f(begin(row), size(row));
      }
    }
  }

  // Call f(first, last) for ranges of rows with about the same number of elements, in parallel.
  template <class F>
  void in_parts(const F& f) const {
    torch::stable::parallel_for(0, total(), kGrain, [&](int64_t begin, int64_t end) {
      const int64_t first = first_from(begin), last = end == total() ? count_ : first_from(end);
      if (first < last) {
        f(first, last);
      }
    });
  }

 private:
  int64_t count_ = 0, length_ = 0;
  const int64_t* offsets_ = nullptr;
};

// Definition of a rank: strict counts smaller samples, weak also equal ones, and mid is the sum of both counts.
enum class Side : int64_t { strict, weak, mid };

inline Side side_of(int64_t side) {
  STD_TORCH_CHECK(0 <= side && side <= 2, "side must be 0 (strict), 1 (weak) or 2 (mid), got ", side);
  return static_cast<Side>(side);
}

// Count of `side` from the strict and the weak count, and (`whole`) the count of `one` whole row.
template <class T>
NLGRPO_INLINE T count(Side side, T strict, T weak) {
  return side == Side::strict ? strict : side == Side::weak ? weak : strict + weak;
}

template <class T>
NLGRPO_INLINE T whole(Side side, T one) {
  return side == Side::mid ? 2 * one : one;
}

// A new tensor with one result per element of `like`.
inline Tensor new_result(const Tensor& like, torch::headeronly::ScalarType type) {
  Tensor out = torch::stable::new_empty(like, like.sizes(), type);
  advise_large_pages(out.mutable_data_ptr(), like.numel() * (type == torch::headeronly::ScalarType::Float ? 4 : 8));
  return out;
}

inline void check_weights(const Tensor& weights, const Tensor& samples, const char* name) {
  STD_TORCH_CHECK(weights.is_cpu() && weights.is_contiguous() && weights.numel() == samples.numel() &&
                      weights.scalar_type() == torch::headeronly::ScalarType::Double,
                  name, " must be float64, contiguous, on the CPU, one per sample");
}

}  // namespace nlgrpo
