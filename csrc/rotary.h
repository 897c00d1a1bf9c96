// Rotary embedding of one head.
#pragma once

#include "simd.h"

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

}  // namespace nlgrpo
