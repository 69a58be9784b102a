// The entry points of decoding.
#include "decode.h"
#include "enter.h"
#include "run.h"
#include "step.h"

extern "C" {
int rfa_decode(const rfa::Problem* p) { return rfa::run<rfa::Decode>(*p); }
int rfa_enter(const rfa::EnterProblem* p) {
  return rfa::run_tasks(p->batch * p->heads, p->threads, [&](int64_t index) { rfa::enter_head(*p, index); });
}
int rfa_step(const rfa::StepProblem* p) {
  const rfa::EnterProblem enter = p->enter();
  const rfa::Problem attention = p->attention();
  return rfa::run_tasks(p->batch * p->heads, p->threads, [&](int64_t index) { rfa::step_head(*p, enter, attention, index); });
}
}
