// One token of a decoder at uniform times, by one call: its states enter the cache, and its query sees all keys there.
#pragma once
#include "decode.h"
#include "enter.h"

namespace rfa {

struct TokenProblem {
  int64_t batch, heads, keys, channels, score_kind, turn_values, threads, lags, number;  // keys: the new one included
  States query, key, value, out;   // of the token; as they were projected. `out` is in float
  States keys_of_cache, values_of_cache, norms_of_cache;
  Phases cos, sin;                 // as in EnterProblem
  const float *tables, *coefficient;  // (3, heads, lags), mirrored: lag 0 stands KEY_BLOCK before the end; (heads,)
  const float* tail;                  // as in Problem
  int64_t* uncertified;

  EnterProblem enter() const {
    EnterProblem p{batch, heads, 1, channels, turn_values, 1, number, query, key, value, out,
                   keys_of_cache, values_of_cache, norms_of_cache, cos, sin};
    with_number(number, [&](auto kind) {
      for (States* x : {&p.keys, &p.values}) x->data = reinterpret_cast<float*>(x->as<decltype(kind)>(0, 0, keys - 1));
    });
    p.norms.data = norms_of_cache.at(0, 0, keys - 1);
    return p;
  }

  // The query is read from `out`, in the frame, before its estimate is written there.
  Problem attention() const {
    Problem p{};
    p.batch = batch, p.heads = heads, p.queries = p.slices = 1, p.keys = keys;
    p.channels = p.value_channels = channels;
    p.query = p.out = out, p.key = keys_of_cache, p.value = values_of_cache;
    p.key_norm = {norms_of_cache.data, norms_of_cache.batch, norms_of_cache.head, 0};
    p.tables = tables, p.scalars = coefficient, p.lags = lags, p.number = number;
    p.tail = tail, p.uncertified = uncertified;
    return p;
  }
};

// The prior of the last query: its row of a mirrored table is consecutive already, and nothing is copied.
class LastRow {
 public:
  struct QueryRow {};
  explicit LastRow(const Task& task, bool)
      : from_(task.p.tables + (task.h + 1) * task.p.lags - KEY_BLOCK - task.p.keys),
        table_(task.p.heads * task.p.lags),
        tail_(task.p.tail ? task.p.tail[task.h] : 0.0f) {}
  QueryRow row(int64_t) const { return {}; }
  float tail(const QueryRow&, int64_t j) const { return from_[table_ + j] + tail_; }
  RFA_INLINE_MEMBER Pairs pairs(const QueryRow&, int64_t start, int64_t) const {
    const float* from = from_ + start;
    return {from, from + table_, from + 2 * table_};
  }

 private:
  const float* from_;
  int64_t table_;
  float tail_;
};

// The token of one head of one sample.
static inline void token_head(const TokenProblem& p, const EnterProblem& enter, const Problem& attention, int64_t index) {
  enter_head(enter, index);
  const Task task(attention, index);
  if (p.score_kind == STUDENT_T) Decode<STUDENT_T, LastRow>(task).run();
  else Decode<EXPONENTIAL, LastRow>(task).run();
  if (!p.turn_values) return;
  float* out = p.out.at(task.b, task.h);
  turn(out, p.cos.at(task.b, task.h), p.sin.at(task.b, task.h) + p.channels / 2, 1.0f, out, p.channels);
}

}  // namespace rfa
