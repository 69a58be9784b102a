// The keys of a block as later queries see them: each lag of a separable path is split at the last key of a chunk.
#pragma once
#include <algorithm>
#include <cmath>

#include "functions.h"
#include "problem.h"

namespace rfa {

constexpr float LEAST_VARIANCE = 1.17549435e-38f;  // the least normal float, as in rfa/ops/prior.py

// 1 - exp(-x) for 0 <= x <= 0.7, to 3e-9 relative and far better where x is small.
RFA_INLINE Doubles one_less_exponential(Doubles x) {
  Doubles series = 1.0 - x * (1.0 / 9.0);
  for (const double n : {8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0}) series = 1.0 - x * (1.0 / n) * series;
  return x * series;
}

// E^2 in double: of 1 - E^2 while that is small, of E else.
RFA_INLINE Doubles square_of(Doubles apart, Floats decay, Floats complement) {
  const Ints near = complement < 0.5f;
  const Doubles inside = apart * widen(keep(all(1.0f), near));
  return widen(keep(all(1.0f), near)) * (1.0 - one_less_exponential(2.0 * inside)) +
         widen(choose(near, all(0.0f), decay * decay));
}

// With E_jl and E_li, both at most 1, for a query i behind the last key l of a chunk,
//   E = E_jl E_li,    Sigma = V(l to i) + sigma_0^2 + E_li^2 (V(j to l) + eta^2 E_jl^2).
// The factors of the keys serve all queries behind the chunk. Sums of positive numbers lose no digits.
template <bool RICCATI> class KeyChunks {
 public:
  // A few keys and their last one, l: its M, u and C; whether all lie before it; whether the present query lies behind
  // it, and then E_li^2, E_li, V(l to i) + sigma_0^2, and C_l - C_i.
  struct Chunk {
    double decay_sum, variance, riccati_sum;
    bool ordered, behind = false;
    double square = 0.0;
    float decay = 0.0f, added = 0.0f, riccati = 0.0f;
  };

  // `key`: M, u and C of all keys, `padded` each; `bias`: of all keys.
  KeyChunks(bool used, const double* key, const float* bias, int64_t padded, int64_t keys)
      : key_(key), bias_(bias), padded_(padded), keys_(keys), to_last_(used ? 3 * KEY_BLOCK : 0), squares_(used ? KEY_BLOCK : 0) {}

  void set_noises(float key_noise, float floor) { key_noise_ = key_noise, floor_ = floor; }

  // Whether the query lies behind the whole block, which is one chunk then. Else each LANES keys are one.
  template <class Row> bool prepare(const Row& row, int64_t start) {
    const bool other = prepared_ != start;
    if (other) block_ = chunk_of(start, std::min(KEY_BLOCK, keys_ - start));
    const bool whole = split(row, block_);
    if (other || whole != whole_) fill(start, whole);
    if (whole)
      for (Chunk& chunk : chunks_) chunk.behind = true, chunk.square = block_.square;
    prepared_ = start, whole_ = whole;
    return whole;
  }

  // The whole block, and the chunk of its j-th key.
  const Chunk& block() const { return block_; }
  const Chunk& at(int64_t j) const { return chunks_[j / LANES]; }

  // Whether the query lies behind the chunk of the j-th key; its numbers are those of the query from then on.
  template <class Row> bool reach(const Row& row, int64_t j) { return split(row, chunks_[j / LANES]); }

  // E and Sigma of keys [from, to) with a query behind the chunk. Pointers are copied: a store might change members.
  void transport(const Chunk& chunk, int64_t from, int64_t to, float* decays, float* variances) const {
    const float decay = chunk.decay, square = static_cast<float>(chunk.square), added = chunk.added;
    const float* to_last = to_last_;
    for (int64_t j = from; j < to; j += LANES) {
      store(decays + j, load(to_last + j) * decay);
      store(variances + j, larger(load(to_last + KEY_BLOCK + j) * square + added, all(LEAST_VARIANCE)));
    }
  }

  // The bias of keys [from, to).
  void bias(const Chunk& chunk, int64_t from, int64_t to, float* biases) const {
    const float riccati = chunk.riccati, *to_last = to_last_ + 2 * KEY_BLOCK;
    for (int64_t j = from; j < to; j += LANES) store(biases + j, load(to_last + j) - riccati);
  }

  // E^2 in double of keys of a chunk that the query lies behind.
  RFA_INLINE_MEMBER Doubles square(int64_t j) const { return load(squares_ + j) * at(j).square; }

 private:
  template <class Row> bool split(const Row& row, Chunk& chunk) const {
    chunk.behind = chunk.ordered && row.decay_sum >= chunk.decay_sum && row.variance >= chunk.variance &&
                   (!RICCATI || row.riccati_sum <= chunk.riccati_sum);
    if (!chunk.behind) return false;
    const double decay = std::exp(chunk.decay_sum - row.decay_sum);
    chunk.decay = static_cast<float>(decay), chunk.square = decay * decay;
    chunk.added = static_cast<float>((row.variance - chunk.variance) + chunk.variance * (1.0 - chunk.square) + floor_);
    chunk.riccati = static_cast<float>(chunk.riccati_sum - row.riccati_sum);
    return true;
  }

  Chunk chunk_of(int64_t first, int64_t n) const {
    const double* key = key_ + first;
    Chunk chunk{key[n - 1], key[padded_ + n - 1], RICCATI ? key[2 * padded_ + n - 1] : 0.0, true};
    for (int64_t l = 0; l < n; l++)
      chunk.ordered = chunk.ordered && key[l] <= chunk.decay_sum && key[padded_ + l] <= chunk.variance &&
                      (!RICCATI || key[2 * padded_ + l] >= chunk.riccati_sum);
    return chunk;
  }

  // The numbers of the keys as their chunks' last keys see them: E, V + eta^2 E^2, the bias, and E^2 in double.
  void fill(int64_t start, bool whole) {
    for (int64_t j = 0; j < KEY_BLOCK; j += LANES) {
      const double* key = key_ + start + j;
      const int64_t n = std::min<int64_t>(LANES, keys_ - start - j);
      Chunk& chunk = chunks_[j / LANES];
      chunk.ordered = n > 0;
      if (!chunk.ordered) continue;
      chunk = whole ? block_ : chunk_of(start + j, n);
      const Doubles apart = chunk.decay_sum - load(key), variance = load(key + padded_);
      Floats decay, less_one;
      exp2_both(smaller(narrow(apart) * -BITS, all(0.0f)), &decay, &less_one);
      const Floats complement = -less_one * (decay + 1.0f);
      const Floats added = narrow(chunk.variance - variance) + narrow(variance) * complement;
      store(to_last_ + j, decay);
      store(to_last_ + KEY_BLOCK + j, added + decay * decay * key_noise_);
      store(squares_ + j, square_of(apart, decay, complement));
      if (RICCATI)
        store(to_last_ + 2 * KEY_BLOCK + j, load(bias_ + start + j) - narrow(load(key + 2 * padded_) - chunk.riccati_sum));
    }
  }

  const double* key_;
  const float* bias_;
  int64_t padded_, keys_, prepared_ = -1;  // prepared_: the block
  float key_noise_ = 0.0f, floor_ = 0.0f;
  bool whole_ = false;  // as `prepare` returned last
  Buffer<float> to_last_;
  Buffer<double> squares_;
  Chunk chunks_[KEY_BLOCK / LANES], block_;
};

}  // namespace rfa
