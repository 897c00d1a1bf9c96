// Shared by the CPU ops: compilation for several instruction sets, a vectorised exponential, argument checks.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <bit>
#include <cstdint>

// A function with this attribute is compiled for AVX-512, for AVX2 with FMA, and for any x86-64. The loader picks one
// (an "ifunc" of GNU libc). On other systems it is compiled once, for the compiler's default instruction set.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define NLGRPO_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define NLGRPO_CLONES
#endif
// Helpers must be inlined into the clones; otherwise they would be compiled for the oldest processor only.
#define NLGRPO_INLINE inline __attribute__((always_inline))

namespace nlgrpo {

using torch::stable::Tensor;

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));  // may be unaligned

// exp(x) within 2 units in the last place, without branches and tables, so that loops over it vectorise.
//
//   exp(x) = 2^n exp(r),  n = round(x / ln 2),  r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2]
//
// with the Taylor series of exp(r) to r^7 (error below 6e-9). x is clamped to [-87.3, 88], where the result is a normal
// number, so results are at least about 1e-38. NaN gives NaN.
NLGRPO_INLINE float exponential(float x) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits of the sum
  constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;  // n * ln2_high is exact
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + magic;
  const float n = shifted - magic;
  const float r = (x - n * ln2_high) - n * ln2_low;
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const uint32_t bits = (std::bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u;  // the float 2^n
  return series * std::bit_cast<float>(bits);
}

// Minimum number of iterations per thread, each of about `work` multiplications.
inline int64_t grain(int64_t work) {
  return 1 + 32768 / (work + 1);
}

inline void check_float(const Tensor& x, const char* name, int64_t dims) {
  STD_TORCH_CHECK(x.is_cpu(), name, " must be on the CPU");
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, name, " must be float32");
  STD_TORCH_CHECK(x.dim() == dims, name, " must have ", dims, " dimensions, got ", x.dim());
}

}  // namespace nlgrpo
