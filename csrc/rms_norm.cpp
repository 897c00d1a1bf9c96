// y = x / sqrt(mean x^2 + eps) * weight, row by row.
#include "simd.h"

#include <cmath>

namespace nlgrpo {

NLGRPO_CLONES void normalize_row(const float* x, const float* weight, float* y, int64_t width, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < width; j++) {
    sum += x[j] * x[j];
  }
  const float factor = 1 / std::sqrt(sum / static_cast<float>(width) + eps);
#pragma omp simd
  for (int64_t j = 0; j < width; j++) {
    y[j] = x[j] * factor * weight[j];
  }
}

// x (T, D), weight (D) -> (T, D)
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_float(x, "x", 2);
  check_float(weight, "weight", 1);
  const int64_t rows = x.size(0), width = x.size(1);
  STD_TORCH_CHECK(weight.size(0) == width, "weight must have ", width, " elements, one per column of x, got ",
                  weight.size(0));
  const Tensor in = torch::stable::contiguous(x), scale = torch::stable::contiguous(weight);
  Tensor out = torch::stable::new_empty(x, {rows, width});
  const float *from = in.const_data_ptr<float>(), *by = scale.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, rows, grain(2 * width), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      normalize_row(from + row * width, by, to + row * width, width, static_cast<float>(eps));
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
}

}  // namespace nlgrpo
