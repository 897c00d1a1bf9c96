// Rotary embedding of one head, and the checks of heads that are rotated.
#pragma once

#include "simd.h"

#include <optional>

namespace nlgrpo {

// (a, b) -> (a cos - b sin, b cos + a sin) for the halves a, b of the first 2 `half` elements. All `dim` elements are
// multiplied by `factor`. With `sign` = -1 it is the inverse rotation, which the gradient needs.
NLGRPO_INLINE void rotate(const float* x, const float* cos, const float* sin, int64_t half, float factor, float* to,
                          int64_t dim, float sign = 1) {
  for (int64_t j = 0; j < half; j++) {
    const float a = x[j], b = x[j + half], s = sign * sin[j];
    to[j] = (a * cos[j] - b * s) * factor;
    to[j + half] = (b * cos[j] + a * s) * factor;
  }
  for (int64_t j = 2 * half; j < dim; j++) {
    to[j] = x[j] * factor;
  }
}

// Check qkv (T, heads + 2 kv_heads, dim), and cos and sin (T, r / 2). Returns kv_heads.
inline int64_t check_heads(const Tensor& qkv, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                           int64_t heads) {
  check_float(qkv, "qkv", 3);
  const int64_t tokens = qkv.size(0), dim = qkv.size(2), kv_heads = heads > 0 ? (qkv.size(1) - heads) / 2 : 0;
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0 && heads + 2 * kv_heads == qkv.size(1),
                  "qkv must have heads + 2 kv_heads heads, with heads = ", heads, " a multiple of kv_heads, got ",
                  qkv.size(1));
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "cos and sin must both be given, or neither");
  if (cos.has_value()) {
    check_float(*cos, "cos", 2);
    check_float(*sin, "sin", 2);
    STD_TORCH_CHECK(cos->size(0) == tokens && sin->size(0) == tokens && cos->size(1) == sin->size(1) &&
                        2 * cos->size(1) <= dim,
                    "cos and sin must be (", tokens, ", r / 2) with r at most ", dim);
  }
  return kv_heads;
}

inline void check_window(int64_t window) {
  STD_TORCH_CHECK(window >= 0, "window must be 0 (none) or positive, got ", window);
}

inline std::optional<Tensor> contiguous(const std::optional<Tensor>& x) {
  return x.has_value() ? std::optional(torch::stable::contiguous(*x)) : x;
}

}  // namespace nlgrpo
