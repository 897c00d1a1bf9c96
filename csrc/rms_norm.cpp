// y = x / sqrt(mean x^2 + eps) * weight, row by row, and its gradient.
#include "ops.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

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

// With r = 1 / sqrt(mean x^2 + eps) and g the upstream gradient: into = r (g weight - x r^2 mean(g weight x)), and
// r g x is added to by_weight.
NLGRPO_CLONES void normalize_row_backward(const float* g, const float* x, const float* weight, float* into,
                                          float* by_weight, int64_t width, float eps) {
  float sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
  for (int64_t j = 0; j < width; j++) {
    sum += x[j] * x[j];
    product += g[j] * weight[j] * x[j];
  }
  const float factor = 1 / std::sqrt(sum / static_cast<float>(width) + eps);
  const float slope = product / static_cast<float>(width) * factor * factor;
#pragma omp simd
  for (int64_t j = 0; j < width; j++) {
    into[j] = factor * (g[j] * weight[j] - x[j] * slope);
    by_weight[j] += factor * g[j] * x[j];
  }
}

namespace {

void check(const Tensor& x, const Tensor& weight) {
  check_float(x, "x", 2);
  check_float(weight, "weight", 1);
  STD_TORCH_CHECK(weight.size(0) == x.size(1), "weight must have ", x.size(1),
                  " elements, one per column of x, got ", weight.size(0));
}

}  // namespace

// x (T, D), weight (D) -> (T, D)
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check(x, weight);
  const int64_t rows = x.size(0), width = x.size(1);
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

// grad, x (T, D), weight (D) -> gradients of x (T, D) and of weight (D). Each block of rows sums its own gradient of
// weight, and these are added in order, so that the number of threads does not change the result.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, double eps) {
  constexpr int64_t block = 64;
  check(x, weight);
  check_float(grad, "grad", 2);
  const int64_t rows = x.size(0), width = x.size(1), blocks = (rows + block - 1) / block;
  STD_TORCH_CHECK(grad.size(0) == rows && grad.size(1) == width, "grad must be (", rows, ", ", width, ") as x, got (",
                  grad.size(0), ", ", grad.size(1), ")");
  const Tensor upstream = torch::stable::contiguous(grad), in = torch::stable::contiguous(x),
               scale = torch::stable::contiguous(weight);
  Tensor by_x = torch::stable::new_empty(x, {rows, width}), by_weight = torch::stable::new_empty(weight, {width});
  const float *g = upstream.const_data_ptr<float>(), *from = in.const_data_ptr<float>(),
              *by = scale.const_data_ptr<float>();
  float *to = by_x.mutable_data_ptr<float>(), *total = by_weight.mutable_data_ptr<float>();
  std::vector<float> sums(static_cast<size_t>(blocks * width), 0.0f);
  float* sum = sums.data();
  torch::stable::parallel_for(0, blocks, grain(4 * width * block), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin * block; row < std::min(end * block, rows); row++) {
      normalize_row_backward(g + row * width, from + row * width, by, to + row * width, sum + row / block * width,
                             width, static_cast<float>(eps));
    }
  });
  std::fill_n(total, width, 0.0f);
  for (int64_t i = 0; i < blocks * width; i++) {
    total[i % width] += sum[i];
  }
  return {by_x, by_weight};
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

}  // namespace nlgrpo
