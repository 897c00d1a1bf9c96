// Cached decoding: rotate q and k of new tokens, write k and v to the cache, attend. The keys of a row are in two caches:
// that of its prompt, which many rows share, and its own.
#include "ops.h"
#include "rotary.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

namespace nlgrpo {
namespace {

// Keys, then values: (2, rows, kv_heads, columns, dim). `values`: from a key to its value. Strides are in elements; the
// last dimension has stride 1.
template <typename T>
struct Cache {
  T* at = nullptr;
  int64_t values = 0, row_stride = 0, head_stride = 0, column_stride = 0;
};

// The cache in x, at `at`. Without elements `at` is null, so that all strides must be 0.
template <typename T>
Cache<T> cache_of(const Tensor& x, T* at) {
  return at == nullptr ? Cache<T>{} : Cache<T>{at, x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

// Inputs and outputs of a decoding step of R rows with n new tokens each.
struct Step {
  int64_t heads, kv_heads, dim, half, tokens;  // half: number of rotated pairs per head, may be 0; tokens: n
  const float *qkv, *cos, *sin;                // qkv (R n, heads + 2 kv_heads, dim); cos, sin (R n, half)
  Cache<float> own;                            // cache of each row; the new tokens go to `column`, `column + 1`, ..
  int64_t column;
  float* out;      // (R n, heads, dim)
  int64_t window;  // maximum number of positions that a token sees, 0: all
  float scale;
  Cache<const float> prompts = {};                      // (2, P, ..)
  const int64_t *prompt = nullptr, *lengths = nullptr;  // (R) prompt of each row; (P) columns of each prompt
  const int64_t *order = nullptr, *starts = nullptr;    // (R) rows by prompt; (P + 1) where those of each prompt start
};

// Consecutive columns that a query sees.
struct Span {
  const float *keys, *values;
  int64_t stride, columns;
};

NLGRPO_INLINE void rotate_token(const float* x, const Step& s, int64_t token, float factor, float* to, int64_t dim) {
  rotate(x, s.cos + token * s.half, s.sin + token * s.half, s.half, factor, to, dim);
}

typedef float Four __attribute__((vector_size(16)));

// score_c = q k_c, for four columns at a time, whose vectors of partial sums are reduced together. Reducing each one
// separately, as `omp simd reduction` does, takes longer than the products of a short head.
NLGRPO_INLINE void multiply_keys(const float* q, const float* keys, int64_t stride, int64_t columns, float* score,
                                 int64_t dim) {
  const int64_t whole = dim / 8 * 8;
  for (int64_t c = 0; c < columns; c += 4) {
    const int64_t here = std::min<int64_t>(4, columns - c);
    Four part[4] = {};
    for (int64_t i = 0; i < 4; i++) {
      const float* k = keys + (c + std::min(i, here - 1)) * stride;  // repeats the last column if fewer
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

// sum_j += sum_c score_c v_cj for `width` consecutive j, over four columns.
template <int64_t width>
NLGRPO_INLINE void add_four(const float* score, const float* const* value, float* sum) {
  const float *v0 = value[0], *v1 = value[1], *v2 = value[2], *v3 = value[3];
  const float s0 = score[0], s1 = score[1], s2 = score[2], s3 = score[3];
#pragma omp simd
  for (int64_t j = 0; j < width; j++) {
    sum[j] += (s0 * v0[j] + s1 * v1[j]) + (s2 * v2[j] + s3 * v3[j]);
  }
}

// out_j = factor sum_c score_c v_cj over the columns of both spans, for j in [from, from + width). The sums stay in
// registers. Columns are added in fours, also across the end of the prompt, so that the sum does not depend on where a
// sequence is divided.
template <int64_t width>
NLGRPO_INLINE void mix_values(const float* score, const Span& prompt, const Span& own, int64_t from, float factor,
                              float* out) {
  float sum[width] = {};
  const auto column = [&](int64_t c) __attribute__((always_inline)) {
    return from + (c < prompt.columns ? prompt.values + c * prompt.stride
                                      : own.values + (c - prompt.columns) * own.stride);
  };
  const auto add = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
    for (int64_t c = begin; c < end; c += 4) {
      const float* const four[] = {column(c), column(c + 1), column(c + 2), column(c + 3)};
      add_four<width>(score + c, four, sum);
    }
  };
  const int64_t columns = prompt.columns + own.columns, whole = columns / 4 * 4;
  const int64_t shared = prompt.columns / 4 * 4;
  for (int64_t c = 0; c < shared; c += 4) {
    const float* v = prompt.values + c * prompt.stride + from;
    const float* const four[] = {v, v + prompt.stride, v + 2 * prompt.stride, v + 3 * prompt.stride};
    add_four<width>(score + c, four, sum);
  }
  const int64_t border = std::min(whole, shared < prompt.columns ? shared + 4 : shared);
  add(shared, border);
  for (int64_t c = border; c < whole; c += 4) {
    const float* v = own.values + (c - prompt.columns) * own.stride + from;
    const float* const four[] = {v, v + own.stride, v + 2 * own.stride, v + 3 * own.stride};
    add_four<width>(score + c, four, sum);
  }
  for (int64_t c = whole; c < columns; c++) {
    const float* v = column(c);
#pragma omp simd
    for (int64_t j = 0; j < width; j++) {
      sum[j] += score[c] * v[j];
    }
  }
  for (int64_t j = 0; j < width; j++) {
    out[from + j] = sum[j] * factor;
  }
}

// softmax(q k^T) v of one query over the columns of both spans. `score` has one element per column.
NLGRPO_INLINE void attend(const float* q, const Span& prompt, const Span& own, float* score, float* out, int64_t dim) {
  const int64_t columns = prompt.columns + own.columns;
  multiply_keys(q, prompt.keys, prompt.stride, prompt.columns, score, dim);
  multiply_keys(q, own.keys, own.stride, own.columns, score + prompt.columns, dim);
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
    mix_values<64>(score, prompt, own, j, 1 / sum, out);
  }
  for (; j + 32 <= dim; j += 32) {
    mix_values<32>(score, prompt, own, j, 1 / sum, out);
  }
  for (; j + 16 <= dim; j += 16) {
    mix_values<16>(score, prompt, own, j, 1 / sum, out);
  }
  for (; j < dim; j++) {
    mix_values<1>(score, prompt, own, j, 1 / sum, out);
  }
}

// Columns [begin, end) of a row of the cache, for one key head.
template <typename T>
NLGRPO_INLINE Span columns(const Cache<T>& cache, int64_t row, int64_t head, int64_t begin, int64_t end) {
  const float* keys = cache.at + row * cache.row_stride + head * cache.head_stride + begin * cache.column_stride;
  return {keys, keys + cache.values, cache.column_stride, end - begin};
}

// One key head of one row: write the keys and values of its new tokens, and attend with the query heads that share it.
// `dim` is s.dim; it is an argument so that the compiler can unroll the loops if it is a constant.
NLGRPO_INLINE void key_head(const Step& s, int64_t row, int64_t head, float* scratch, int64_t dim) {
  const int64_t width = (s.heads + 2 * s.kv_heads) * dim, group = s.heads / s.kv_heads;
  float* keys = s.own.at + row * s.own.row_stride + head * s.own.head_stride + s.column * s.own.column_stride;
  float* values = keys + s.own.values;
  for (int64_t t = 0; t < s.tokens; t++) {
    const int64_t token = row * s.tokens + t;
    const float* k = s.qkv + token * width + (s.heads + head) * dim;
    rotate_token(k, s, token, 1.0f, keys + t * s.own.column_stride, dim);
    std::copy_n(k + s.kv_heads * dim, dim, values + t * s.own.column_stride);
  }
  const int64_t source = s.prompt[row], length = s.lengths[source];
  float *query = scratch, *score = scratch + dim;
  for (int64_t t = 0; t < s.tokens; t++) {
    const int64_t token = row * s.tokens + t, column = s.column + t;
    const int64_t oldest = s.window == 0 ? 0 : std::max<int64_t>(0, length + column + 1 - s.window);
    const int64_t begin = std::max<int64_t>(oldest - length, 0);
    const Span prompt = columns(s.prompts, source, head, std::min(oldest, length), length);
    const Span own = columns(s.own, row, head, begin, column + 1);
    for (int64_t h = head * group; h < (head + 1) * group; h++) {
      rotate_token(s.qkv + token * width + h * dim, s, token, s.scale, query, dim);
      attend(query, prompt, own, score, s.out + (token * s.heads + h) * dim, dim);
    }
  }
}

// A key head of a row.
struct Task {
  int64_t row, head;
};

// Task i, in an order in which the rows of a prompt read a head of it one after another, from the processor's cache.
// `prompt` is that of task i or an earlier one.
NLGRPO_INLINE Task task(const Step& s, int64_t i, int64_t& prompt) {
  while (i >= s.starts[prompt + 1] * s.kv_heads) {
    prompt++;
  }
  const int64_t first = s.starts[prompt], rows = s.starts[prompt + 1] - first, here = i - first * s.kv_heads;
  return {s.order[first + here % rows], here / rows};
}

// Fetch the row's own keys and values, which are too far apart for the processor to expect them.
NLGRPO_INLINE void prefetch(const Step& s, Task t) {
  const float* keys = s.own.at + t.row * s.own.row_stride + t.head * s.own.head_stride;
  for (const float* from : {keys, keys + s.own.values}) {
    for (int64_t i = 0; i < s.column * s.own.column_stride; i += 16) {
      __builtin_prefetch(from + i, 0, 2);
    }
  }
}

template <int64_t dim>
NLGRPO_INLINE void key_heads(const Step& s, int64_t begin, int64_t end, float* scratch) {
  int64_t prompt = 0;
  for (int64_t i = begin; i < end; i++) {
    const Task now = task(s, i, prompt);
    if (i + 1 < end) {
      prefetch(s, task(s, i + 1, prompt));
    }
    key_head(s, now.row, now.head, scratch, dim ? dim : s.dim);
  }
}

}  // namespace

NLGRPO_CLONES void branch_key_heads(const Step& s, int64_t begin, int64_t end, float* scratch) {
  switch (s.dim) {
    case 16:
      return key_heads<16>(s, begin, end, scratch);
    case 32:
      return key_heads<32>(s, begin, end, scratch);
    case 64:
      return key_heads<64>(s, begin, end, scratch);
    case 128:
      return key_heads<128>(s, begin, end, scratch);
    default:
      return key_heads<0>(s, begin, end, scratch);
  }
}

namespace {

// Check the shapes of qkv (R n, H + 2 Hk, d), cos and sin (R n, r / 2), and cache (2, R, Hk, columns, d).
void check(const Tensor& qkv, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& cache,
           int64_t column, int64_t tokens, int64_t window, int64_t heads) {
  check_float(cache, "cache", 5);
  const int64_t kv_heads = check_heads(qkv, cos, sin, heads), all = qkv.size(0), rows = cache.size(1);
  STD_TORCH_CHECK(cache.size(0) == 2 && all == rows * tokens && cache.size(2) == kv_heads &&
                      cache.size(4) == qkv.size(2),
                  "cache must be (2, ", tokens == 0 ? 0 : all / tokens, ", ", kv_heads, ", columns, ", qkv.size(2),
                  "), got (", cache.size(0), ", ", rows, ", ", cache.size(2), ", ", cache.size(3), ", ", cache.size(4),
                  ")");
  STD_TORCH_CHECK(cache.stride(4) == 1, "cache must be contiguous along its last dimension");
  const int64_t last = column < cache.size(3) ? column + std::max<int64_t>(tokens, 1) - 1 : column;
  STD_TORCH_CHECK(column >= 0 && last < cache.size(3), "column ", column < 0 ? column : last,
                  " is outside the cache, which has columns = ", cache.size(3));
  check_window(window);
}

// Check that x contains `size` integers; with a bound, that they are in [0, bound].
void check_index(const Tensor& x, const char* name, int64_t size, std::optional<int64_t> bound = std::nullopt) {
  STD_TORCH_CHECK(x.is_cpu() && x.scalar_type() == torch::headeronly::ScalarType::Long && x.dim() == 1 &&
                      x.size(0) == size,
                  name, " must be (", size, ",), int64, on the CPU");
  const int64_t* at = x.const_data_ptr<int64_t>();
  for (int64_t i = 0; bound.has_value() && i < size; i++) {
    STD_TORCH_CHECK(at[i] >= 0 && at[i] <= *bound, name, "[", i, "] is ", at[i], "; allowed is 0 to ", *bound);
  }
}

// Rows (R) in the order of their prompts, and where the rows of each of P prompts start (P + 1).
struct RowsByPrompt {
  RowsByPrompt(const int64_t* prompt, int64_t rows, int64_t prompts)
      : order(static_cast<size_t>(rows)), starts(static_cast<size_t>(prompts + 1)) {
    for (int64_t row = 0; row < rows; row++) {
      starts[prompt[row] + 1]++;
    }
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t row = 0; row < rows; row++) {
      order[next[prompt[row]]++] = row;
    }
  }

  std::vector<int64_t> order, starts;
};

// A step and the tensors that its pointers refer to.
struct Prepared {
  Tensor qkv, out;
  std::optional<Tensor> cos, sin;
  Step step;
};

Prepared prepare(const Tensor& qkv, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, Tensor& own,
                 int64_t column, int64_t tokens, int64_t window, double scale, int64_t heads) {
  check(qkv, cos, sin, own, column, tokens, window, heads);
  Prepared p{
      .qkv = torch::stable::contiguous(qkv),
      .out = torch::stable::new_empty(qkv, {qkv.size(0), heads, qkv.size(2)}),
      .cos = contiguous(cos),
      .sin = contiguous(sin),
      .step = {},
  };
  p.step = {
      .heads = heads,
      .kv_heads = own.size(2),
      .dim = qkv.size(2),
      .half = cos.has_value() ? cos->size(1) : 0,
      .tokens = tokens,
      .qkv = p.qkv.const_data_ptr<float>(),
      .cos = cos.has_value() ? p.cos->const_data_ptr<float>() : nullptr,
      .sin = sin.has_value() ? p.sin->const_data_ptr<float>() : nullptr,
      .own = cache_of(own, own.mutable_data_ptr<float>()),
      .column = column,
      .out = p.out.mutable_data_ptr<float>(),
      .window = window,
      .scale = static_cast<float>(scale),
  };
  return p;
}

// Each key head of a row is one task, so that the number of threads does not change the result.
// `longest`: largest number of columns of a prompt.
void run(const Step& step, int64_t rows, int64_t longest) {
  const int64_t columns = longest + step.column + step.tokens;
  const int64_t seen = step.window == 0 ? columns : std::min(columns, step.window);
  const int64_t work = 2 * seen * step.dim * (step.heads / step.kv_heads) * step.tokens;
  torch::stable::parallel_for(0, rows * step.kv_heads, grain(work), [&step, columns](int64_t begin, int64_t end) {
    std::vector<float> scratch(static_cast<size_t>(step.dim + columns));
    branch_key_heads(step, begin, end, scratch.data());
  });
}

}  // namespace

Tensor branch_attention(const Tensor& qkv, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                        Tensor own, int64_t column, const Tensor& prompts, const Tensor& lengths, const Tensor& prompt,
                        int64_t window, double scale, int64_t heads) {
  check_float(own, "own", 5);
  const int64_t rows = own.size(1), tokens = rows == 0 ? 0 : qkv.size(0) / rows;
  Prepared p = prepare(qkv, cos, sin, own, column, tokens, window, scale, heads);
  check_float(prompts, "prompts", 5);
  STD_TORCH_CHECK(prompts.size(0) == 2 && prompts.size(2) == own.size(2) && prompts.size(4) == own.size(4) &&
                      prompts.stride(4) == 1,
                  "prompts must be (2, P, ", own.size(2), ", columns, ", own.size(4), "), contiguous along the last ",
                  "dimension");
  const Tensor of = torch::stable::contiguous(prompt), counts = torch::stable::contiguous(lengths);
  check_index(of, "prompt", rows, prompts.size(1) - 1);
  check_index(counts, "lengths", prompts.size(1), prompts.size(3));
  p.step.prompts = cache_of(prompts, prompts.const_data_ptr<float>());
  p.step.prompt = of.const_data_ptr<int64_t>();
  p.step.lengths = counts.const_data_ptr<int64_t>();
  const RowsByPrompt sorted(p.step.prompt, rows, prompts.size(1));
  p.step.order = sorted.order.data();
  p.step.starts = sorted.starts.data();
  run(p.step, rows, prompts.size(3));
  return p.out;
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("branch_attention", TORCH_BOX(&branch_attention));
}

}  // namespace nlgrpo
