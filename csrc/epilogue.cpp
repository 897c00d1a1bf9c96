// Log-probability and entropy of the softmax of rows of logits, and the gradient of the logits.
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

namespace nlgrpo {
namespace {

constexpr int64_t BLOCK = 256;  // float32 sums of one block are added in float64
constexpr float FLOOR = -1e4f;  // replaces -inf, whose product with a probability of 0 would be NaN

NLGRPO_INLINE float at_least_floor(float x) {
  return x < FLOOR ? FLOOR : x;
}

// e^x, and 0 below 1e-37.
NLGRPO_INLINE float probability(float x) {
  return x < -87.0f ? 0.0f : exponential(x);
}

struct RowStatistics {
  float top;  // the largest logit
  double log_total;  // log sum_v e^((x_v - top) / temperature)
  double entropy;
};

}  // namespace

NLGRPO_CLONES void row_statistics(const float* x, int64_t V, float inverse_temperature, RowStatistics* result) {
  float top = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : top)
  for (int64_t v = 0; v < V; v++) {
    top = x[v] > top ? x[v] : top;
  }
  double total = 0, weighted = 0;
  for (int64_t begin = 0; begin < V; begin += BLOCK) {
    const int64_t end = std::min(begin + BLOCK, V);
    float sum = 0, weighted_sum = 0;
#pragma omp simd reduction(+ : sum, weighted_sum)
    for (int64_t v = begin; v < end; v++) {
      const float below = at_least_floor((x[v] - top) * inverse_temperature), weight = probability(below);
      sum += weight;
      weighted_sum += weight * below;
    }
    total += static_cast<double>(sum);
    weighted += static_cast<double>(weighted_sum);
  }
  *result = {top, std::log(total), std::log(total) - weighted / total};
}

// g and h: upstream gradients of log-probability and entropy, divided by the temperature. `out` may be `x`.
NLGRPO_CLONES void row_gradient(const float* x, int64_t V, float top, float log_total, float entropy, float g, float h,
                                float inverse_temperature, float* out) {
#pragma omp simd
  for (int64_t v = 0; v < V; v++) {
    const float logp = (x[v] - top) * inverse_temperature - log_total;
    out[v] = -probability(logp) * (g + h * (at_least_floor(logp) + entropy));
  }
}

namespace {

void check_row(const Tensor& x, const char* name, int64_t rows) {
  check_float(x, name, 1);
  STD_TORCH_CHECK(x.size(0) == rows, name, " must have one element per row of logits (", rows, "), got ", x.size(0));
}

// Check the arguments of both ops.
void check(const Tensor& logits, const Tensor& targets, double temperature) {
  check_float(logits, "logits", 2);
  STD_TORCH_CHECK(logits.size(1) > 0, "logits must have at least one column");
  STD_TORCH_CHECK(targets.is_cpu() && targets.scalar_type() == torch::headeronly::ScalarType::Long &&
                      targets.dim() == 1 && targets.size(0) == logits.size(0),
                  "targets must be (", logits.size(0), ",), int64, on the CPU");
  STD_TORCH_CHECK(temperature > 0, "temperature must be positive, got ", temperature);
  const Tensor contiguous = torch::stable::contiguous(targets);
  const int64_t* target = contiguous.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < logits.size(0); row++) {
    STD_TORCH_CHECK(target[row] >= 0 && target[row] < logits.size(1), "targets[", row, "] = ", target[row],
                    " is not in [0, ", logits.size(1), ")");
  }
}

}  // namespace

// logits (n, V), targets (n) -> log-probability (n), entropy (n), and for the gradient the largest logits and the
// logarithms of the sums relative to them (2, n). Separately, because their sum would lose digits.
std::tuple<Tensor, Tensor, Tensor> logits_statistics(const Tensor& logits, const Tensor& targets, double temperature) {
  check(logits, targets, temperature);
  const int64_t rows = logits.size(0), V = logits.size(1);
  const Tensor in = torch::stable::contiguous(logits), index = torch::stable::contiguous(targets);
  Tensor logprobs = torch::stable::new_empty(logits, {rows}), entropies = torch::stable::new_empty(logits, {rows}),
         kept = torch::stable::new_empty(logits, {2, rows});
  const float* x = in.const_data_ptr<float>();
  const int64_t* target = index.const_data_ptr<int64_t>();
  float *logprob = logprobs.mutable_data_ptr<float>(), *entropy = entropies.mutable_data_ptr<float>(),
        *tops = kept.mutable_data_ptr<float>(), *log_totals = tops + rows;
  torch::stable::parallel_for(0, rows, grain(16 * V), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      RowStatistics found;
      row_statistics(x + row * V, V, static_cast<float>(1 / temperature), &found);
      const double below = static_cast<double>(x[row * V + target[row]]) - static_cast<double>(found.top);
      logprob[row] = static_cast<float>(below / temperature - found.log_total);
      entropy[row] = static_cast<float>(found.entropy);
      tops[row] = found.top;
      log_totals[row] = static_cast<float>(found.log_total);
    }
  });
  return {logprobs, entropies, kept};
}

// The gradient of `logits` (n, V), written to `out` (n, V), contiguous, possibly `logits` itself. `kept` and `entropy`
// are results of logits_statistics; grad_logprob and grad_entropy (n) are the upstream gradients.
void logits_gradient(const Tensor& logits, const Tensor& targets, const Tensor& kept, const Tensor& entropy,
                     const Tensor& grad_logprob, const std::optional<Tensor>& grad_entropy, double temperature,
                     Tensor out) {
  check(logits, targets, temperature);
  const int64_t rows = logits.size(0), V = logits.size(1);
  check_float(kept, "kept", 2);
  STD_TORCH_CHECK(kept.size(0) == 2 && kept.size(1) == rows, "kept must be (2, ", rows, "), got (", kept.size(0), ", ",
                  kept.size(1), ")");
  check_row(entropy, "entropy", rows);
  check_row(grad_logprob, "grad_logprob", rows);
  if (grad_entropy) {
    check_row(*grad_entropy, "grad_entropy", rows);
  }
  check_float(out, "out", 2);
  STD_TORCH_CHECK(out.size(0) == rows && out.size(1) == V && out.is_contiguous(), "out must be (", rows, ", ", V,
                  "), contiguous");
  const Tensor in = torch::stable::contiguous(logits), index = torch::stable::contiguous(targets),
               saved = torch::stable::contiguous(kept), entropies = torch::stable::contiguous(entropy),
               by_logprob = torch::stable::contiguous(grad_logprob),
               by_entropy = grad_entropy ? torch::stable::contiguous(*grad_entropy) : by_logprob;
  const float *x = in.const_data_ptr<float>(), *tops = saved.const_data_ptr<float>(), *log_totals = tops + rows,
              *H = entropies.const_data_ptr<float>(), *g = by_logprob.const_data_ptr<float>(),
              *h = grad_entropy ? by_entropy.const_data_ptr<float>() : nullptr;
  const int64_t* target = index.const_data_ptr<int64_t>();
  float* into = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, rows, grain(16 * V), [=](int64_t begin, int64_t end) {
    const float inverse = static_cast<float>(1 / temperature);
    for (int64_t row = begin; row < end; row++) {
      const float by_target = g[row] * inverse;
      row_gradient(x + row * V, V, tops[row], log_totals[row], H[row], by_target, h ? h[row] * inverse : 0.0f, inverse,
                   into + row * V);
      into[row * V + target[row]] += by_target;
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("logits_statistics", TORCH_BOX(&logits_statistics));
  m.impl("logits_gradient", TORCH_BOX(&logits_gradient));
}

}  // namespace nlgrpo
