// Vectors of the widest registers at hand, in the compiler's generic form, with log2(1 + x) and 2^x.
#pragma once
#include <cstdint>
#include <cstring>

namespace rfa {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;  // SSE, NEON
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef double Doubles __attribute__((vector_size(8 * LANES)));  // the compiler splits it into registers
typedef float UnalignedFloats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t UnalignedInts __attribute__((vector_size(4 * LANES), aligned(4)));
typedef double UnalignedDoubles __attribute__((vector_size(8 * LANES), aligned(8)));

#define RFA_INLINE static inline __attribute__((always_inline))
#define RFA_INLINE_MEMBER inline __attribute__((always_inline))

RFA_INLINE Floats load(const float* p) { return *reinterpret_cast<const UnalignedFloats*>(p); }
RFA_INLINE Doubles load(const double* p) { return *reinterpret_cast<const UnalignedDoubles*>(p); }
RFA_INLINE Ints load(const int32_t* p) { return *reinterpret_cast<const UnalignedInts*>(p); }
RFA_INLINE void store(float* p, Floats x) { *reinterpret_cast<UnalignedFloats*>(p) = x; }
RFA_INLINE void store(double* p, Doubles x) { *reinterpret_cast<UnalignedDoubles*>(p) = x; }
RFA_INLINE void add_to(float* p, Floats x) { store(p, load(p) + x); }
RFA_INLINE void add_to(double* p, Doubles x) { store(p, load(p) + x); }
RFA_INLINE Floats all(float x) { return x - Floats{}; }
RFA_INLINE Doubles all(double x) { return x - Doubles{}; }
RFA_INLINE Ints bits(Floats x) { return (Ints)x; }
RFA_INLINE Floats from_bits(Ints x) { return (Floats)x; }
RFA_INLINE Floats narrow(Doubles x) { return __builtin_convertvector(x, Floats); }
RFA_INLINE Doubles widen(Floats x) { return __builtin_convertvector(x, Doubles); }
RFA_INLINE Floats larger(Floats a, Floats b) { return a < b ? b : a; }  // NaN where `a` is
RFA_INLINE Floats smaller(Floats a, Floats b) { return a > b ? b : a; }
RFA_INLINE Floats magnitude(Floats x) { return from_bits(bits(x) & 0x7fffffff); }
RFA_INLINE Floats keep(Floats x, Ints mask) { return from_bits(bits(x) & mask); }

template <class V> RFA_INLINE auto sum(V x) {
  auto total = x[0];
  for (int i = 1; i < LANES; i++) total += x[i];
  return total;
}
RFA_INLINE float largest(Floats x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}

// n + f with n whole and |f| <= 1/2, for |x| < 2^22: adding 1.5 * 2^23 rounds to a whole number in the low bits.
constexpr float ROUNDER = 12582912.0f;

// (2^f - 1) for |f| <= 1/2: f times a minimax polynomial, relative error of 2^f below 1e-7.
RFA_INLINE Floats exp2_fraction(Floats f) {
  Floats p = f * 0.0013273394f + 0.009671065956f;
  p = p * f + 0.05550691113f;
  p = p * f + 0.24022251368f;
  return f * (p * f + 0.69314700365f);
}

// 2^x for x <= 127; exactly 0 below -126.5.
RFA_INLINE Floats exp2(Floats x) {
  x = larger(x, all(-127.0f));
  const Floats shifted = x + ROUNDER;
  const Floats scale = from_bits((bits(shifted) << 23) + (127 << 23));
  return scale + scale * exp2_fraction(x - (shifted - ROUNDER));
}

// 2^x and 2^x - 1, both to full relative precision, for x <= 0.
RFA_INLINE void exp2_both(Floats x, Floats* power, Floats* less_one) {
  x = larger(x, all(-127.0f));
  const Floats shifted = x + ROUNDER;
  const Floats scale = from_bits((bits(shifted) << 23) + (127 << 23));
  const Floats rest = scale * exp2_fraction(x - (shifted - ROUNDER));
  *power = scale + rest;
  *less_one = (scale - 1.0f) + rest;
}

// log2 of 2^n (1 + f), f in [sqrt(1/2) - 1, sqrt(2) - 1]: n + f times a minimax polynomial, relative error 4e-8.
RFA_INLINE Floats log2_of(Floats n, Floats f) {
  const Floats f2 = f * f, f4 = f2 * f2;
  const Floats a = f * -0.72134733200f + 1.44269502163f, b = f * -0.36070367694f + 0.48091062903f;
  const Floats c = f * -0.23894481361f + 0.28791624308f, d = f * -0.20726981759f + 0.21571563184f;
  const Floats high = (f4 * 0.12583704293f + (d * f2 + c)), low = b * f2 + a;
  return (high * f4 + low) * f + n;
}

constexpr int32_t SQRT_HALF = 0x3f3504f3, EXPONENT = static_cast<int32_t>(0xff800000);

// log2(1 + x), x >= 0: f is formed from x itself, so that a tiny x keeps its precision.
RFA_INLINE Floats log2_1p(Floats x, Floats one_plus_x) {
  const Ints exponent = (bits(one_plus_x) - SQRT_HALF) & EXPONENT;
  const Floats inverse = from_bits(0x3f800000 - exponent);  // 2^-n
  const Floats n = __builtin_convertvector(exponent >> 23, Floats);
  return log2_of(n, inverse * x + (inverse - 1.0f));
}

// log2(x) for normal x > 0.
RFA_INLINE Floats log2(Floats x) {
  const Ints exponent = (bits(x) - SQRT_HALF) & EXPONENT;
  return log2_of(__builtin_convertvector(exponent >> 23, Floats), from_bits(bits(x) - exponent) - 1.0f);
}

}  // namespace rfa
