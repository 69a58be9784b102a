// The factors of products: states in float, or in bfloat16 where the processor multiplies it (AVX-512 BF16, AMX). There
// PyTorch's brgemm, which is oneDNN's, takes the place of gemm.h; sums are float. Its right factor has rows in pairs:
// B[k, j] is number k % 2 of the pair [k / 2, j].
#pragma once
#include <algorithm>

#include "frame.h"
#include "visibility.h"

namespace rfa {

typedef uint32_t Pair;  // two bfloat16, the first one in the low bits

// `n` rows of `columns` numbers, two at a time; `n` is even.
static inline void pair_rows(const float* rows, int64_t n, int64_t columns, Pair* pairs) {
  for (int64_t i = 0; i < n; i += 2, pairs += columns)
    for (int64_t c = 0; c < columns; c += REGISTER) {
      const UnsignedRegister first = rounded_bits(load_register<FloatRegister>(rows + i * columns + c));
      const UnsignedRegister second = rounded_bits(load_register<FloatRegister>(rows + (i + 1) * columns + c));
      store_register(pairs + c, (second & 0xffff0000) | first >> 16);
    }
}

// A of S = A B^T and C += A B: rows of states, or of weights for keys.
class LeftFactor {
 public:
  LeftFactor(const Task& task, int64_t rows, int64_t columns)
      : columns_(columns), rows_(rows * columns), halves_(task.p.brgemm ? rows * columns : 0), half_(task.p.brgemm) {}

  operator float*() const { return rows_; }
  const Bfloat16* halves(int64_t row) const { return halves_ + row * columns_; }

  // To be called when rows [first, first + n) are written.
  void convert(int64_t first, int64_t n) {
    if (half_) to_bfloat16(rows_ + first * columns_, halves_ + first * columns_, n * columns_);
  }

 private:
  int64_t columns_;
  Buffer<float> rows_;
  Buffer<Bfloat16> halves_;
  bool half_;
};

// B of S = A B^T: rows of states in blocks of KEY_BLOCK, as panels or as pairs of channels.
class ColumnFactor {
 public:
  // `written`: that many rows are packed, at least.
  ColumnFactor(const Task& task, int64_t rows, int64_t channels, int64_t written = 0)
      : p_(task.p),
        channels_(channels),
        panels_(p_.brgemm ? 0 : rows * channels, p_.brgemm ? 0 : written * channels),
        pairs_(p_.brgemm ? rows * channels / 2 : 0) {}

  // `n` rows, those of the block at `start`.
  void pack(const float* rows, int64_t start, int64_t n) {
    if (!p_.brgemm) return pack_panels(rows, n, channels_, panels_ + start * channels_);
    constexpr int64_t STEP = 2 * REGISTER;
    Pair* to = pairs_ + start * channels_ / 2;
    for (int64_t first = 0; first < channels_; first += STEP, to += REGISTER * KEY_BLOCK)
      for (int64_t j = 0; j < n; j++) {
        Pair row[REGISTER];
        to_bfloat16(rows + j * channels_ + first, reinterpret_cast<Bfloat16*>(row), STEP);
        for (int64_t c = 0; c < REGISTER; c++) to[c * KEY_BLOCK + j] = row[c];
      }
  }

  // GROUP rows of A from `first` on with the first `columns` keys of the block at `start`; S has rows of KEY_BLOCK.
  void scores(const LeftFactor& a, int64_t first, int64_t start, int64_t columns, float* s) const {
    if (columns == 0) return;
    if (p_.brgemm)
      return p_.brgemm(GROUP, columns, channels_, channels_, KEY_BLOCK, KEY_BLOCK, false, a.halves(first),
                       pairs_ + start * channels_ / 2, s, true);
    rfa::scores(a + first * channels_, GROUP, panels_ + start * channels_, s, KEY_BLOCK, columns, channels_);
  }

 private:
  const Problem& p_;
  int64_t channels_;
  Buffer<float> panels_;
  Buffer<Pair> pairs_;
};

// B of C += A B: rows of states in blocks of KEY_BLOCK, as they are or in pairs.
class RowFactor {
 public:
  // `written`: that many rows are written, at least.
  RowFactor(const Task& task, int64_t rows, int64_t channels, int64_t written = 0)
      : p_(task.p), channels_(channels), rows_(rows * channels, written * channels), pairs_(p_.brgemm ? rows * channels / 2 : 0) {}

  operator float*() const { return rows_; }

  // To be called when the block at `start` is written.
  void convert(int64_t start) {
    if (p_.brgemm) pair_rows(rows_ + start * channels_, KEY_BLOCK, channels_, pairs_ + start * channels_ / 2);
  }

  // GROUP rows of A from `first` on, KEY_BLOCK long, with the first `keys` rows of the block at `start`.
  void accumulate(LeftFactor& a, int64_t first, int64_t start, int64_t keys, float* c) const {
    if (keys == 0) return;
    if (!p_.brgemm)
      return rfa::accumulate(a + first * KEY_BLOCK, KEY_BLOCK, 1, rows_ + start * channels_, c, GROUP, channels_, keys);
    a.convert(first, GROUP);
    p_.brgemm(GROUP, channels_, keys, KEY_BLOCK, channels_, channels_, true, a.halves(first),
              pairs_ + start * channels_ / 2, c, true);
  }

 private:
  const Problem& p_;
  int64_t channels_;
  Buffer<float> rows_;
  Buffer<Pair> pairs_;
};

// Sums over queries for a block of keys: C += W^T A. In bfloat16 C is transposed, because then W is the right factor.
class KeySums {
 public:
  // `a`: all `rows` of queries.
  KeySums(const Task& task, const LeftFactor& a, int64_t rows, int64_t channels)
      : p_(task.p),
        rows_(rows),
        channels_(channels),
        a_(a),
        transposed_(p_.brgemm ? rows * channels : 0),
        pairs_(p_.brgemm ? QUERY_BLOCK * KEY_BLOCK / 2 : 0),
        sums_((KEY_BLOCK + ROWS) * channels),
        row_(channels) {}

  // To be called when all of A is written. Blocks of queries stand one after the other.
  void transpose() {
    for (int64_t first = 0; p_.brgemm && first < rows_; first += QUERY_BLOCK)
      for (int64_t c = 0; c < channels_; c++)
        for (int64_t i = 0; i < QUERY_BLOCK; i++)
          transposed_[first * channels_ + c * QUERY_BLOCK + i] = a_.halves(first + i)[c];
  }

  void clear() { std::memset(sums_, 0, KEY_BLOCK * channels_ * sizeof(float)); }

  // W has the weights of the first `groups` groups of the block of queries at `first`, of which each sees `keys`.
  void add(const float* weights, int64_t first, const VisibleKeys* keys, int64_t groups) {
    int64_t most = 0;
    for (int64_t g = 0; g < groups; g++) most = std::max(most, keys[g].keys);
    // A few keys at a time, from the first group that sees one of them on. In bfloat16 all at once.
    for (int64_t j = 0; j < most; j += p_.brgemm ? KEY_BLOCK : ROWS) {
      int64_t g = 0;
      while (keys[g].keys <= j) g++;
      const int64_t row = g * GROUP, n = (groups - g) * GROUP;
      if (p_.brgemm) {
        pair_rows(weights + row * KEY_BLOCK, n, KEY_BLOCK, pairs_);
        p_.brgemm(channels_, most, n, QUERY_BLOCK, KEY_BLOCK, KEY_BLOCK, true,
                  transposed_ + first * channels_ + row, pairs_, sums_, true);
      } else {
        accumulate(weights + row * KEY_BLOCK + j, 1, KEY_BLOCK, a_ + (first + row) * channels_, sums_ + j * channels_, ROWS,
                   channels_, n);
      }
    }
  }

  float* row(int64_t j) {
    if (!p_.brgemm) return sums_ + j * channels_;
    for (int64_t c = 0; c < channels_; c++) row_[c] = sums_[c * KEY_BLOCK + j];
    return row_;
  }

 private:
  const Problem& p_;
  int64_t rows_, channels_;
  const LeftFactor& a_;
  Buffer<Bfloat16> transposed_;
  Buffer<Pair> pairs_;
  Buffer<float> sums_, row_;
};

}  // namespace rfa
