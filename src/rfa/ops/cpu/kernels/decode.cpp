// The entry points of decoding.
#include "decode.h"
#include "enter.h"
#include "run.h"
#include "token.h"

extern "C" {
int rfa_decode(const rfa::Problem* p) { return rfa::run<rfa::Decode>(*p); }
int rfa_enter(const rfa::EnterProblem* p) {
  return rfa::run_tasks(p->batch * p->heads, p->threads, [&](int64_t index) { rfa::enter_head(*p, index); });
}
int rfa_token(const rfa::TokenProblem* p) {
  const rfa::EnterProblem enter = p->enter();
  const rfa::Problem attention = p->attention();
  return rfa::run_tasks(p->batch * p->heads, p->threads, [&](int64_t index) { rfa::token_head(*p, enter, attention, index); });
}
}
