// Linearised rewards of each group: r~_(i) = -sum_{k=i}^{M-1} w_k (r_(k+1) - r_(k)), in the order of the rewards.
#include "lanes.h"

#include <vector>

namespace nlgrpo {
namespace {

// One group, from its sorted entries. Sums are in float64. The gap between equal rewards counts 0, also between equal
// infinities, and so does a gap of weight 0.
template <class T>
void linearize_sorted(const T* rewards, const double* weights, const uint64_t* sorted, int64_t n, T* out) {
  double sum = 0;
  T above = rewards[Sorter::position(sorted[n - 1])];
  out[Sorter::position(sorted[n - 1])] = 0;
  for (int64_t k = n - 2; k >= 0; k--) {
    const uint32_t position = Sorter::position(sorted[k]);
    const T here = rewards[position];
    if (weights[k] != 0 && here != above) {
      sum -= weights[k] * (static_cast<double>(above) - static_cast<double>(here));
    }
    out[position] = static_cast<T>(sum);
    above = here;
  }
}

// T: float or double, of format F.
template <class T, class F>
void linearize_groups(const Tensor& rewards, const Tensor& weights, Tensor& out) {
  const Rows rows(rewards, std::nullopt, "rewards");
  const T* from = rewards.const_data_ptr<T>();
  const std::vector<double> by(weights.const_data_ptr<T>(), weights.const_data_ptr<T>() + weights.size(0));
  T* to = out.mutable_data_ptr<T>();
  const auto* bits = static_cast<const typename F::Bits*>(rewards.const_data_ptr());
  for_short_rows<F, Sorter>(
      bits, rows, rows.total(), [&](const Lanes<F>& lanes) { lanes.linearize(from, by.data(), to); },
      [&](int64_t begin, int64_t n, Sorter& sorter) {
        linearize_sorted(from + begin, by.data(), sorter.sort<F>(bits + begin, n), n, to + begin);
      });
}

}  // namespace

// rewards (P, M), weights (M), both float32 or both float64 -> (P, M). NaN is sorted last.
Tensor linearize_rows(const Tensor& rewards, const Tensor& weights) {
  STD_TORCH_CHECK(rewards.dim() == 2 && weights.is_cpu() && weights.dim() == 1 && weights.is_contiguous() &&
                      weights.size(0) == rewards.size(1) && weights.scalar_type() == rewards.scalar_type(),
                  "expected rewards (P, M) and weights (M,) of one dtype, contiguous, on the CPU");
  STD_TORCH_CHECK(rewards.size(1) < int64_t{1} << 32, "expected fewer than 2^32 rewards per group");
  Tensor out = torch::stable::new_empty(rewards, rewards.sizes());
  switch (rewards.scalar_type()) {
    case torch::headeronly::ScalarType::Float:
      linearize_groups<float, NanLast<Single>>(rewards, weights, out);
      break;
    case torch::headeronly::ScalarType::Double:
      linearize_groups<double, NanLast<Double>>(rewards, weights, out);
      break;
    default:
      STD_TORCH_CHECK(false, "rewards must be float32 or float64");
  }
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("linearize_rows", TORCH_BOX(&linearize_rows));
}

}  // namespace nlgrpo
