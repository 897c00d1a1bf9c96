// Tokens of softmax(logits / temperature) by inversion, and their log-probabilities.
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

namespace nlgrpo {
namespace {

constexpr int64_t BLOCK = 64;

// e^((x - top) / temperature), and 0 where it is less than 1e-37.
NLGRPO_INLINE float weight(float x, float top, float inverse_temperature) {
  const float below = (x - top) * inverse_temperature;
  return below < -87.0f ? 0.0f : exponential(below);
}

}  // namespace

// Sample one row of V logits. The sums of blocks of logits say in which block the token is. `sums` has one element per
// block. Logits that are not finite give the last token, with a log-probability that is NaN.
NLGRPO_CLONES void sample_row(const float* x, int64_t V, double noise, float inverse_temperature, double* sums,
                              int64_t* token, float* logprob) {
  float top = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : top)
  for (int64_t v = 0; v < V; v++) {
    top = x[v] > top ? x[v] : top;
  }
  double total = 0;
  for (int64_t begin = 0; begin < V; begin += BLOCK) {
    const int64_t end = std::min(begin + BLOCK, V);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t v = begin; v < end; v++) {
      sum += static_cast<double>(weight(x[v], top, inverse_temperature));
    }
    sums[begin / BLOCK] = sum;
    total += sum;
  }
  const double threshold = noise * total;
  double before = 0;
  int64_t chosen = V - 1;
  for (int64_t begin = 0; begin < V; begin += BLOCK) {
    const double through = before + sums[begin / BLOCK];
    if (through > threshold) {
      // In this order the sum of the block may round to less. Its last possible token is then the one.
      for (int64_t v = begin; v < std::min(begin + BLOCK, V); v++) {
        const float w = weight(x[v], top, inverse_temperature);
        chosen = w > 0 ? v : chosen;
        before += static_cast<double>(w);
        if (before > threshold) {
          break;
        }
      }
      break;
    }
    before = through;
  }
  *token = chosen;
  *logprob = static_cast<float>(static_cast<double>((x[chosen] - top) * inverse_temperature) - std::log(total));
}

// logits (R, V), noise (R) in float64 -> tokens (R), log-probabilities (R)
std::tuple<Tensor, Tensor> sample_tokens(const Tensor& logits, const Tensor& noise, double temperature) {
  check_float(logits, "logits", 2);
  const int64_t rows = logits.size(0), V = logits.size(1);
  STD_TORCH_CHECK(V > 0, "logits must have at least one column");
  STD_TORCH_CHECK(noise.is_cpu() && noise.scalar_type() == torch::headeronly::ScalarType::Double && noise.dim() == 1 &&
                      noise.size(0) == rows,
                  "noise must be (", rows, ",), float64, on the CPU");
  STD_TORCH_CHECK(temperature > 0, "temperature must be positive, got ", temperature);
  const Tensor in = torch::stable::contiguous(logits), uniform = torch::stable::contiguous(noise);
  Tensor tokens = torch::stable::new_empty(logits, {rows}, torch::headeronly::ScalarType::Long);
  Tensor logprobs = torch::stable::new_empty(logits, {rows});
  const float* x = in.const_data_ptr<float>();
  const double* u = uniform.const_data_ptr<double>();
  int64_t* token = tokens.mutable_data_ptr<int64_t>();
  float* logprob = logprobs.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, rows, grain(16 * V), [=](int64_t begin, int64_t end) {
    std::vector<double> sums(static_cast<size_t>((V + BLOCK - 1) / BLOCK));
    for (int64_t row = begin; row < end; row++) {
      sample_row(x + row * V, V, u[row], static_cast<float>(1 / temperature), sums.data(), token + row, logprob + row);
    }
  });
  return {tokens, logprobs};
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("sample_tokens", TORCH_BOX(&sample_tokens));
}

}  // namespace nlgrpo
