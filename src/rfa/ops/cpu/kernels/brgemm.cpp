// A trial of the products that are looked up in PyTorch: whether they add A B to C, with B in pairs of rows.
#include "factors.h"

extern "C" int rfa_brgemm_works(rfa::Brgemm brgemm, void (*release)(bool)) {
  constexpr int64_t m = 12, n = 64, k = 4;
  float a[m * k], b[k * n], c[m * n];
  for (int64_t i = 0; i < m * k; i++) a[i] = static_cast<float>(i);
  for (int64_t i = 0; i < k * n; i++) b[i] = static_cast<float>(i % 61);
  for (int64_t i = 0; i < m * n; i++) c[i] = 1.0f;
  rfa::Bfloat16 left[m * k];
  rfa::Pair pairs[k / 2 * n];
  rfa::to_bfloat16(a, left, m * k);
  rfa::pair_rows(b, k, n, pairs);
  try {
    brgemm(m, n, k, k, n, n, true, left, pairs, c, true);
    release(true);
  } catch (...) {  // where oneDNN is left out or kept from these instructions
    return 0;
  }
  for (int64_t i = 0; i < m * n; i++) {
    float expected = 1.0f;
    for (int64_t q = 0; q < k; q++) expected += a[i / n * k + q] * b[q * n + i % n];
    if (c[i] != expected) return 0;
  }
  return 1;
}
