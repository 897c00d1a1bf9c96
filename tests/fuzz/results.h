// What is known of the results of an op, whatever its arguments are.
#pragma once

#include "draw.h"

#include <ATen/core/ivalue.h>

#include <cmath>
#include <cstdio>
#include <string>

namespace fuzz {

[[noreturn]] inline void fault(const std::string& what) {
  std::fprintf(stderr, "FAULT: %s\n", what.c_str());
  std::abort();
}

inline void expect(bool holds, const char* what) {
  if (!holds) {
    fault(what);
  }
}

// Call visit(begin, end) for each row of x (P, M), or (total,) with offsets.
template <class Visit>
void each_row(const at::Tensor& x, const c10::IValue& offsets, const Visit& visit) {
  if (offsets.isNone()) {
    for (int64_t row = 0; row < x.size(0); row++) {
      visit(row * x.size(1), (row + 1) * x.size(1));
    }
    return;
  }
  const at::Tensor ends = offsets.toTensor();
  for (int64_t row = 0; row + 1 < ends.size(0); row++) {
    visit(ends.data_ptr<int64_t>()[row], ends.data_ptr<int64_t>()[row + 1]);
  }
}

// Each row of `order` names every element of the row once, in ascending order of `values`, ties in the order of the row.
inline void check_argsort(const at::Tensor& values, const c10::IValue& offsets, const at::Tensor& order) {
  const at::Tensor numbers = values.to(at::kDouble);
  const double* x = numbers.data_ptr<double>();
  const int64_t* index = order.data_ptr<int64_t>();
  std::vector<char> seen;
  each_row(values, offsets, [&](int64_t begin, int64_t end) {
    seen.assign(static_cast<size_t>(end - begin), 0);
    bool any_nan = false;
    for (int64_t k = begin; k < end; k++) {
      expect(0 <= index[k] && index[k] < end - begin && !seen[index[k]]++, "an argsort is not a permutation");
      any_nan |= std::isnan(x[k]);
    }
    for (int64_t k = begin + 1; k < end && !any_nan; k++) {
      const double before = x[begin + index[k - 1]], here = x[begin + index[k]];
      expect(before < here || (before == here && index[k - 1] < index[k]), "an argsort is not sorted and stable");
    }
  });
}

// A rank is a count divided by the size of the row.
inline void check_ranks(const at::Tensor& ranks) {
  const at::Tensor numbers = ranks.to(at::kDouble).contiguous();
  const double* rank = numbers.data_ptr<double>();
  const bool within = std::all_of(rank, rank + numbers.numel(), [](double r) { return 0 <= r && r <= 1; });
  expect(within, "a rank is not in [0, 1]");
}

inline void check_tokens(const at::Tensor& logits, const at::Tensor& tokens) {
  for (int64_t row = 0; row < tokens.size(0); row++) {
    const int64_t token = tokens.data_ptr<int64_t>()[row];
    expect(0 <= token && token < logits.size(1), "a token is not in the vocabulary");
  }
}

inline void check_first_nan(const at::Tensor& x, int64_t found) {
  const at::Tensor numbers = x.to(at::kFloat).contiguous();
  const float *begin = numbers.data_ptr<float>(), *end = begin + numbers.numel();
  const float* first = std::find_if(begin, end, [](float number) { return number != number; });
  expect(found == (first == end ? -1 : first - begin), "the first NaN is another one");
}

inline void check_results(const std::string& op, const std::vector<c10::IValue>& given,
                          const std::vector<c10::IValue>& results) {
  if (op == "nlgrpo::ecdf_argsort") {
    check_argsort(given[0].toTensor(), given[1], results[0].toTensor());
  } else if ((op == "nlgrpo::ecdf_ranks" && given[2].isNone()) || (op == "nlgrpo::ecdf_evaluate" && given[4].isNone())) {
    check_ranks(results[0].toTensor());
  } else if (op == "nlgrpo::sample_tokens") {
    check_tokens(given[0].toTensor(), results[0].toTensor());
  } else if (op == "nlgrpo::ecdf_first_nan") {
    check_first_nan(given[0].toTensor(), results[0].toInt());
  }
}

}  // namespace fuzz
