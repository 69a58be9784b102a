// One token of a decoder at uniform times, by one call: its states enter the cache, and its query sees all keys there.
#pragma once
#include "decode.h"
#include "enter.h"

namespace rfa {

struct StepProblem {
  EnterProblem enter;  // the new token's; the turned query goes where the estimate will be
  int64_t keys, score_kind, lags;
  States cached_keys, cached_values;  // (batch, heads, keys, channels), the new ones their last
  Phases cached_norms;                // (batch, heads, 1, keys)
  const float *tables, *scalars;      // (3, heads, lags), mirrored: lag 0 stands KEY_BLOCK before the end; (1, heads)
};

// The prior of the last query: its row of a mirrored table is consecutive already, and nothing is copied.
class LastRow {
 public:
  struct QueryRow {};
  explicit LastRow(const Task& task, bool)
      : from_(task.p.tables + (task.h + 1) * task.p.lags - KEY_BLOCK - task.p.keys), table_(task.p.heads * task.p.lags) {}
  QueryRow row(int64_t) const { return {}; }
  RFA_INLINE_MEMBER Pairs pairs(const QueryRow&, int64_t start, int64_t) const {
    const float* from = from_ + start;
    return {from, from + table_, from + 2 * table_};
  }

 private:
  const float* from_;
  int64_t table_;
};

// A decoder's attention to the cache.
static inline Problem attention_of(const StepProblem& step) {
  const EnterProblem& enter = step.enter;
  Problem p{};
  p.batch = enter.batch, p.heads = enter.heads, p.queries = p.slices = 1, p.keys = step.keys;
  p.channels = p.value_channels = enter.channels;
  p.query = p.out = enter.new_query;  // a query is read before its estimate is written
  p.key = step.cached_keys, p.value = step.cached_values, p.key_norm = step.cached_norms;
  p.tables = step.tables, p.scalars = step.scalars, p.lags = step.lags;
  return p;
}

static inline void step_head(const StepProblem& step, const Problem& attention, int64_t index) {
  enter_head(step.enter, index);
  const Task task(attention, index);
  if (step.score_kind == STUDENT_T) Decode<STUDENT_T, LastRow>(task).run();
  else Decode<EXPONENTIAL, LastRow>(task).run();
  if (!step.enter.turn_values) return;
  float* out = attention.out.at(task.b, task.h);
  turn(out, step.enter.cos.at(task.b, task.h), step.enter.sin.at(task.b, task.h), 1.0f, out, attention.channels);
}

}  // namespace rfa
