// Products of small tiles held in registers: C (+)= A B, contraction of any length.
#pragma once
#include "flush.h"
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
constexpr int COLUMNS = VECTORS * REGISTER;

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// C[i, j] (+)= sum_k A[i * row + k * column] B[k * ldb + j] for a tile of ROWS x COLUMNS.
template <bool ADD>
RFA_INLINE void tile(const float* a, int64_t row, int64_t column, const float* b, int64_t ldb, float* c, int64_t ldc,
                     int64_t contraction) {
  FloatRegister sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) sums[i][j] = ADD ? load_register<FloatRegister>(c + i * ldc + j * REGISTER) : FloatRegister{};
  for (int64_t k = 0; k < contraction; k++) {
    FloatRegister right[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) right[j] = load_register<FloatRegister>(b + k * ldb + j * REGISTER);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const FloatRegister left = a[i * row + k * column] - FloatRegister{};
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) sums[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) store_register(c + i * ldc + j * REGISTER, sums[i][j]);
}

// S (rows x columns) = A (rows x contraction, row-major) times panels of COLUMNS columns, `contraction` rows each.
__attribute__((noinline)) static void scores(const float* a, int64_t rows, const float* panels, float* s, int64_t lds, int64_t columns,
                          int64_t contraction) {
  for (int64_t j = 0; j < columns; j += COLUMNS)
    for (int64_t i = 0; i < rows; i += ROWS)
      tile<false>(a + i * contraction, contraction, 1, panels + j * contraction, COLUMNS, s + i * lds + j, lds,
                  contraction);
}

// C (rows x columns) += A B, A[i, k] = a[i * row + k * column], B row-major.
__attribute__((noinline)) static void accumulate(const float* a, int64_t row, int64_t column, const float* b, float* c, int64_t rows,
                              int64_t columns, int64_t contraction) {
  [[maybe_unused]] const FlushDenormals flush;  // weights times decays often are
  for (int64_t j = 0; j < columns; j += COLUMNS)
    for (int64_t i = 0; i < rows; i += ROWS)
      tile<true>(a + i * row, row, column, b + j, columns, c + i * columns + j, columns, contraction);
}

}  // namespace rfa
