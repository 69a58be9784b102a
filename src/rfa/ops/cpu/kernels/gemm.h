// Products of small tiles held in registers: C (+)= A B, contraction of any length.
#pragma once
#include "vector.h"

namespace rfa {

// A tile of ROWS x COLUMNS fills the registers: 12 of 16 with AVX2, 24 of 32 with AVX-512 or NEON.
#if defined(__AVX512F__)
constexpr int ROWS = 12, VECTORS = 2;
#elif defined(__aarch64__)
constexpr int ROWS = 6, VECTORS = 4;
#else
constexpr int ROWS = 6, VECTORS = 2;
#endif
constexpr int COLUMNS = VECTORS * LANES;

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// C[i, j] (+)= sum_k A[i * row + k * column] B[k * ldb + j] for a tile of ROWS x COLUMNS.
template <bool ADD>
RFA_INLINE void tile(const float* a, int64_t row, int64_t column, const float* b, int64_t ldb, float* c, int64_t ldc,
                     int64_t contraction) {
  Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) sums[i][j] = ADD ? load(c + i * ldc + j * LANES) : Floats{};
  for (int64_t k = 0; k < contraction; k++) {
    Floats right[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) right[j] = load(b + k * ldb + j * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const Floats left = all(a[i * row + k * column]);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) sums[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) store(c + i * ldc + j * LANES, sums[i][j]);
}

// S (ROWS x columns) = A (ROWS x contraction, row-major) times panels of COLUMNS columns, `contraction` rows each.
static inline void scores(const float* a, int64_t lda, const float* panels, float* s, int64_t lds, int64_t columns,
                          int64_t contraction) {
  for (int64_t j = 0; j < columns; j += COLUMNS)
    tile<false>(a, lda, 1, panels + j * contraction, COLUMNS, s + j, lds, contraction);
}

// C (ROWS x columns) += A B, A[i, k] = a[i * row + k * column], B row-major.
static inline void accumulate(const float* a, int64_t row, int64_t column, const float* b, float* c, int64_t columns,
                              int64_t contraction) {
  for (int64_t j = 0; j < columns; j += COLUMNS) tile<true>(a, row, column, b + j, columns, c + j, columns, contraction);
}

}  // namespace rfa
