// Ops that other ops call.
#pragma once

#include "simd.h"

#include <optional>

namespace nlgrpo {

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
Tensor swiglu(const Tensor& x);
Tensor fastest_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);
Tensor branch_attention(const Tensor& qkv, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                        Tensor own, int64_t column, const Tensor& prompts, const Tensor& lengths, const Tensor& prompt,
                        int64_t window, double scale, int64_t heads);

}  // namespace nlgrpo
