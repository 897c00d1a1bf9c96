// A transformer block of a decoding step. Few rows make the time of a call from Python longer than that of its work.
#include "ops.h"

namespace nlgrpo {
namespace {

// x + y, in the memory of y, which is a product with `weight`.
Tensor add(const Tensor& x, Tensor y, const char* weight) {
  STD_TORCH_CHECK(y.size(1) == x.size(1), weight, " must have ", x.size(1), " rows, one per column of x, got ", y.size(1));
  const Tensor from = torch::stable::contiguous(x);
  const float* a = from.const_data_ptr<float>();
  float* b = y.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, y.numel(), grain(1), [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
      b[i] = a[i] + b[i];
    }
  });
  return y;
}

}  // namespace

// x (R n, D) -> (R n, D), where own, column, prompts, lengths and prompt are as in `branch_attention`.
Tensor decode_block(const Tensor& x, const Tensor& norm1, const Tensor& qkv_weight,
                    const std::optional<Tensor>& qkv_bias, const Tensor& out_weight, const Tensor& norm2,
                    const Tensor& up, const Tensor& down, double eps, const std::optional<Tensor>& cos,
                    const std::optional<Tensor>& sin, Tensor own, int64_t column, const Tensor& prompts,
                    const Tensor& lengths, const Tensor& prompt, int64_t window, double scale, int64_t heads) {
  check_float(x, "x", 2);
  check_float(own, "own", 5);
  const int64_t tokens = x.size(0), kv_heads = own.size(2), dim = own.size(4);
  const Tensor qkv = fastest_linear(rms_norm(x, norm1, eps), qkv_weight, qkv_bias);
  STD_TORCH_CHECK(0 < heads && heads <= qkv.size(1), "heads must be positive, and at most ", qkv.size(1), ", got ",
                  heads);
  STD_TORCH_CHECK(qkv.size(1) == (heads + 2 * kv_heads) * dim, "qkv_weight must have ",
                  (heads + 2 * kv_heads) * dim, " rows, got ", qkv.size(1));
  const Tensor mixed = branch_attention(torch::stable::view(qkv, {tokens, heads + 2 * kv_heads, dim}), cos, sin, own,
                                        column, prompts, lengths, prompt, window, scale, heads);
  const Tensor y = add(x, fastest_linear(torch::stable::view(mixed, {tokens, heads * dim}), out_weight, std::nullopt),
                       "out_weight");
  return add(y, fastest_linear(swiglu(fastest_linear(rms_norm(y, norm2, eps), up, std::nullopt)), down, std::nullopt),
             "down");
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("decode_block", TORCH_BOX(&decode_block));
}

}  // namespace nlgrpo
