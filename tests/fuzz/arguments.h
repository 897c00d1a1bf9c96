// Arguments of each op that fit together, so that most cases reach its kernel. An op that is missing here gets arguments
// of any kind.
#pragma once

#include "draw.h"

#include <ATen/core/ivalue.h>

#include <map>
#include <string>

namespace fuzz {

using Arguments = std::vector<c10::IValue>;

// Cosines and sines for `half` pairs of each token, or neither.
inline std::pair<c10::IValue, c10::IValue> rotation(Draw& d, int64_t tokens, int64_t dim) {
  if (d.rarely(3)) {
    return {};
  }
  const int64_t half = d.rarely(2) ? d.within(0, dim / 2) : dim / 2;
  return {d.floats({tokens, half}), d.floats({tokens, half})};
}

inline double temperature(Draw& d) {
  return d.rarely(8) ? d.real() : 0.25 * static_cast<double>(d.within(1, 12));
}
inline double epsilon(Draw& d) {
  return d.rarely(8) ? d.real() : 1e-6;
}
inline int64_t window(Draw& d) {
  return d.rarely(2) ? d.within(1, 90) : 0;
}
// Width of a head: those with code of their own, and others.
inline int64_t head_width(Draw& d) {
  return d.rarely(3) ? d.among(std::array<int64_t, 7>{16, 32, 64, 128, 8, 80, 48}) : d.within(d.rarely(32) ? 0 : 1, 20);
}

inline Arguments branches(Draw& d, int64_t rows, int64_t tokens, int64_t kv_heads, int64_t dim) {
  const int64_t column = d.within(0, 12), prompts = d.within(1, 4), columns = d.within(0, d.rarely(4) ? 70 : 12);
  auto [cos, sin] = rotation(d, rows * tokens, dim);
  return {cos,
          sin,
          d.floats({2, rows, kv_heads, column + tokens + d.within(0, 3), dim}, d.mostly(Layout::rows)),
          column,
          d.floats({2, prompts, kv_heads, columns, dim}, d.mostly(Layout::rows)),
          d.list(prompts, [&] { return d.within(0, columns); }),
          d.list(rows, [&] { return d.within(0, prompts - 1); }),
          window(d),
          0.3};
}

// Segments (S, 2): lengths, and the segment that each one continues, or -1. Adds the lengths to `tokens`.
inline at::Tensor segments(Draw& d, int64_t& tokens) {
  const int64_t count = d.within(0, 6);
  std::vector<int64_t> rows;
  for (int64_t s = 0, first = 0; s < count; s++) {
    const int64_t length = d.rarely(12) ? d.within(0, 200) : d.within(0, d.rarely(3) ? 30 : 8);
    const bool alone = s == 0 || d.rarely(3);
    first = alone ? s : first;
    rows.insert(rows.end(), {length, alone ? -1 : first});
    tokens += length;
  }
  size_t next = 0;
  return d.list(2 * count, [&] { return rows[next++]; }, Layout::dense).view({count, 2});
}

struct Packed {
  int64_t tokens = 0, heads, kv_heads, dim;
  c10::IValue qkv, cos, sin, segments;

  explicit Packed(Draw& d) {
    segments = fuzz::segments(d, tokens);
    kv_heads = d.within(1, 2), heads = kv_heads * d.within(1, 3), dim = head_width(d);
    qkv = d.floats({tokens, heads + 2 * kv_heads, dim});
    std::tie(cos, sin) = rotation(d, tokens, dim);
  }
};

// Mostly short; also beyond the limits where another method is used: 32, 1,024, 8,192, 16,384, 65,536.
inline int64_t row_length(Draw& d) {
  const int64_t byte = d.within(0, 255);
  return byte < 160   ? byte % 12
         : byte < 240 ? byte - 140
         : byte < 252 ? 100 + 8 * static_cast<int64_t>(d.bytes(1))
         : byte < 255 ? 8000 + 40 * static_cast<int64_t>(d.bytes(1))
                      : 65530 + 16 * static_cast<int64_t>(d.bytes(1));
}

constexpr int64_t kMost = 1 << 18;  // elements of all rows

// Rows of numbers, dense (rows, M) or ragged (total,) with offsets (rows + 1,).
struct Rows {
  at::Tensor values;
  c10::IValue offsets;

  Rows(Draw& d, at::ScalarType type, int64_t rows, bool sorted, int64_t least = 0) {
    if (d.rarely(2)) {
      std::vector<int64_t> ends{0};
      for (int64_t row = 0; row < rows; row++) {
        ends.push_back(ends.back() + std::max(least, std::min(row_length(d), kMost - ends.back())));
      }
      values = d.tensor({ends.back()}, type, d.mostly(Layout::dense));
      size_t next = 0;
      offsets = d.list(rows + 1, [&] { return ends[next++]; }, d.mostly(Layout::dense));
      for (int64_t row = 0; row < rows && sorted; row++) {
        sort(values.slice(0, ends[row], ends[row + 1]));
      }
    } else {
      values = d.tensor({rows, std::max(least, std::min(row_length(d), kMost / (rows + 1)))}, type, d.mostly(Layout::dense));
      if (sorted) {
        sort(values);
      }
    }
    d.remember(values);
  }
  c10::IValue weights(Draw& d, bool given) const {
    return given ? c10::IValue(d.tensor(values.sizes().vec(), at::kDouble, Layout::dense)) : c10::IValue();
  }

 private:
  static void sort(const at::Tensor& row) {
    if (row.numel() > 1 && row.is_contiguous()) {
      row.copy_(std::get<0>(row.sort()));
    }
  }
};

inline at::ScalarType format(Draw& d) {
  return d.among(std::array{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16});
}
inline at::ScalarType wide_format(Draw& d) {
  return d.among(std::array{at::kFloat, at::kDouble});
}

inline const std::map<std::string, Arguments (*)(Draw&)>& arguments() {
  static const std::map<std::string, Arguments (*)(Draw&)> of{
      {"rms_norm",
       [](Draw& d) -> Arguments {
         const int64_t T = d.size(), D = d.size();
         return {d.floats({T, D}), d.floats({D}), epsilon(d)};
       }},
      {"rms_norm_backward",
       [](Draw& d) -> Arguments {
         const int64_t T = d.size(), D = d.size();
         return {d.floats({T, D}), d.floats({T, D}), d.floats({D}), epsilon(d)};
       }},
      {"swiglu", [](Draw& d) -> Arguments { return {d.floats({d.size(), 2 * d.size()})}; }},
      {"swiglu_backward",
       [](Draw& d) -> Arguments {
         const int64_t T = d.size(), F = d.size();
         return {d.floats({T, F}), d.floats({T, 2 * F})};
       }},
      {"linear",
       [](Draw& d) -> Arguments {
         const int64_t rows = d.size(), depth = d.size(), columns = d.size();
         const bool bias = d.rarely(2);
         return {d.floats({rows, depth}), d.floats({columns, depth}),
                 bias ? c10::IValue(d.floats({columns})) : c10::IValue()};
       }},
      {"branch_attention",
       [](Draw& d) -> Arguments {
         const int64_t rows = d.within(0, 5), tokens = d.within(1, 3), kv_heads = d.within(1, 2),
                       heads = kv_heads * d.within(1, 3), dim = head_width(d);
         Arguments all = branches(d, rows, tokens, kv_heads, dim);
         all.insert(all.begin(), d.floats({rows * tokens, heads + 2 * kv_heads, dim}));
         all.push_back(heads);
         return all;
       }},
      {"decode_block",
       [](Draw& d) -> Arguments {
         const int64_t rows = d.rarely(8) ? 25 : d.within(0, 5), tokens = d.within(1, 3), kv_heads = d.within(1, 2),
                       heads = kv_heads * d.within(1, 3), dim = head_width(d), width = d.within(0, 40), ffn = d.within(0, 40),
                       all_heads = (heads + 2 * kv_heads) * dim;
         const bool bias = d.rarely(2);
         Arguments all{d.floats({rows * tokens, width}),
                       d.floats({width}),
                       d.floats({all_heads, width}),
                       bias ? c10::IValue(d.floats({all_heads})) : c10::IValue(),
                       d.floats({width, heads * dim}),
                       d.floats({width}),
                       d.floats({2 * ffn, width}),
                       d.floats({width, ffn}),
                       epsilon(d)};
         for (const auto& more : branches(d, rows, tokens, kv_heads, dim)) {
           all.push_back(more);
         }
         all.push_back(heads);
         return all;
       }},
      {"packed_attention",
       [](Draw& d) -> Arguments {
         const Packed p(d);
         return {p.qkv, p.cos, p.sin, p.segments, window(d), 0.3, p.heads};
       }},
      {"packed_attention_backward",
       [](Draw& d) -> Arguments {
         const Packed p(d);
         const std::vector<int64_t> sizes{p.tokens, p.heads, p.dim};
         return {d.floats(sizes), p.qkv, p.cos, p.sin, d.floats(sizes), d.floats({p.tokens, p.heads}), p.segments,
                 window(d), 0.3, p.heads};
       }},
      {"logits_statistics",
       [](Draw& d) -> Arguments {
         const int64_t rows = d.size(), V = std::max<int64_t>(1, d.size());
         return {d.floats({rows, V}), d.list(rows, [&] { return d.within(0, V - 1); }), temperature(d)};
       }},
      {"logits_gradient",
       [](Draw& d) -> Arguments {
         const int64_t rows = d.size(), V = std::max<int64_t>(1, d.size());
         const bool in_place = d.rarely(2), entropy = d.rarely(2);
         const at::Tensor logits = d.tensor({rows, V}, at::kFloat, in_place ? Layout::dense : Layout::any);
         return {logits,
                 d.list(rows, [&] { return d.within(0, V - 1); }),
                 d.floats({2, rows}),
                 d.floats({rows}),
                 d.floats({rows}),
                 entropy ? c10::IValue(d.floats({rows})) : c10::IValue(),
                 temperature(d),
                 in_place ? logits : d.tensor({rows, V}, at::kFloat, d.mostly(Layout::dense))};
       }},
      {"sample_tokens",
       [](Draw& d) -> Arguments {
         const int64_t rows = d.size(), V = std::max<int64_t>(1, d.size());
         const at::Tensor logits = d.floats({rows, V});
         const auto uniform = [&] { return d.rarely(16) ? d.real() : static_cast<double>(d.bytes(2)) / 65536; };
         return {logits, d.list(rows, uniform), temperature(d)};
       }},
      {"ecdf_first_nan",
       [](Draw& d) -> Arguments { return {Rows(d, format(d), d.within(0, 12), false).values}; }},
      {"ecdf_ranks",
       [](Draw& d) -> Arguments {
         const Rows rows(d, format(d), d.within(0, 12), false);
         const bool weighted = d.rarely(3);
         return {rows.values, rows.offsets, rows.weights(d, weighted), d.within(0, 2), d.rarely(2)};
       }},
      {"ecdf_argsort",
       [](Draw& d) -> Arguments {
         const Rows rows(d, format(d), d.within(0, 12), false);
         return {rows.values, rows.offsets};
       }},
      {"ecdf_evaluate",
       [](Draw& d) -> Arguments {
         const int64_t count = d.within(0, 6);
         const at::ScalarType type = wide_format(d);
         if (d.rarely(251)) {  // so many queries and samples are grouped by value
           const at::Tensor samples = std::get<0>(d.tensor({1, 1 << 20}, type, Layout::dense).sort());
           return {samples, {}, d.tensor({1, 1 << 16}, type, Layout::dense), {}, {}, d.within(0, 2), d.rarely(2)};
         }
         const bool weighted = d.rarely(3);
         const Rows rows(d, type, count, !d.rarely(8), 1), queries(d, type, count, false);
         return {rows.values, rows.offsets, queries.values, queries.offsets, rows.weights(d, weighted), d.within(0, 2),
                 d.rarely(2)};
       }},
      {"ecdf_merge",
       [](Draw& d) -> Arguments {
         const int64_t count = d.within(0, 6);
         const at::ScalarType type = format(d);
         const bool sorted = !d.rarely(8), weighted = d.rarely(3);
         const Rows a(d, type, count, sorted), b(d, type, count, sorted);
         return {a.values, a.offsets, b.values, b.offsets, a.weights(d, weighted), b.weights(d, weighted)};
       }},
      {"linearize_rows",
       [](Draw& d) -> Arguments {
         const at::ScalarType type = wide_format(d);
         const int64_t P = d.within(0, 12), M = std::min(row_length(d), kMost / (P + 1));
         return {d.tensor({P, M}, type, d.mostly(Layout::dense)), d.tensor({M}, type, d.mostly(Layout::dense))};
       }},
  };
  return of;
}

}  // namespace fuzz
