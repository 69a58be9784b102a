// Results below the least normal number become 0. As denormal numbers each would cost some 100 cycles wherever it is read,
// and weights times decays often are: models with ALiBi's slopes or with gates took up to 1.6 times as long.
#pragma once
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace rfa {

// For the thread that makes it, as long as it lives. Processors other than x86 have no such cost.
class FlushDenormals {
#if defined(__SSE__)
 public:
  FlushDenormals() { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  void operator=(const FlushDenormals&) = delete;

 private:
  const unsigned int before_ = _mm_getcsr();
#endif
};

}  // namespace rfa
