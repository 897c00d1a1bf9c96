// Arguments of an op, drawn from the bytes of a fuzzer's input. Bytes beyond its end are random, and depend on those that
// it has, so that a short input is a complete case.
#pragma once

#include <ATen/ATen.h>
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace fuzz {

// Memory of an input, of exactly the bytes that its elements span, so that AddressSanitizer sees the first byte beyond.
struct Block {
  char* at;
  size_t lead, bytes;          // `lead` bytes before the first element, which may not be read
  std::vector<char> original;  // the elements, to see whether an op changes them

  bool changed() const {
    return !std::equal(original.begin(), original.end(), at + lead);
  }
};

// Random bits (splitmix64).
struct Random {
  uint64_t state = 0;

  uint64_t operator()() {
    state += 0x9e3779b97f4a7c15;
    uint64_t z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
};

// Where the elements of a tensor are: one after another, in any order that keeps the last dimension together, or in any.
enum class Layout { dense, rows, any };

class Draw {
 public:
  Draw(const uint8_t* data, size_t size) : data_(data), left_(size) {
    for (size_t i = 0; i < size; i++) {
      beyond_.state ^= data[i];
      beyond_();
    }
  }
  Draw(const Draw&) = delete;
  ~Draw() {
    for (const Block& block : blocks_) {
      __asan_unpoison_memory_region(block.at, block.lead + block.bytes);
      std::free(block.at);
    }
  }

  const std::vector<Block>& blocks() const {
    return blocks_;
  }

  uint64_t bytes(int n) {
    uint64_t value = 0;
    for (int i = 0; i < n; i++) {
      const uint64_t byte = left_ > 0 ? *data_++ : beyond_() % 256;
      left_ -= left_ > 0;
      value |= byte << 8 * i;
    }
    return value;
  }
  // In [low, high], from one byte.
  int64_t within(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bytes(1)) % (high - low + 1);
  }
  // True in one of n cases.
  bool rarely(int64_t n) {
    return within(0, n - 1) == n - 1;
  }
  template <class T, size_t n>
  T among(const std::array<T, n>& values) {
    return values[bytes(1) % n];
  }

  // A size: mostly small, also 0, at the ends of vectors and blocks, and beyond them.
  int64_t size() {
    const int64_t byte = within(0, 255);
    return byte < 200 ? byte % 20 : byte < 252 ? byte - 184 : 64 + static_cast<int64_t>(bytes(1));
  }
  int64_t integer() {
    constexpr std::array<int64_t, 14> special{0, 1, 2, -1, -2, 7, 64, 1 << 16, int64_t{1} << 31, int64_t{1} << 32,
                                              int64_t{1} << 62, INT64_MAX - 1, INT64_MAX, INT64_MIN};
    return rarely(4) ? static_cast<int64_t>(bytes(8)) : among(special);
  }
  double real() {
    return rarely(4) ? c10::bit_cast<double>(bytes(8)) : special_real();
  }

  at::Tensor tensor(std::vector<int64_t> sizes, at::ScalarType type, Layout layout = Layout::any) {
    const size_t width = at::elementSize(type);
    const std::vector<int64_t> strides = strides_of(sizes, layout);
    int64_t span = 1;
    for (size_t i = 0; i < sizes.size(); i++) {
      span = sizes[i] == 0 || span == 0 ? 0 : span + (sizes[i] - 1) * strides[i];
    }
    const size_t size = static_cast<size_t>(span) * width;
    const size_t lead = width * static_cast<size_t>(rarely(4) ? within(0, 17) : 0);
    char* memory = static_cast<char*>(std::malloc(lead + size));
    fill(memory + lead, span, type);
    __asan_poison_memory_region(memory, lead);
    blocks_.push_back({memory, lead, size, {memory + lead, memory + lead + size}});
    return at::for_blob(memory, sizes)
        .strides(strides)
        .storage_offset(static_cast<int64_t>(lead / width))
        .options(at::TensorOptions(type))
        .make_tensor();
  }
  at::Tensor floats(std::vector<int64_t> sizes, Layout layout = Layout::any) {
    return tensor(std::move(sizes), at::kFloat, layout);
  }
  // Mostly `layout`, where an op refuses others.
  Layout mostly(Layout layout) {
    return rarely(32) ? Layout::any : layout;
  }
  // Elements that `next` returns one by one, int64 or float64.
  template <class Next>
  at::Tensor list(int64_t size, const Next& next, Layout layout = Layout::any) {
    using T = decltype(next());
    const at::Tensor x = tensor({size}, c10::CppTypeToScalarType<T>::value, layout);
    for (int64_t i = 0; i < size; i++) {
      x.mutable_data_ptr<T>()[i * x.stride(0)] = next();
    }
    remember(x);
    return x;
  }
  // Take the elements of x as those that an op receives, after they were changed here.
  void remember(const at::Tensor& x) {
    for (Block& block : blocks_) {
      if (block.at == x.storage().data()) {
        block.original.assign(block.at + block.lead, block.at + block.lead + block.bytes);
      }
    }
  }
  // A tensor of any kind.
  at::Tensor anything() {
    constexpr std::array<at::ScalarType, 12> types{at::kFloat, at::kLong, at::kDouble, at::kHalf, at::kBFloat16,
                                                   at::kInt, at::kBool, at::kByte, at::kShort, at::kFloat,
                                                   at::kComplexFloat, at::kFloat};
    std::vector<int64_t> sizes(static_cast<size_t>(within(0, 5)));
    for (int64_t& size : sizes) {
      size = within(0, 5);
    }
    const at::ScalarType type = among(types);
    return tensor(sizes, type);
  }

 private:
  // Mostly dense; otherwise with gaps, with dimensions in another order, or with one whose elements share memory.
  std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes, Layout layout) {
    std::vector<int64_t> strides(sizes.size()), order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    const bool dense = sizes.empty() || layout == Layout::dense || !rarely(4);
    const auto movable = static_cast<int64_t>(sizes.size()) - (layout == Layout::rows);
    if (!dense && movable > 0) {
      std::swap(order[movable - 1], order[within(0, movable - 1)]);
    }
    int64_t next = dense || layout == Layout::rows ? 1 : within(1, 2);
    for (size_t i = order.size(); i-- > 0;) {
      strides[order[i]] = next;
      next = next * std::max<int64_t>(1, sizes[order[i]]) + (!dense && rarely(4) ? within(0, 5) : 0);
    }
    if (!dense && movable > 0 && rarely(4)) {
      strides[within(0, movable - 1)] = 0;
    }
    return strides;
  }

  double special_real() {
    constexpr std::array<double, 16> special{0, 1, 0.5, -1, -0.0, 3, 1e-5, 1e5, 1e-40, 1e38, -1e38, 1e300, 5e-324,
                                             INFINITY, -INFINITY, NAN};
    return among(special);
  }
  double normal() {  // nearly
    const uint64_t bits = element_();
    return static_cast<double>(static_cast<int64_t>(bits % 4096 + (bits >> 12) % 4096) - 4095) / 1024;
  }

  void fill(char* at, int64_t n, at::ScalarType type) {
    const auto kind = within(0, 10);
    element_.state = bytes(2);
    const int64_t values = 1 + static_cast<int64_t>(element_.state % 11);
    if (kind == 10) {  // any bits
      for (size_t i = 0; i < static_cast<size_t>(n) * at::elementSize(type); i++) {
        at[i] = type == at::kBool ? static_cast<char>(element_() & 1) : static_cast<char>(element_());
      }
      return;
    }
    const double base = kind == 8 ? special_real() : 0;
    const auto next = [&](int64_t i) {
      switch (kind) {
        case 4:  // ties
          return static_cast<double>(element_() % static_cast<uint64_t>(values));
        case 5:  // ascending
          return static_cast<double>(i) / 8;
        case 6:  // a few values that are far from the others
          return element_() % 8 == 0 ? 1e9 * normal() : normal();
        case 7:  // a few special values
          return element_() % 16 == 0 ? special(element_()) : normal();
        case 8:  // one value
          return base;
        case 9:  // values that differ only in the last bits of a double
          return static_cast<double>(element_() % 4) + 0x1p-50 * static_cast<double>(element_() % 4);
        default:
          return normal();
      }
    };
    AT_DISPATCH_ALL_TYPES_AND_COMPLEX_AND3(at::kBool, at::kHalf, at::kBFloat16, type, "fill", [&] {
      for (int64_t i = 0; i < n; i++) {
        const double value = next(i);
        reinterpret_cast<scalar_t*>(at)[i] = converted<scalar_t>(value);
      }
    });
  }
  static double special(uint64_t bits) {
    constexpr std::array<double, 8> values{0, -0.0, INFINITY, -INFINITY, NAN, 1e-40, 3e38, -3e38};
    return values[bits % 8];
  }
  template <class T>
  static T converted(double value) {
    if constexpr (std::is_integral_v<T>) {
      using Limits = std::numeric_limits<T>;
      return std::isnan(value) ? static_cast<T>(-1)
             : value > 100     ? Limits::max()
             : value < -100    ? Limits::min()
                               : static_cast<T>(static_cast<int64_t>(value));
    } else if constexpr (std::is_same_v<T, double>) {
      return value;
    } else {
      return static_cast<T>(static_cast<float>(value));
    }
  }

  const uint8_t* data_;
  size_t left_;
  Random beyond_, element_;
  std::vector<Block> blocks_;
};

}  // namespace fuzz
