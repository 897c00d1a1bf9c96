// y = x weight^T + bias for the few rows of a decoding step, where the time is that of reading the weights.
#include "ops.h"

#include <array>

// GCC compiles code for AVX-512 whatever processor it compiles for; clang only where that one has it.
#if defined(__x86_64__) && (defined(__clang__) ? defined(__AVX512VL__) : __GNUC__ >= 12)
#define NLGRPO_AVX512
#include <immintrin.h>
#endif

namespace nlgrpo {
namespace {

Tensor library_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  STD_TORCH_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION) == 0,
                  "aten::linear failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

constexpr int COLUMNS = 4;        // of y in a tile
constexpr int64_t FEW_ROWS = 64;  // the same in kernels/linear.py

struct Product {
  const float *x, *weight, *bias;  // (rows, depth), (columns, depth), (columns) or null
  float* y;                        // (rows, columns)
  int64_t rows, depth, columns;
};

#ifdef NLGRPO_AVX512
#ifndef __clang__
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#endif

constexpr int64_t LANES = 16;
constexpr int ROWS = 6;            // of y in a tile: its 24 sums, 4 vectors of weights and 1 of x fit into 32 registers
constexpr int64_t MOST_ROWS = 96;  // rows of x that are multiplied before the next ones, so that they stay in the cache

// Not std::min: an instance of it for AVX-512 must not be shared with code for other processors.
NLGRPO_INLINE constexpr int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Sums of halves of a and of b, side by side; then of quarters, of pairs, and of single lanes. After all four, a lane
// is the sum of one vector, and every sum is added in the same order, whatever the other rows are.
NLGRPO_INLINE __m512 fold8(__m512 a, __m512 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
       __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
NLGRPO_INLINE __m512 fold4(__m512 a, __m512 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
       __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
NLGRPO_INLINE __m512 fold2(__m512 a, __m512 b) {
  return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
       __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
NLGRPO_INLINE __m512 fold1(__m512 a, __m512 b) {
  return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
       __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

// sum[i][j] += x_i w_j over the elements from k on that `mask` names.
template <int rows>
NLGRPO_INLINE void multiply(const float* x, const float* const* w, int64_t depth, int64_t k, __mmask16 mask,
                            __m512 (*sum)[COLUMNS]) {
  __m512 weights[COLUMNS];
#pragma GCC unroll 4
  for (int j = 0; j < COLUMNS; j++) {
    weights[j] = _mm512_maskz_loadu_ps(mask, w[j] + k);
  }
#pragma GCC unroll 6
  for (int i = 0; i < rows; i++) {
    const __m512 a = _mm512_maskz_loadu_ps(mask, x + i * depth + k);
#pragma GCC unroll 4
    for (int j = 0; j < COLUMNS; j++) {
      sum[i][j] = _mm512_fmadd_ps(a, weights[j], sum[i][j]);
    }
  }
}

// `rows` rows of y from `row` on, and the four columns from `column` on, whose weights are at w (fewer at the end).
// `next`: the weights that are read after these, which are fetched meanwhile.
template <int rows>
NLGRPO_INLINE void tile(const Product& p, int64_t row, int64_t column, const float* const* w, const float* next) {
  __m512 sum[ROWS][COLUMNS] = {};
  const int64_t whole = p.depth / LANES * LANES;
  for (int64_t k = 0; k < whole; k += LANES) {
#pragma GCC unroll 4
    for (int j = 0; j < COLUMNS; j++) {
      __builtin_prefetch(next + COLUMNS * k + j * LANES);
    }
    multiply<rows>(p.x + row * p.depth, w, p.depth, k, 0xffff, sum);
  }
  if (whole < p.depth) {
    const auto rest = static_cast<__mmask16>((1 << (p.depth - whole)) - 1);
    multiply<rows>(p.x + row * p.depth, w, p.depth, whole, rest, sum);
  }
#pragma GCC unroll 2
  for (int first = 0; first < rows; first += 4) {
    __m512 by_row[COLUMNS];  // four lanes for each of four rows
#pragma GCC unroll 4
    for (int j = 0; j < COLUMNS; j++) {
      const int last = ROWS - 1;  // rows beyond the tile are not stored
      by_row[j] = fold4(fold8(sum[first][j], sum[least(first + 1, last)][j]),
                        fold8(sum[least(first + 2, last)][j], sum[least(first + 3, last)][j]));
    }
    const __m512 result = fold1(fold2(by_row[0], by_row[1]), fold2(by_row[2], by_row[3]));
    for (int i = first; i < least(first + 4, rows); i++) {
      for (int64_t j = 0; j < least(COLUMNS, p.columns - column); j++) {
        const float offset = p.bias ? p.bias[column + j] : 0.0f;
        p.y[(row + i) * p.columns + column + j] = result[4 * (i - first) + j] + offset;
      }
    }
  }
}

void multiply_columns(const Product& p, int64_t begin, int64_t end) {
  for (int64_t first = 0; first < p.rows; first += MOST_ROWS) {
    const int64_t last = least(first + MOST_ROWS, p.rows);
    for (int64_t column = begin * COLUMNS; column < least(end * COLUMNS, p.columns); column += COLUMNS) {
      const float* w[COLUMNS];
      for (int j = 0; j < COLUMNS; j++) {  // repeats the last column if fewer
        w[j] = p.weight + least(column + j, p.columns - 1) * p.depth;
      }
      const float* next = w[COLUMNS - 1] + p.depth;
      for (int64_t row = first; row < last; row += ROWS) {
        switch (least(last - row, ROWS)) {
          case 6:
            tile<6>(p, row, column, w, next);
            break;
          case 5:
            tile<5>(p, row, column, w, next);
            break;
          case 4:
            tile<4>(p, row, column, w, next);
            break;
          case 3:
            tile<3>(p, row, column, w, next);
            break;
          case 2:
            tile<2>(p, row, column, w, next);
            break;
          default:
            tile<1>(p, row, column, w, next);
        }
      }
    }
  }
}

#ifndef __clang__
#pragma GCC pop_options
#endif

bool has_avx512() {
#ifdef __clang__
  return true;
#else
  static const bool found = __builtin_cpu_supports("x86-64-v4");
  return found;
#endif
}

bool by_intel() {
  static const bool found = __builtin_cpu_is("intel");
  return found;
}

#else

void multiply_columns(const Product&, int64_t, int64_t) {}

bool has_avx512() {
  return false;
}

bool by_intel() {
  return false;
}
#endif

}  // namespace

// Whether the processor has AVX-512 and was not made by Intel. MKL runs AVX2 code there.
bool other_avx512() {
  return has_avx512() && !by_intel();
}

// x (R, K), weight (N, K), bias (N) -> (R, N)
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_float(x, "x", 2);
  check_float(weight, "weight", 2);
  STD_TORCH_CHECK(weight.size(1) == x.size(1), "weight must have ", x.size(1), " columns, as x, got ", weight.size(1));
  if (bias) {
    check_float(*bias, "bias", 1);
    STD_TORCH_CHECK(bias->size(0) == weight.size(0), "bias must have ", weight.size(0), " elements, got ",
                    bias->size(0));
  }
  if (!has_avx512()) {
    return library_linear(x, weight, bias);
  }
  const int64_t rows = x.size(0), columns = weight.size(0), depth = x.size(1);
  const Tensor from = torch::stable::contiguous(x), by = torch::stable::contiguous(weight);
  const Tensor offset = bias ? torch::stable::contiguous(*bias) : by;
  Tensor out = torch::stable::new_empty(x, {rows, columns});
  const Product p{
      .x = from.const_data_ptr<float>(),
      .weight = by.const_data_ptr<float>(),
      .bias = bias ? offset.const_data_ptr<float>() : nullptr,
      .y = out.mutable_data_ptr<float>(),
      .rows = rows,
      .depth = depth,
      .columns = columns,
  };
  torch::stable::parallel_for(0, (columns + COLUMNS - 1) / COLUMNS, grain(COLUMNS * depth * rows),
                              [&p](int64_t begin, int64_t end) { multiply_columns(p, begin, end); });
  return out;
}

// `linear`, or that of the library where it is faster.
Tensor fastest_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return x.size(0) <= FEW_ROWS || other_avx512() ? linear(x, weight, bias) : library_linear(x, weight, bias);
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CompositeExplicitAutograd, m) {
  m.impl("other_avx512", TORCH_BOX(&other_avx512));
}

}  // namespace nlgrpo
