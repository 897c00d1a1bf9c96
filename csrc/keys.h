// Floating-point numbers as unsigned keys of the same order: -inf < .. < -0 = +0 < .. < inf. The key of a NaN is
// arbitrary.
#pragma once

#include "simd.h"

#include <bit>
#include <cstdint>
#include <type_traits>

namespace nlgrpo {

// A floating-point format, given by the integer type of its bits and the bits of +inf. Keys have that integer type.
template <class B, B inf>
struct Format {
  using Bits = B;
  using Key = B;
  using Number = std::conditional_t<sizeof(B) == 8, double, float>;
  static constexpr B sign = static_cast<B>(B{1} << (8 * sizeof(B) - 1));

  static NLGRPO_INLINE bool is_nan(B bits) {
    if constexpr (sizeof(B) == 8) {  // every processor compares vectors of doubles, but not of 64-bit integers
      const double x = std::bit_cast<double>(bits);
      return x != x;
    }
    using Signed = std::make_signed_t<B>;
    return static_cast<Signed>(bits & static_cast<B>(~sign)) > static_cast<Signed>(inf);
  }

  // Positive numbers get the sign bit set, which puts them above negative ones, whose bits are inverted.
  static NLGRPO_INLINE B key(B bits) {
    bits = bits == sign ? B{0} : bits;
    return static_cast<B>(bits & sign ? ~bits : bits | sign);
  }

  // Inverse of `key`.
  static NLGRPO_INLINE Number number(B key)
    requires(sizeof(B) == sizeof(Number))
  {
    return std::bit_cast<Number>(static_cast<B>(key & sign ? key & ~sign : ~key));
  }
};

using Half = Format<uint16_t, 0x7c00>;
using BFloat16 = Format<uint16_t, 0x7f80>;
using Single = Format<uint32_t, 0x7f800000>;
using Double = Format<uint64_t, 0x7ff0000000000000>;

// A format in which the key of every NaN is the greatest one.
template <class F>
struct NanLast : F {
  static NLGRPO_INLINE typename F::Key key(typename F::Bits bits) {
    return F::is_nan(bits) ? static_cast<typename F::Key>(~typename F::Key{0}) : F::key(bits);
  }
};

// A format for values that are keys already.
template <class K>
struct Made {
  using Bits = K;
  using Key = K;
  static NLGRPO_INLINE K key(K key) {
    return key;
  }
};

// Call f(format) with the format of the elements of x.
template <class F>
auto with_format(const Tensor& x, const char* name, const F& f) {
  using torch::headeronly::ScalarType;
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return f(Half{});
    case ScalarType::BFloat16:
      return f(BFloat16{});
    case ScalarType::Float:
      return f(Single{});
    case ScalarType::Double:
      return f(Double{});
    default:
      STD_TORCH_CHECK(false, name, " must be float16, bfloat16, float32 or float64");
  }
}

template <class F>
const typename F::Bits* bits_of(const Tensor& x) {
  return static_cast<const typename F::Bits*>(x.const_data_ptr());
}

}  // namespace nlgrpo
