// Products of small matrices in the cache, for attention: a library call costs more than such a product.
#pragma once

#include "simd.h"

namespace nlgrpo {

// How a matrix A is stored: element (i, k) is at a[i * row + k * depth].
struct Strides {
  int64_t row, depth;
};

// C (rows, 8 vectors) = [C +] A (rows, depth) B (depth, 8 vectors). C stays in registers.
template <int rows, int vectors, bool add>
NLGRPO_INLINE void product_block(const float* a, Strides s, int64_t depth, const float* b, int64_t b_row, float* c,
                                 int64_t c_row) {
  Eight sum[rows][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
      sum[i][v] = add ? *reinterpret_cast<const Eight*>(c + i * c_row + 8 * v) : Eight{};
    }
  }
  for (int64_t k = 0; k < depth; k++) {
    Eight row[vectors];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
      row[v] = *reinterpret_cast<const Eight*>(b + k * b_row + 8 * v);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
      const float factor = a[i * s.row + k * s.depth];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; v++) {
        sum[i][v] += factor * row[v];
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
      *reinterpret_cast<Eight*>(c + i * c_row + 8 * v) = sum[i][v];
    }
  }
}

template <int vectors, bool add>
NLGRPO_INLINE void product_columns(int64_t rows, const float* a, Strides s, int64_t depth, const float* b,
                                   int64_t b_row, float* c, int64_t c_row) {
  int64_t i = 0;
  for (; i + 6 <= rows; i += 6) {
    product_block<6, vectors, add>(a + i * s.row, s, depth, b, b_row, c + i * c_row, c_row);
  }
  for (; i + 2 <= rows; i += 2) {
    product_block<2, vectors, add>(a + i * s.row, s, depth, b, b_row, c + i * c_row, c_row);
  }
  if (i < rows) {
    product_block<1, vectors, add>(a + i * s.row, s, depth, b, b_row, c + i * c_row, c_row);
  }
}

// C (rows, columns) = [C +] A (rows, depth) B (depth, columns), `columns` a multiple of 8.
template <bool add>
NLGRPO_INLINE void product(int64_t rows, int64_t columns, const float* a, Strides s, int64_t depth, const float* b,
                           int64_t b_row, float* c, int64_t c_row) {
  int64_t j = 0;
  for (; j + 16 <= columns; j += 16) {
    product_columns<2, add>(rows, a, s, depth, b + j, b_row, c + j, c_row);
  }
  if (j < columns) {
    product_columns<1, add>(rows, a, s, depth, b + j, b_row, c + j, c_row);
  }
}

}  // namespace nlgrpo
