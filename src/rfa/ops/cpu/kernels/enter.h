// New states into the common frame: the query beside, keys and values to where a cache keeps them, with norms of the keys.
#pragma once
#include "frame.h"
#include "number.h"

namespace rfa {

struct EnterProblem {
  int64_t batch, heads, length, channels, turn_values, threads, number;  // number: of states, but for `new_query`
  States query, key, value;               // as they were projected
  States new_query, keys, values, norms;  // in the frame, and |k|^2 as stored, in float; from the first new one on
  Phases cos, sin;  // (b, heads, length, channels), of the new tokens: cosine twice, and negative sine beside sine
};

template <class T> static void enter_head_of(const EnterProblem& p, int64_t index) {
  const int64_t b = index / p.heads, h = index % p.heads, modes = p.channels / 2;
  Buffer<float> given(p.channels), turned(p.channels);
  for (int64_t t = 0; t < p.length; t++) {
    const float *cos = p.cos.at(b, h, t), *sin = p.sin.at(b, h, t) + modes;
    read_row(p.query.as<T>(b, h, t), given, p.channels);
    turn(given, cos, sin, -1.0f, p.new_query.at(b, h, t), p.channels);
    read_row(p.value.as<T>(b, h, t), given, p.channels);
    turn(given, p.turn_values ? cos : nullptr, sin, -1.0f, turned, p.channels);
    write_row(turned, p.values.as<T>(b, h, t), p.channels);
    read_row(p.key.as<T>(b, h, t), given, p.channels);
    turn(given, cos, sin, -1.0f, turned, p.channels);
    T* key = p.keys.as<T>(b, h, t);
    write_row(turned, key, p.channels);
    *p.norms.at(b, h, t) = dot(key, key, p.channels);
  }
}

static inline void enter_head(const EnterProblem& p, int64_t index) {
  with_number(p.number, [&](auto number) { enter_head_of<decltype(number)>(p, index); });
}

}  // namespace rfa
