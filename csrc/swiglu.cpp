// y = gate / (1 + exp(-gate)) * up, where a row of x is gate, then up.
#include "simd.h"

namespace nlgrpo {

NLGRPO_CLONES void gate_row(const float* gate, const float* up, float* y, int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; j++) {
    y[j] = gate[j] / (1 + exponential(-gate[j])) * up[j];
  }
}

// x (T, 2F) -> (T, F)
Tensor swiglu(const Tensor& x) {
  check_float(x, "x", 2);
  STD_TORCH_CHECK(x.size(1) % 2 == 0, "x must have an even number of columns, got ", x.size(1));
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

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("swiglu", TORCH_BOX(&swiglu));
}

}  // namespace nlgrpo
