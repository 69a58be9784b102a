// The numbers of states in memory: float, or half precision that is widened as it is read and rounded as it is written.
#pragma once
#include "vector.h"

namespace rfa {

enum Number : int64_t { FLOAT32, BFLOAT16, FLOAT16 };  // as NUMBERS in library.py

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

typedef uint16_t WordRegister __attribute__((vector_size(2 * REGISTER)));
typedef uint32_t UnsignedRegister __attribute__((vector_size(4 * REGISTER)));

template <class T> RFA_INLINE UnsignedRegister load_bits(const T* p) {
  return __builtin_convertvector(load_register<WordRegister>(p), UnsignedRegister);
}

RFA_INLINE FloatRegister load_one(const float* p) { return load_register<FloatRegister>(p); }
RFA_INLINE FloatRegister load_one(const Bfloat16* p) { return (FloatRegister)(load_bits(p) << 16); }
// The exponent moves from bias 15 to 127 by a product with 2^112. Denormal numbers are right too, and 0 in a thread
// that takes float's denormals as 0.
RFA_INLINE FloatRegister load_one(const Float16* p) {
  const UnsignedRegister half = load_bits(p), size = (half & 0x7fff) << 13;
  const FloatRegister number = (FloatRegister)size * 5.192296858534828e33f;
  const UnsignedRegister special = (UnsignedRegister)(size >= 0x0f800000) & 0x7f800000;  // infinity or NaN
  return (FloatRegister)((UnsignedRegister)number | special | ((half & 0x8000) << 16));
}
template <class T> RFA_INLINE Floats load_as_float(const T* p) { return {load_one(p), load_one(p + REGISTER)}; }

RFA_INLINE float from(float x) { return x; }
template <class T> RFA_INLINE float from(T x) {
  T padded[REGISTER] = {x};
  return load_one(padded)[0];
}

RFA_INLINE void put(float x, float* to) { *to = x; }
RFA_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
// To the nearest, to the even one of two.
RFA_INLINE void put(float x, Bfloat16* to) {
  const uint32_t bits = bits_of(x);
  to->bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
RFA_INLINE void put(float x, Float16* to) {
  const uint32_t bits = bits_of(x), size = bits & 0x7fffffff;
  uint32_t half;
  if (size > 0x7f800000) half = 0x7e00;
  else if (size >= 0x477ff000) half = 0x7c00;  // from 65,520 on
  else if (size < 0x38800000) half = bits_of(__builtin_fabsf(x) + 0.5f) - bits_of(0.5f);  // denormal: steps of 2^-24
  else half = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  to->bits = half | (bits >> 16 & 0x8000);
}

// `n` numbers into float, or back.
template <class T> RFA_INLINE void read_row(const T* x, float* row, int64_t n) {
  int64_t c = 0;
  for (; c + LANES <= n; c += LANES) store(row + c, load_as_float(x + c));
  for (; c < n; c++) row[c] = from(x[c]);
}
template <class T> RFA_INLINE void write_row(const float* row, T* x, int64_t n) {
  for (int64_t c = 0; c < n; c++) put(row[c], x + c);
}

// Rounded to bfloat16, which is in the high bits. The low ones are what rounding leaves.
RFA_INLINE UnsignedRegister rounded_bits(FloatRegister x) {
  const UnsignedRegister bits = (UnsignedRegister)x;
  return bits + 0x7fff + (bits >> 16 & 1);
}

// `n` numbers, whole registers of them.
RFA_INLINE void to_bfloat16(const float* x, Bfloat16* to, int64_t n) {
  for (int64_t c = 0; c < n; c += REGISTER)
    store_register(reinterpret_cast<uint16_t*>(to + c),
                   __builtin_convertvector(rounded_bits(load_register<FloatRegister>(x + c)) >> 16, WordRegister));
}
RFA_INLINE void round_to_bfloat16(float* x, int64_t n) {
  for (int64_t c = 0; c < n; c += REGISTER)
    store_register(x + c, (FloatRegister)(rounded_bits(load_register<FloatRegister>(x + c)) & 0xffff0000));
}

// The sum of the products of `n` numbers, in float.
template <class S, class T> RFA_INLINE float dot(const S* x, const T* y, int64_t n) {
  Floats total = all(0.0f);
  int64_t c = 0;
  for (; c + LANES <= n; c += LANES) total += load_as_float(x + c) * load_as_float(y + c);
  float result = sum(total);
  for (; c < n; c++) result += from(x[c]) * from(y[c]);
  return result;
}

// `use(T{})` for the type T of a number.
template <class F> RFA_INLINE void with_number(int64_t number, F use) {
  if (number == BFLOAT16) use(Bfloat16{});
  else if (number == FLOAT16) use(Float16{});
  else use(0.0f);
}

}  // namespace rfa
