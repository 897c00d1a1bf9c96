// One step of cached decoding: rotate q and k, write k and v into the cache, attend.
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace nlgrpo {
namespace {

// Where everything stands; strides in elements, and 1 along a head.
struct Step {
  int64_t heads, kv_heads, dim, half;                      // half: rotated pairs of a head, 0 for none
  const float *qkv, *cos, *sin;                            // qkv (R, heads + 2 kv_heads, dim); cos, sin (R, half)
  float *cache, *out;                                      // out (R, heads, dim)
  int64_t row_stride, head_stride, column_stride, column;  // of the cache (R, 2 kv_heads, columns, dim)
  const int64_t* first;                                    // (R), or null: all columns are seen
  int64_t oldest;                                          // where the window begins
  float scale;
};

// (a, b) -> (a cos - b sin, b cos + a sin) for the halves a, b of the rotated part; `factor` multiplies all.
NLGRPO_INLINE void rotate(const float* x, const Step& s, int64_t row, float factor, float* to, int64_t dim) {
  const float *cos = s.cos + row * s.half, *sin = s.sin + row * s.half;
  for (int64_t j = 0; j < s.half; j++) {
    const float a = x[j], b = x[j + s.half];
    to[j] = (a * cos[j] - b * sin[j]) * factor;
    to[j + s.half] = (b * cos[j] + a * sin[j]) * factor;
  }
  for (int64_t j = 2 * s.half; j < dim; j++) {
    to[j] = x[j] * factor;
  }
}

typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));  // may stand anywhere in memory

// score_c = q k_c. Four columns at a time, whose sums are folded together: folding each one by itself, as a reduction
// over `omp simd` does, takes longer than the products of a short head.
NLGRPO_INLINE void multiply_keys(const float* q, const float* keys, int64_t stride, int64_t columns, float* score,
                                 int64_t dim) {
  const int64_t whole = dim / 8 * 8;
  for (int64_t c = 0; c < columns; c += 4) {
    const int64_t here = std::min<int64_t>(4, columns - c);
    Four part[4] = {};
    for (int64_t i = 0; i < 4; i++) {
      const float* k = keys + (c + std::min(i, here - 1)) * stride;  // the last column again where there is none
      Eight sum = {};
      for (int64_t j = 0; j < whole; j += 8) {
        sum += *reinterpret_cast<const Eight*>(q + j) * *reinterpret_cast<const Eight*>(k + j);
      }
      part[i] = __builtin_shufflevector(sum, sum, 0, 1, 2, 3) + __builtin_shufflevector(sum, sum, 4, 5, 6, 7);
      for (int64_t j = whole; j < dim; j++) {
        part[i][0] += q[j] * k[j];
      }
    }
    const Four low = __builtin_shufflevector(part[0], part[1], 0, 1, 4, 5) +
                     __builtin_shufflevector(part[0], part[1], 2, 3, 6, 7);
    const Four high = __builtin_shufflevector(part[2], part[3], 0, 1, 4, 5) +
                      __builtin_shufflevector(part[2], part[3], 2, 3, 6, 7);
    const Four dot = __builtin_shufflevector(low, high, 0, 2, 4, 6) + __builtin_shufflevector(low, high, 1, 3, 5, 7);
    for (int64_t i = 0; i < here; i++) {
      score[c + i] = dot[i];
    }
  }
}

// out_j = factor sum_c score_c v_cj for `width` neighbouring j, whose sums stay in registers.
template <int64_t width>
NLGRPO_INLINE void add_values(const float* score, const float* values, int64_t stride, int64_t columns, float factor,
                              float* out) {
  float sum[width] = {};
  int64_t c = 0;
  for (; c + 4 <= columns; c += 4) {
    const float *v0 = values + c * stride, *v1 = v0 + stride, *v2 = v1 + stride, *v3 = v2 + stride;
    const float s0 = score[c], s1 = score[c + 1], s2 = score[c + 2], s3 = score[c + 3];
#pragma omp simd
    for (int64_t j = 0; j < width; j++) {
      sum[j] += (s0 * v0[j] + s1 * v1[j]) + (s2 * v2[j] + s3 * v3[j]);
    }
  }
  for (; c < columns; c++) {
#pragma omp simd
    for (int64_t j = 0; j < width; j++) {
      sum[j] += score[c] * values[c * stride + j];
    }
  }
  for (int64_t j = 0; j < width; j++) {
    out[j] = sum[j] * factor;
  }
}

// softmax(q k^T) v of one query; `score` has room for the columns.
NLGRPO_INLINE void attend(const float* q, const float* keys, const float* values, int64_t stride, int64_t columns,
                          float* score, float* out, int64_t dim) {
  multiply_keys(q, keys, stride, columns, score, dim);
  float top = score[0];
#pragma omp simd reduction(max : top)
  for (int64_t c = 0; c < columns; c++) {
    top = score[c] > top ? score[c] : top;
  }
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < columns; c++) {
    score[c] = exponential(score[c] - top);
    sum += score[c];
  }
  int64_t j = 0;
  for (; j + 64 <= dim; j += 64) {
    add_values<64>(score, values + j, stride, columns, 1 / sum, out + j);
  }
  for (; j + 16 <= dim; j += 16) {
    add_values<16>(score, values + j, stride, columns, 1 / sum, out + j);
  }
  for (; j < dim; j++) {
    add_values<1>(score, values + j, stride, columns, 1 / sum, out + j);
  }
}

// All of one key head of one row: its key and value, and the query heads that share them.
// `dim` is s.dim, handed over so that the compiler can unroll the loops where it is a constant.
NLGRPO_INLINE void key_head(const Step& s, int64_t row, int64_t head, float* scratch, int64_t dim) {
  const float* qkv = s.qkv + row * (s.heads + 2 * s.kv_heads) * dim;
  float* keys = s.cache + row * s.row_stride + head * s.head_stride;
  float* values = keys + s.kv_heads * s.head_stride;
  rotate(qkv + (s.heads + head) * dim, s, row, 1.0f, keys + s.column * s.column_stride, dim);
  std::copy_n(qkv + (s.heads + s.kv_heads + head) * dim, dim, values + s.column * s.column_stride);
  // A row sees its own column at least, whatever `first` says.
  const int64_t begin = std::min(std::max(s.oldest, s.first ? s.first[row] : 0), s.column);
  float *query = scratch, *score = scratch + dim;
  const int64_t group = s.heads / s.kv_heads;
  for (int64_t h = head * group; h < (head + 1) * group; h++) {
    rotate(qkv + h * dim, s, row, s.scale, query, dim);
    attend(query, keys + begin * s.column_stride, values + begin * s.column_stride, s.column_stride,
           s.column + 1 - begin, score, s.out + (row * s.heads + h) * dim, dim);
  }
}

template <int64_t dim>
NLGRPO_INLINE void key_heads(const Step& s, int64_t begin, int64_t end, float* scratch) {
  for (int64_t i = begin; i < end; i++) {
    key_head(s, i / s.kv_heads, i % s.kv_heads, scratch, dim ? dim : s.dim);
  }
}

}  // namespace

NLGRPO_CLONES void decode_key_heads(const Step& s, int64_t begin, int64_t end, float* scratch) {
  switch (s.dim) {
    case 16:
      return key_heads<16>(s, begin, end, scratch);
    case 64:
      return key_heads<64>(s, begin, end, scratch);
    case 128:
      return key_heads<128>(s, begin, end, scratch);
    default:
      return key_heads<0>(s, begin, end, scratch);
  }
}

namespace {

void check(const Tensor& qkv, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& cache,
           int64_t column, const std::optional<Tensor>& first, int64_t window, int64_t heads) {
  check_float(qkv, "qkv", 3);
  check_float(cache, "cache", 4);
  const int64_t rows = qkv.size(0), dim = qkv.size(2), kv_heads = (qkv.size(1) - heads) / 2;
  STD_TORCH_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0 && heads + 2 * kv_heads == qkv.size(1),
                  "qkv has ", qkv.size(1), " heads, which are not ", heads, " query heads and as many of keys as of ",
                  "values, a divisor of them");
  STD_TORCH_CHECK(cache.size(0) == rows && cache.size(1) == 2 * kv_heads && cache.size(3) == dim,
                  "cache must be (", rows, ", ", 2 * kv_heads, ", columns, ", dim, "), got (", cache.size(0), ", ",
                  cache.size(1), ", ", cache.size(2), ", ", cache.size(3), ")");
  STD_TORCH_CHECK(cache.stride(3) == 1, "the cache must be contiguous along its last dimension");
  STD_TORCH_CHECK(column >= 0 && column < cache.size(2), "column ", column, " is outside the cache's ", cache.size(2));
  STD_TORCH_CHECK(window >= 0, "window must be 0 (none) or positive, got ", window);
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "cos and sin come together or not at all");
  if (cos.has_value()) {
    check_float(*cos, "cos", 2);
    check_float(*sin, "sin", 2);
    STD_TORCH_CHECK(cos->size(0) == rows && sin->size(0) == rows && cos->size(1) == sin->size(1) &&
                        2 * cos->size(1) <= dim,
                    "cos and sin must be (", rows, ", r / 2) with r at most ", dim);
  }
  if (first.has_value()) {
    STD_TORCH_CHECK(first->is_cpu() && first->scalar_type() == torch::headeronly::ScalarType::Long &&
                        first->dim() == 1 && first->size(0) == rows,
                    "first must be (", rows, ",), int64, on the CPU");
  }
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& x) {
  return x.has_value() ? std::optional(torch::stable::contiguous(*x)) : x;
}

}  // namespace

Tensor decode_attention(const Tensor& qkv, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                        Tensor cache, int64_t column, const std::optional<Tensor>& first, int64_t window, double scale,
                        int64_t heads) {
  check(qkv, cos, sin, cache, column, first, window, heads);
  const int64_t rows = qkv.size(0), dim = qkv.size(2), kv_heads = (qkv.size(1) - heads) / 2;
  const Tensor in = torch::stable::contiguous(qkv);
  const auto turn_cos = contiguous(cos), turn_sin = contiguous(sin), from = contiguous(first);
  Tensor out = torch::stable::new_empty(qkv, {rows, heads, dim});
  const Step step{
      .heads = heads,
      .kv_heads = kv_heads,
      .dim = dim,
      .half = cos.has_value() ? cos->size(1) : 0,
      .qkv = in.const_data_ptr<float>(),
      .cos = cos.has_value() ? turn_cos->const_data_ptr<float>() : nullptr,
      .sin = sin.has_value() ? turn_sin->const_data_ptr<float>() : nullptr,
      .cache = cache.mutable_data_ptr<float>(),
      .out = out.mutable_data_ptr<float>(),
      .row_stride = cache.stride(0),
      .head_stride = cache.stride(1),
      .column_stride = cache.stride(2),
      .column = column,
      .first = first.has_value() ? from->const_data_ptr<int64_t>() : nullptr,
      .oldest = window == 0 ? 0 : std::max<int64_t>(0, column + 1 - window),
      .scale = static_cast<float>(scale),
  };
  // A key head of a row is one task from beginning to end, so that the number of threads does not change the result.
  const int64_t work = 2 * (column + 1 - step.oldest) * dim * (heads / kv_heads);
  torch::stable::parallel_for(0, rows * kv_heads, grain(work), [&step](int64_t begin, int64_t end) {
    std::vector<float> scratch(static_cast<size_t>(step.dim + step.column + 1));
    decode_key_heads(step, begin, end, scratch.data());
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("decode_attention", TORCH_BOX(&decode_attention));
}

}  // namespace nlgrpo
