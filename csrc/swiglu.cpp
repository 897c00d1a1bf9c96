// y = gate / (1 + exp(-gate)) * up, where a row of x is gate, then up, and its gradient.
#include "ops.h"

namespace nlgrpo {

NLGRPO_CLONES void gate_row(const float* gate, const float* up, float* y, int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; j++) {
    y[j] = gate[j] / (1 + exponential(-gate[j])) * up[j];
  }
}

// With s = 1 / (1 + exp(-gate)): by_gate = g up s (1 + gate (1 - s)), by_up = g gate s.
NLGRPO_CLONES void gate_row_backward(const float* g, const float* gate, const float* up, float* by_gate, float* by_up,
                                     int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; j++) {
    const float s = 1 / (1 + exponential(-gate[j])), slope = g[j] * s;
    by_up[j] = slope * gate[j];
    by_gate[j] = slope * up[j] * (1 + gate[j] * (1 - s));
  }
}

namespace {

void check(const Tensor& x) {
  check_float(x, "x", 2);
  STD_TORCH_CHECK(x.size(1) % 2 == 0, "x must have an even number of columns, got ", x.size(1));
}

}  // namespace

// x (T, 2F) -> (T, F)
Tensor swiglu(const Tensor& x) {
  check(x);
  const int64_t rows = x.size(0), width = x.size(1) / 2;
  const Tensor in = torch::stable::contiguous(x);
  Tensor out = torch::stable::new_empty(x, {rows, width});
  const float* from = in.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, rows, grain(16 * width), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const float* gate = from + row * 2 * width;
      gate_row(gate, gate + width, to + row * width, width);
    }
  });
  return out;
}

// grad (T, F), x (T, 2F) -> (T, 2F)
Tensor swiglu_backward(const Tensor& grad, const Tensor& x) {
  check(x);
  check_float(grad, "grad", 2);
  const int64_t rows = x.size(0), width = x.size(1) / 2;
  STD_TORCH_CHECK(grad.size(0) == rows && grad.size(1) == width, "grad must be (", rows, ", ", width, "), got (",
                  grad.size(0), ", ", grad.size(1), ")");
  const Tensor upstream = torch::stable::contiguous(grad), in = torch::stable::contiguous(x);
  Tensor out = torch::stable::new_empty(x, {rows, 2 * width});
  const float *g = upstream.const_data_ptr<float>(), *from = in.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, rows, grain(24 * width), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const float* gate = from + row * 2 * width;
      float* into = to + row * 2 * width;
      gate_row_backward(g + row * width, gate, gate + width, into, into + width, width);
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("swiglu", TORCH_BOX(&swiglu));
  m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
}

}  // namespace nlgrpo
