// Numbers of several series side by side. `Lanes` takes the usual operators; what follows is the same of one `double`.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace rfa {

#if defined(__AVX512F__)
constexpr int LANES = 8;
#elif defined(__AVX__)
constexpr int LANES = 4;
#else
constexpr int LANES = 2;  // SSE, NEON
#endif
typedef double Lanes __attribute__((vector_size(8 * LANES)));

template <class T> using Truth = decltype(T{} < T{});
template <class T> struct BitsOf { using type = Truth<T>; };
template <> struct BitsOf<double> { using type = int64_t; };
template <class T> using Bits = typename BitsOf<T>::type;

template <class T> inline T all(double x) { return x - T{}; }
template <class T> inline T choose(Truth<T> where, T x, T y) { return where ? x : y; }
template <class T> inline T larger(T x, T y) { return choose<T>(x > y, x, y); }
inline bool every(bool where) { return where; }
inline bool every(Truth<Lanes> where) {
  auto both = where[0];
  for (int l = 1; l < LANES; l++) both &= where[l];
  return both != 0;
}

inline double root(double x) { return std::sqrt(x); }
inline Lanes root(Lanes x) {
  Lanes found;
  for (int l = 0; l < LANES; l++) found[l] = std::sqrt(x[l]);
  return found;
}

template <class To, class From> inline To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To found;
  std::memcpy(&found, &x, sizeof x);
  return found;
}

// exp(x) for x <= 0, without a branch, so that a loop has no call.
template <class T> inline T exponential(T x) {
  constexpr double ROUND = 6755399441055744.0;  // 1.5 * 2^52: what is added to it is rounded to a whole number
  const T shifted = x * 1.4426950408889634 + ROUND, whole = shifted - ROUND;
  const T r = (x - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10;
  constexpr double FACTORIALS[] = {479001600, 6227020800, 3628800, 39916800, 40320, 362880, 720, 5040, 24, 120, 2, 6, 1, 1};
  const T square = r * r;
  T even{}, odd{};  // two chains, side by side
  for (int k = 0; k < 14; k += 2) even = even * square + 1 / FACTORIALS[k], odd = odd * square + 1 / FACTORIALS[k + 1];
  T power = even + r * odd;
  power = same_bits<T>(same_bits<Bits<T>>(power) + (same_bits<Bits<T>>(shifted) << 52));
  return choose<T>(x > all<T>(-700), power, T{});
}

inline double logarithm(double x) { return std::log(x); }
// x = 2^e (1 + f) / (1 - f) with a mantissa from sqrt(1 / 2) to sqrt(2). x is positive and not denormal.
inline Lanes logarithm(Lanes x) {
  constexpr int64_t HALF_ROOT = 0x3fe6a09e667f3bcd, SIGN = 1024;
  const auto bits = same_bits<Bits<Lanes>>(x);
  const auto exponent = ((bits - HALF_ROOT + (SIGN << 52)) >> 52) - SIGN;
  const Lanes mantissa = same_bits<Lanes>(bits - (exponent << 52)), f = (mantissa - 1) / (mantissa + 1), square = f * f;
  const Lanes e = same_bits<Lanes>(exponent + 0x4338000000000000) - 6755399441055744.0;
  Lanes series = all<Lanes>(2.0 / 23);
  for (int k = 21; k > 0; k -= 2) series = series * square + 2.0 / k;
  return e * 0.693147180369123816490 + (series * f + e * 1.90821492927058770002e-10);
}

// Four numbers of four lanes each, to rows `stride` apart: those of a lane side by side.
#if defined(__AVX__)
constexpr int AHEAD = 64;
inline void transpose(const double* from, double* to, int64_t stride) {
  const __m256d a = _mm256_loadu_pd(from), b = _mm256_loadu_pd(from + LANES), c = _mm256_loadu_pd(from + 2 * LANES),
                d = _mm256_loadu_pd(from + 3 * LANES), ab = _mm256_unpacklo_pd(a, b), cd = _mm256_unpacklo_pd(c, d),
                high_ab = _mm256_unpackhi_pd(a, b), high_cd = _mm256_unpackhi_pd(c, d);
  for (int l = 0; l < 4; l++) __builtin_prefetch(to + l * stride + AHEAD, 1);  // each lane has a place of its own
  _mm256_storeu_pd(to, _mm256_permute2f128_pd(ab, cd, 0x20));
  _mm256_storeu_pd(to + stride, _mm256_permute2f128_pd(high_ab, high_cd, 0x20));
  _mm256_storeu_pd(to + 2 * stride, _mm256_permute2f128_pd(ab, cd, 0x31));
  _mm256_storeu_pd(to + 3 * stride, _mm256_permute2f128_pd(high_ab, high_cd, 0x31));
}
#endif

}  // namespace rfa
