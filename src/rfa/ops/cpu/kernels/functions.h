// 2^x and log2(1 + x) by exponent bits and short minimax polynomials: relative errors below 2e-7.
#pragma once
#include "vector.h"

namespace rfa {

constexpr float LN2 = 0.69314718f, BITS = 1.44269504f;

// A number x, |x| < 2^22, plus 1.5 * 2^23 has the nearest whole number in its low bits.
constexpr float ROUNDER = 12582912.0f;

// x = n + f with n whole and |f| <= 1/2: 2^n, f, and the minimax polynomial by which f is multiplied to give 2^f - 1,
// within 1e-7 of 2^f.
struct Power {
  Floats scale, fraction, polynomial;
};
RFA_INLINE Power split_power(Floats x) {
  const Floats shifted = x + ROUNDER, f = x - (shifted - ROUNDER);
  Floats p = f * 0.0013273394f + 0.009671065956f;
  p = p * f + 0.05550691113f;
  p = p * f + 0.24022251368f;
  return {from_bits((bits(shifted) << 23) + (127 << 23)), f, p * f + 0.69314700365f};
}

// 2^x for x <= 127; 0 below -126.5, NaN for NaN.
RFA_INLINE Floats exp2(Floats x) {
  const Power p = split_power(larger(x, all(-127.0f)));
  return p.scale + p.scale * p.fraction * p.polynomial;
}

// 2^x and 2^x - 1, both to full relative precision, for x <= 0.
RFA_INLINE void exp2_both(Floats x, Floats* power, Floats* less_one) {
  const Power p = split_power(larger(x, all(-127.0f)));
  Floats rest = p.scale * p.fraction * p.polynomial;
  rounded(rest);
  *power = p.scale + rest;
  *less_one = (p.scale - 1.0f) + rest;
}

// log2 of 2^n (1 + f), f in [sqrt(1/2) - 1, sqrt(2) - 1]: n + f times a minimax polynomial, relative error 4e-8.
RFA_INLINE Floats log2_of(Floats n, Floats f) {
  const Floats f2 = f * f, f4 = f2 * f2, f5 = f * f4;
  const Floats a = f * -0.72134733200f + 1.44269502163f, b = f * -0.36070367694f + 0.48091062903f;
  const Floats c = f * -0.23894481361f + 0.28791624308f, d = f * -0.20726981759f + 0.21571563184f;
  const Floats high = f4 * 0.12583704293f + (d * f2 + c), low = b * f2 + a;
  return high * f5 + (low * f + n);
}

constexpr int32_t SQRT_HALF = 0x3f3504f3, EXPONENT = static_cast<int32_t>(0xff800000);

// Weights w of Student-t scores are in units of 1 / UNIT, so that w r stays in range where Sigma + gamma^2 is 1e-38.
constexpr int UNIT_BITS = 40;
constexpr float UNIT = 1.0995116e12f, ONE = 1.0f / UNIT;  // 2^40, and the number one in that unit

// log2(1 + UNIT x), x >= 0: f is formed from x itself, so that a tiny x keeps its precision.
RFA_INLINE Floats log2_1p(Floats x) {
  const Ints exponent = (bits(x + ONE) - (SQRT_HALF - (UNIT_BITS << 23))) & EXPONENT;
  const Floats inverse = from_bits(0x3f800000 + (UNIT_BITS << 23) - exponent);  // UNIT 2^-n
  return log2_of(to_floats(exponent >> 23), inverse * x + (inverse * ONE - 1.0f));
}

// log2(x) for normal x > 0.
RFA_INLINE Floats log2(Floats x) {
  const Ints exponent = (bits(x) - SQRT_HALF) & EXPONENT;
  return log2_of(to_floats(exponent >> 23), from_bits(bits(x) - exponent) - 1.0f);
}

}  // namespace rfa
