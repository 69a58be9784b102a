// The entry points of decoding.
#include "decode.h"
#include "enter.h"
#include "run.h"

extern "C" {
int rfa_decode(const rfa::Problem* p) { return rfa::run<rfa::Decode>(*p); }
int rfa_enter(const rfa::EnterProblem* p) {
  return rfa::run_tasks(p->batch * p->heads, p->threads, [&](int64_t index) { rfa::enter_head(*p, index); });
}
}
