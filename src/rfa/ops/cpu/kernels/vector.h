// Two of the widest registers side by side, in the compiler's generic form, so that the long chains of log2 and 2^x overlap.
// `Floats`, `Ints` and `Doubles` are LANES numbers each and take the usual operators.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#define RFA_INLINE static inline __attribute__((always_inline))
#define RFA_INLINE_MEMBER inline __attribute__((always_inline))

namespace rfa {

#if defined(__AVX512F__)
constexpr int REGISTER = 16;  // floats in a register
#elif defined(__AVX__)
constexpr int REGISTER = 8;
#else
constexpr int REGISTER = 4;  // SSE, NEON
#endif
constexpr int LANES = 2 * REGISTER;

typedef float FloatRegister __attribute__((vector_size(4 * REGISTER)));
typedef int32_t IntRegister __attribute__((vector_size(4 * REGISTER)));
typedef double DoubleRegister __attribute__((vector_size(4 * REGISTER)));
typedef float HalfRegister __attribute__((vector_size(2 * REGISTER)));

// Members by name, not an array: compilers keep them in registers.
struct Floats {
  FloatRegister a, b;
};
struct Ints {
  IntRegister a, b;
};
struct Doubles {
  DoubleRegister a, b, c, d;
};

RFA_INLINE Floats all(float x) { return {x - FloatRegister{}, x - FloatRegister{}}; }
RFA_INLINE Doubles all(double x) {
  const DoubleRegister y = x - DoubleRegister{};
  return {y, y, y, y};
}

#define RFA_OPERATOR(op)                                                                           \
  RFA_INLINE Floats operator op(Floats x, Floats y) { return {x.a op y.a, x.b op y.b}; }            \
  RFA_INLINE Floats operator op(Floats x, float y) { return x op all(y); }                          \
  RFA_INLINE Floats operator op(float x, Floats y) { return all(x) op y; }                          \
  RFA_INLINE Doubles operator op(Doubles x, Doubles y) {                                            \
    return {x.a op y.a, x.b op y.b, x.c op y.c, x.d op y.d};                                        \
  }                                                                                                \
  RFA_INLINE Doubles operator op(Doubles x, double y) { return x op all(y); }                       \
  RFA_INLINE Doubles operator op(double x, Doubles y) { return all(x) op y; }
RFA_OPERATOR(+)
RFA_OPERATOR(-)
RFA_OPERATOR(*)
RFA_OPERATOR(/)

#define RFA_INT_OPERATOR(op)                                                                       \
  RFA_INLINE Ints operator op(Ints x, int32_t y) { return {x.a op y, x.b op y}; }                   \
  RFA_INLINE Ints operator op(int32_t x, Ints y) { return {x op y.a, x op y.b}; }
RFA_INT_OPERATOR(+)
RFA_INT_OPERATOR(-)
RFA_INT_OPERATOR(&)
RFA_INT_OPERATOR(<<)
RFA_INT_OPERATOR(>>)
RFA_INLINE Ints operator-(Ints x, Ints y) { return {x.a - y.a, x.b - y.b}; }
RFA_INLINE Ints operator&(Ints x, Ints y) { return {x.a & y.a, x.b & y.b}; }
RFA_INLINE Ints operator|(Ints x, Ints y) { return {x.a | y.a, x.b | y.b}; }
RFA_INLINE Ints operator~(Ints x) { return {~x.a, ~x.b}; }

#define RFA_COMPARISON(op)                                                                         \
  RFA_INLINE Ints operator op(Floats x, Floats y) { return {(IntRegister)(x.a op y.a), (IntRegister)(x.b op y.b)}; } \
  RFA_INLINE Ints operator op(Floats x, float y) { return x op all(y); }
RFA_COMPARISON(<)
RFA_COMPARISON(>)
RFA_COMPARISON(==)

RFA_INLINE Floats operator-(Floats x) { return {-x.a, -x.b}; }
RFA_INLINE Doubles operator-(Doubles x) { return {-x.a, -x.b, -x.c, -x.d}; }
RFA_INLINE void operator+=(Floats& x, Floats y) { x = x + y; }
RFA_INLINE void operator-=(Floats& x, Floats y) { x = x - y; }
RFA_INLINE void operator+=(Doubles& x, Doubles y) { x = x + y; }
RFA_INLINE void operator-=(Doubles& x, Doubles y) { x = x - y; }

template <class R, class T> RFA_INLINE R load_register(const T* p) {
  typedef R Unaligned __attribute__((aligned(sizeof(T)), may_alias));
  return *reinterpret_cast<const Unaligned*>(p);
}
template <class R, class T> RFA_INLINE void store_register(T* p, R x) {
  typedef R Unaligned __attribute__((aligned(sizeof(T)), may_alias));
  *reinterpret_cast<Unaligned*>(p) = x;
}
RFA_INLINE Floats load(const float* p) {
  return {load_register<FloatRegister>(p), load_register<FloatRegister>(p + REGISTER)};
}
RFA_INLINE Ints load(const int32_t* p) {
  return {load_register<IntRegister>(p), load_register<IntRegister>(p + REGISTER)};
}
RFA_INLINE Doubles load(const double* p) {
  constexpr int n = REGISTER / 2;
  return {load_register<DoubleRegister>(p), load_register<DoubleRegister>(p + n),
          load_register<DoubleRegister>(p + 2 * n), load_register<DoubleRegister>(p + 3 * n)};
}
RFA_INLINE void store(float* p, Floats x) {
  store_register(p, x.a);
  store_register(p + REGISTER, x.b);
}
RFA_INLINE void store(double* p, Doubles x) {
  constexpr int n = REGISTER / 2;
  store_register(p, x.a);
  store_register(p + n, x.b);
  store_register(p + 2 * n, x.c);
  store_register(p + 3 * n, x.d);
}
RFA_INLINE void add_to(float* p, Floats x) { store(p, load(p) + x); }
RFA_INLINE void add_to(double* p, Doubles x) { store(p, load(p) + x); }

// Keeps a product apart from a sum that follows, which the compiler might fuse in one place and not in another. Backward
// must form the same scores as forward: in large scores one last digit is a factor of 2^0.01.
RFA_INLINE void rounded(Floats& x) {
#if defined(__x86_64__)
  __asm__("" : "+x"(x.a), "+x"(x.b));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x.a), "+w"(x.b));
#endif
}

RFA_INLINE Ints bits(Floats x) { return {(IntRegister)x.a, (IntRegister)x.b}; }
RFA_INLINE Floats from_bits(Ints x) { return {(FloatRegister)x.a, (FloatRegister)x.b}; }
RFA_INLINE Floats to_floats(Ints x) {
  return {__builtin_convertvector(x.a, FloatRegister), __builtin_convertvector(x.b, FloatRegister)};
}
RFA_INLINE Floats choose(Ints where, Floats x, Floats y) { return {where.a ? x.a : y.a, where.b ? x.b : y.b}; }

// The larger one; NaN where `x` is.
RFA_INLINE Floats larger(Floats x, Floats y) {
#if defined(__AVX__) && !defined(__AVX512F__)  // one instruction, which compilers do not find
  return {(FloatRegister)_mm256_max_ps(y.a, x.a), (FloatRegister)_mm256_max_ps(y.b, x.b)};
#else
  return choose(x < y, y, x);
#endif
}
RFA_INLINE Floats smaller(Floats x, Floats y) { return choose(x > y, y, x); }
RFA_INLINE Floats magnitude(Floats x) { return from_bits(bits(x) & 0x7fffffff); }
RFA_INLINE Floats keep(Floats x, Ints mask) { return from_bits(bits(x) & mask); }

RFA_INLINE FloatRegister join(DoubleRegister low, DoubleRegister high) {
  const HalfRegister halves[2] = {__builtin_convertvector(low, HalfRegister), __builtin_convertvector(high, HalfRegister)};
  FloatRegister whole;
  std::memcpy(&whole, halves, sizeof whole);
  return whole;
}
RFA_INLINE DoubleRegister half(FloatRegister x, int which) {
  HalfRegister halves[2];
  std::memcpy(halves, &x, sizeof halves);
  return __builtin_convertvector(halves[which], DoubleRegister);
}
RFA_INLINE Floats narrow(Doubles x) { return {join(x.a, x.b), join(x.c, x.d)}; }
RFA_INLINE Doubles widen(Floats x) { return {half(x.a, 0), half(x.a, 1), half(x.b, 0), half(x.b, 1)}; }

// The sum of a register's numbers: its halves are added until two are left.
template <class T, int N> struct Register {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N> RFA_INLINE T sum_of(typename Register<T, N>::type x) {
  if constexpr (N == 2) {
    return x[0] + x[1];
  } else {
    typename Register<T, N / 2>::type halves[2];
    std::memcpy(halves, &x, sizeof x);
    return sum_of<T, N / 2>(halves[0] + halves[1]);
  }
}
RFA_INLINE float sum(Floats x) { return sum_of<float, REGISTER>(x.a + x.b); }
RFA_INLINE double sum(Doubles x) { return sum_of<double, REGISTER / 2>((x.a + x.b) + (x.c + x.d)); }
RFA_INLINE float largest(Floats x) {
  float most = x.a[0];
  for (int i = 0; i < REGISTER; i++) {
    most = x.a[i] > most ? x.a[i] : most;
    most = x.b[i] > most ? x.b[i] : most;
  }
  return most;
}

}  // namespace rfa
