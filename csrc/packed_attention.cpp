// Causal attention over packed sequences that share prefixes, and its gradient. Heads are rotated here, scores never
// leave the cache, and the keys of a prefix are prepared once for all segments that continue it.
#include "rotary.h"
#include "small_products.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

namespace nlgrpo {
namespace {

// A block of scores has up to ROWS queries and KEYS keys: 6 KiB. TILE keys are stored side by side, transposed.
constexpr int64_t ROWS = 24, KEYS = 64, TILE = 16;

// Consecutive tokens that belong together. `keys`: where its keys are among those of its group.
struct Segment {
  int64_t start, length, offset;  // offset: position of its first token in its sequence
  int64_t keys;
};

// A segment without a prefix, and those that continue it: [begin, end) of the segments.
struct Group {
  int64_t begin, end;
  int64_t keys;  // number of keys, with padding
};

struct Layout {
  std::vector<Segment> segments;
  std::vector<Group> groups;
};

struct Inputs {
  int64_t heads, kv_heads, dim, half;
  const float *qkv, *cos, *sin;  // qkv (T, heads + 2 kv_heads, dim); cos, sin (T, half)
  float scale;
  int64_t window;  // maximum number of tokens that a token sees, 0: all

  int64_t width() const { return (heads + 2 * kv_heads) * dim; }
  // Rows of all matrices in the cache are padded with zeros to a multiple of 8.
  int64_t padded() const { return (dim + 7) / 8 * 8; }
  int64_t kv_head(int64_t head) const { return head / (heads / kv_heads); }
  const float* query(int64_t token, int64_t head) const { return qkv + token * width() + head * dim; }
  const float* key(int64_t token, int64_t head) const { return query(token, heads + kv_head(head)); }
  const float* value(int64_t token, int64_t head) const { return key(token, head) + kv_heads * dim; }
};

int64_t padded_keys(int64_t length) {
  return (length + TILE - 1) / TILE * TILE;
}

// Memory for the matrices of one head, cleared.
class Scratch {
 public:
  explicit Scratch(int64_t size) : memory_(static_cast<size_t>(size), 0.0f) {}
  float* take(int64_t size) {
    float* at = memory_.data() + used_;
    used_ += size;
    return at;
  }

 private:
  std::vector<float> memory_;
  int64_t used_ = 0;
};

// Write x as column `i` of transposed tiles of TILE keys.
NLGRPO_INLINE void transpose(const float* x, float* tiles, int64_t i, const Inputs& in) {
  float* column = tiles + i / TILE * TILE * in.padded() + i % TILE;
  for (int64_t j = 0; j < in.dim; j++) {
    column[j * TILE] = x[j];
  }
}

// A block of scores. Query i of `rows`, at `position` + i, sees the keys [lowest(i), highest(i)) of `keys`.
struct Block {
  const Segment& segment;
  int64_t row, rows;  // first query of the segment, number of queries
  int64_t key, keys;  // first key among those of the group, number of keys
  int64_t position;   // of the first query, relative to the first key
  int64_t window;

  int64_t lowest(int64_t i) const {
    return window == 0 ? 0 : std::clamp<int64_t>(position + i + 1 - window, 0, keys);
  }
  int64_t highest(int64_t i) const { return std::clamp<int64_t>(position + i + 1, 0, keys); }
};

// For each block of queries, call begin(segment, row, rows), then visit(block) for each block of keys that it sees, first
// those of the prefix, then finish(segment, row, rows). A segment is divided into equal blocks, of a multiple of 6 rows.
template <typename Begin, typename Visit, typename Finish>
NLGRPO_INLINE void for_each_block(const Layout& layout, const Group& group, int64_t window, Begin begin, Visit visit,
                                  Finish finish) {
  const Segment& prefix = layout.segments[group.begin];
  for (int64_t s = group.begin; s < group.end; s++) {
    const Segment& segment = layout.segments[s];
    const int64_t blocks = (segment.length + ROWS - 1) / ROWS;
    const int64_t most = blocks == 0 ? 0 : ((segment.length + blocks - 1) / blocks + 5) / 6 * 6;
    for (int64_t row = 0; row < segment.length; row += most) {
      const int64_t rows = std::min(most, segment.length - row);
      begin(segment, row, rows);
      for (int part = s == group.begin ? 1 : 0; part < 2; part++) {
        const Segment& source = part == 0 ? prefix : segment;
        const int64_t count = part == 0 ? prefix.length : row + rows;
        const int64_t position = segment.offset + row - source.offset;  // of the first query from the first key
        const int64_t oldest = window == 0 ? 0 : std::max<int64_t>(0, position + 1 - window);
        for (int64_t key = oldest / TILE * TILE; key < count; key += KEYS) {
          visit(Block{segment, row, rows, source.keys + key, std::min(KEYS, count - key), position - key, window});
        }
      }
      finish(segment, row, rows);
    }
  }
}

// scores (rows, KEYS) = queries (rows, dim) keys^T
NLGRPO_INLINE void multiply(const Block& block, const float* queries, const float* tiles, float* scores,
                            const Inputs& in) {
  for (int64_t j = 0; j < block.keys; j += TILE) {
    product<false>(block.rows, TILE, queries, {in.padded(), 1}, in.dim, tiles + (block.key + j) * in.padded(), TILE,
                   scores + j, KEYS);
  }
}

NLGRPO_INLINE void rotate_token(const Inputs& in, int64_t token, const float* x, float factor, float* to,
                                float sign = 1) {
  rotate(x, in.cos + token * in.half, in.sin + token * in.half, in.half, factor, to, in.dim, sign);
}

}  // namespace

// One query head of a group: out (T, heads, dim), lse (T, heads).
NLGRPO_CLONES void packed_forward_head(const Inputs& in, const Layout& layout, const Group& group, int64_t head,
                                       float* out, float* lse) {
  const int64_t D = in.padded();
  Scratch scratch(2 * group.keys * D + 2 * ROWS * D + ROWS * KEYS + 2 * ROWS);
  float *tiles = scratch.take(group.keys * D), *values = scratch.take(group.keys * D);
  float *queries = scratch.take(ROWS * D), *mixed = scratch.take(ROWS * D), *scores = scratch.take(ROWS * KEYS);
  float *top = scratch.take(ROWS), *sum = scratch.take(ROWS);
  for (int64_t s = group.begin; s < group.end; s++) {
    const Segment& segment = layout.segments[s];
    for (int64_t i = 0; i < segment.length; i++) {
      const int64_t token = segment.start + i;
      rotate_token(in, token, in.key(token, head), 1, queries);
      transpose(queries, tiles, segment.keys + i, in);
      std::copy_n(in.value(token, head), in.dim, values + (segment.keys + i) * D);
    }
  }
  const auto begin = [&](const Segment& segment, int64_t row, int64_t rows) __attribute__((always_inline)) {
    for (int64_t i = 0; i < rows; i++) {
      const int64_t token = segment.start + row + i;
      rotate_token(in, token, in.query(token, head), in.scale, queries + i * D);
    }
    std::fill_n(mixed, rows * D, 0.0f);
    std::fill_n(top, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(sum, rows, 0.0f);
  };
  // The softmax is computed block by block: earlier sums are scaled when a later block has a larger score.
  const auto visit = [&](const Block& block) __attribute__((always_inline)) {
    multiply(block, queries, tiles, scores, in);
    for (int64_t i = 0; i < block.rows; i++) {
      float* score = scores + i * KEYS;
      const int64_t low = block.lowest(i), high = block.highest(i);
      float largest = top[i], total = 0;
#pragma omp simd reduction(max : largest)
      for (int64_t c = low; c < high; c++) {
        largest = score[c] > largest ? score[c] : largest;
      }
      std::fill(score, score + low, 0.0f);
#pragma omp simd reduction(+ : total)
      for (int64_t c = low; c < high; c++) {
        score[c] = exponential(score[c] - largest);
        total += score[c];
      }
      std::fill(score + std::max(low, high), score + block.keys, 0.0f);
      if (largest != top[i]) {
        const float factor = sum[i] == 0 ? 0.0f : exponential(top[i] - largest);
        for (int64_t j = 0; j < D; j++) {
          mixed[i * D + j] *= factor;
        }
        sum[i] *= factor;
        top[i] = largest;
      }
      sum[i] += total;
    }
    product<true>(block.rows, D, scores, {KEYS, 1}, block.keys, values + block.key * D, D, mixed, D);
  };
  const auto finish = [&](const Segment& segment, int64_t row, int64_t rows) __attribute__((always_inline)) {
    for (int64_t i = 0; i < rows; i++) {
      const int64_t at = (segment.start + row + i) * in.heads + head;
      const float factor = 1 / sum[i];
      for (int64_t j = 0; j < in.dim; j++) {
        out[at * in.dim + j] = mixed[i * D + j] * factor;
      }
      lse[at] = top[i] + std::log(sum[i]);
    }
  };
  for_each_block(layout, group, in.window, begin, visit, finish);
}

// Gradient of one query head of a group, from `grad` and `out` (T, heads, dim) and `lse` (T, heads). `query_grad` has the
// layout of qkv. The gradients of the head's keys and values, from this query head only, are rows of `row_stride`
// elements.
//
//   dv = p^T g,   ds = p (g v^T - sum(g out)),   dq = ds k,   dk = ds^T q,   p = exp(q k^T - lse)
NLGRPO_CLONES void packed_backward_head(const Inputs& in, const Layout& layout, const Group& group, int64_t head,
                                        const float* grad, const float* out, const float* lse, float* query_grad,
                                        float* key_grad, float* value_grad, int64_t row_stride) {
  const int64_t D = in.padded();
  Scratch scratch(5 * group.keys * D + 3 * ROWS * D + 2 * ROWS * KEYS + ROWS);
  float *key_tiles = scratch.take(group.keys * D), *value_tiles = scratch.take(group.keys * D);
  float *keys = scratch.take(group.keys * D), *by_key = scratch.take(group.keys * D);
  float *by_value = scratch.take(group.keys * D), *queries = scratch.take(ROWS * D), *upstream = scratch.take(ROWS * D);
  float *by_query = scratch.take(ROWS * D), *scores = scratch.take(ROWS * KEYS), *slopes = scratch.take(ROWS * KEYS);
  float* delta = scratch.take(ROWS);
  for (int64_t s = group.begin; s < group.end; s++) {
    const Segment& segment = layout.segments[s];
    for (int64_t i = 0; i < segment.length; i++) {
      const int64_t token = segment.start + i, at = segment.keys + i;
      rotate_token(in, token, in.key(token, head), 1, keys + at * D);
      transpose(keys + at * D, key_tiles, at, in);
      transpose(in.value(token, head), value_tiles, at, in);
    }
  }
  const auto begin = [&](const Segment& segment, int64_t row, int64_t rows) __attribute__((always_inline)) {
    for (int64_t i = 0; i < rows; i++) {
      const int64_t token = segment.start + row + i, at = (token * in.heads + head) * in.dim;
      rotate_token(in, token, in.query(token, head), in.scale, queries + i * D);
      std::copy_n(grad + at, in.dim, upstream + i * D);
      float product = 0;
#pragma omp simd reduction(+ : product)
      for (int64_t j = 0; j < in.dim; j++) {
        product += grad[at + j] * out[at + j];
      }
      delta[i] = product;
    }
    std::fill_n(by_query, rows * D, 0.0f);
  };
  const auto visit = [&](const Block& block) __attribute__((always_inline)) {
    multiply(block, queries, key_tiles, scores, in);
    multiply(block, upstream, value_tiles, slopes, in);
    for (int64_t i = 0; i < block.rows; i++) {
      float *score = scores + i * KEYS, *slope = slopes + i * KEYS;
      const int64_t low = block.lowest(i), high = std::max(low, block.highest(i));
      const float total = lse[(block.segment.start + block.row + i) * in.heads + head];
      std::fill(score, score + low, 0.0f);
      std::fill(slope, slope + low, 0.0f);
#pragma omp simd
      for (int64_t c = low; c < high; c++) {
        score[c] = exponential(score[c] - total);
        slope[c] = score[c] * (slope[c] - delta[i]);
      }
      std::fill(score + high, score + block.keys, 0.0f);
      std::fill(slope + high, slope + block.keys, 0.0f);
    }
    product<true>(block.rows, D, slopes, {KEYS, 1}, block.keys, keys + block.key * D, D, by_query, D);
    product<true>(block.keys, D, slopes, {1, KEYS}, block.rows, queries, D, by_key + block.key * D, D);
    product<true>(block.keys, D, scores, {1, KEYS}, block.rows, upstream, D, by_value + block.key * D, D);
  };
  const auto finish = [&](const Segment& segment, int64_t row, int64_t rows) __attribute__((always_inline)) {
    for (int64_t i = 0; i < rows; i++) {
      const int64_t token = segment.start + row + i;
      rotate_token(in, token, by_query + i * D, in.scale, query_grad + token * in.width() + head * in.dim, -1);
    }
  };
  for_each_block(layout, group, in.window, begin, visit, finish);
  for (int64_t s = group.begin; s < group.end; s++) {
    const Segment& segment = layout.segments[s];
    for (int64_t i = 0; i < segment.length; i++) {
      const int64_t token = segment.start + i, at = segment.keys + i;
      rotate_token(in, token, by_key + at * D, 1, key_grad + token * row_stride, -1);
      std::copy_n(by_value + at * D, in.dim, value_grad + token * row_stride);
    }
  }
}

namespace {

// Read segments (S, 2): number of tokens of each segment, and the segment that it continues, or -1.
Layout layout_of(const Tensor& segments, int64_t tokens) {
  STD_TORCH_CHECK(segments.is_cpu() && segments.scalar_type() == torch::headeronly::ScalarType::Long &&
                      segments.dim() == 2 && segments.size(1) == 2,
                  "segments must be (S, 2), int64, on the CPU");
  const Tensor rows = torch::stable::contiguous(segments);
  const int64_t* row = rows.const_data_ptr<int64_t>();
  Layout layout;
  int64_t start = 0;
  for (int64_t s = 0; s < rows.size(0); s++) {
    const int64_t length = row[2 * s], prefix = row[2 * s + 1];
    const bool alone = prefix == -1;
    STD_TORCH_CHECK(length >= 0, "segment ", s, " has the length ", length);
    STD_TORCH_CHECK(length <= tokens - start, "the lengths up to that of segment ", s, " add up to more than the ",
                    tokens, " tokens of qkv");
    STD_TORCH_CHECK(alone || (s > 0 && prefix == layout.groups.back().begin), "segment ", s, " continues segment ",
                    prefix, "; expected -1, or the last segment before it that continues none");
    if (alone) {
      layout.groups.push_back({.begin = s, .end = s, .keys = 0});
    }
    Group& group = layout.groups.back();
    layout.segments.push_back({start, length, alone ? 0 : layout.segments[group.begin].length, group.keys});
    group.end = s + 1;
    group.keys += padded_keys(length);
    start += length;
  }
  STD_TORCH_CHECK(start == tokens, "the lengths add up to ", start, ", but qkv has ", tokens, " tokens");
  return layout;
}

// Inputs and the tensors that its pointers refer to.
struct Prepared {
  Tensor qkv;
  std::optional<Tensor> cos, sin;
  Inputs in;
};

Prepared prepare(const Tensor& qkv, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, int64_t window,
                 double scale, int64_t heads) {
  const int64_t kv_heads = check_heads(qkv, cos, sin, heads);
  check_window(window);
  Prepared p{.qkv = torch::stable::contiguous(qkv), .cos = contiguous(cos), .sin = contiguous(sin), .in = {}};
  p.in = {
      .heads = heads,
      .kv_heads = kv_heads,
      .dim = qkv.size(2),
      .half = cos.has_value() ? cos->size(1) : 0,
      .qkv = p.qkv.const_data_ptr<float>(),
      .cos = cos.has_value() ? p.cos->const_data_ptr<float>() : nullptr,
      .sin = sin.has_value() ? p.sin->const_data_ptr<float>() : nullptr,
      .scale = static_cast<float>(scale),
      .window = std::min(window, qkv.size(0)),
  };
  return p;
}

// A query head of a group is one task, so that the number of threads does not change the result.
template <typename Task>
void for_each_head(const Inputs& in, const Layout& layout, Task task) {
  const int64_t count = static_cast<int64_t>(layout.groups.size()) * in.heads;
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      task(layout.groups[i / in.heads], i % in.heads);
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor> packed_attention(const Tensor& qkv, const std::optional<Tensor>& cos,
                                            const std::optional<Tensor>& sin, const Tensor& segments,
                                            int64_t window, double scale, int64_t heads) {
  const Prepared p = prepare(qkv, cos, sin, window, scale, heads);
  const Layout layout = layout_of(segments, qkv.size(0));
  Tensor out = torch::stable::new_empty(qkv, {qkv.size(0), heads, qkv.size(2)});
  Tensor lse = torch::stable::new_empty(qkv, {qkv.size(0), heads});
  float *to = out.mutable_data_ptr<float>(), *sums = lse.mutable_data_ptr<float>();
  for_each_head(p.in, layout, [&](const Group& group, int64_t head) {
    packed_forward_head(p.in, layout, group, head, to, sums);
  });
  return {out, lse};
}

Tensor packed_attention_backward(const Tensor& grad, const Tensor& qkv, const std::optional<Tensor>& cos,
                                 const std::optional<Tensor>& sin, const Tensor& out, const Tensor& lse,
                                 const Tensor& segments, int64_t window, double scale, int64_t heads) {
  const Prepared p = prepare(qkv, cos, sin, window, scale, heads);
  const Inputs& in = p.in;
  const Layout layout = layout_of(segments, qkv.size(0));
  const int64_t tokens = qkv.size(0), dim = in.dim;
  for (const auto& [x, name] : {std::pair{&grad, "grad"}, {&out, "out"}}) {
    check_float(*x, name, 3);
    STD_TORCH_CHECK(x->size(0) == tokens && x->size(1) == heads && x->size(2) == dim, name, " must be (", tokens, ", ",
                    heads, ", ", dim, ")");
  }
  check_float(lse, "lse", 2);
  STD_TORCH_CHECK(lse.size(0) == tokens && lse.size(1) == heads, "lse must be (", tokens, ", ", heads, ")");
  const Tensor upstream = torch::stable::contiguous(grad), mixed = torch::stable::contiguous(out),
               sums = torch::stable::contiguous(lse);
  const float *g = upstream.const_data_ptr<float>(), *o = mixed.const_data_ptr<float>(),
              *l = sums.const_data_ptr<float>();
  Tensor result = torch::stable::new_empty(qkv, {tokens, qkv.size(1), dim});
  if (result.numel() == 0) {
    return result;
  }
  float* to = result.mutable_data_ptr<float>();
  const int64_t shared = heads / in.kv_heads;
  if (shared == 1) {
    for_each_head(in, layout, [&](const Group& group, int64_t head) {
      float* key = to + (heads + head) * dim;
      packed_backward_head(in, layout, group, head, g, o, l, to, key, key + heads * dim, in.width());
    });
    return result;
  }
  // Each query head computes gradients of its key and value, which are summed afterwards in a fixed order.
  Tensor parts = torch::stable::new_empty(qkv, {tokens, 2 * heads, dim});
  float* part = parts.mutable_data_ptr<float>();
  for_each_head(in, layout, [&](const Group& group, int64_t head) {
    float* key = part + head * dim;
    packed_backward_head(in, layout, group, head, g, o, l, to, key, key + heads * dim, 2 * heads * dim);
  });
  torch::stable::parallel_for(0, tokens, grain(2 * heads * dim), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * 2 * in.kv_heads; i < end * 2 * in.kv_heads; i++) {
      const int64_t token = i / (2 * in.kv_heads), head = i % (2 * in.kv_heads);
      float* sum = to + token * in.width() + (heads + head) * dim;
      const float* each = part + (token * 2 * heads + head * shared) * dim;
      std::copy_n(each, dim, sum);
      for (int64_t h = 1; h < shared; h++) {
        for (int64_t j = 0; j < dim; j++) {
          sum[j] += each[h * dim + j];
        }
      }
    }
  });
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(nlgrpo, CPU, m) {
  m.impl("packed_attention", TORCH_BOX(&packed_attention));
  m.impl("packed_attention_backward", TORCH_BOX(&packed_attention_backward));
}

}  // namespace nlgrpo
