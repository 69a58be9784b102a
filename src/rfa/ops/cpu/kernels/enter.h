// New states into the common frame: the query beside, keys and values to where a cache keeps them, with norms of the keys.
#pragma once
#include "frame.h"

namespace rfa {

struct EnterProblem {
  int64_t batch, heads, length, channels, turn_values, threads;
  States query, key, value;               // as they were projected
  States new_query, keys, values, norms;  // in the frame, and |k|^2; from the first new one on
  Phases cos, sin;  // (b, heads, length, channels), of the new tokens: cosine twice, and negative sine beside sine
};

static inline void enter_head(const EnterProblem& p, int64_t index) {
  const int64_t b = index / p.heads, h = index % p.heads, modes = p.channels / 2;
  for (int64_t t = 0; t < p.length; t++) {
    const float *cos = p.cos.at(b, h, t), *sin = p.sin.at(b, h, t) + modes;
    float* key = p.keys.at(b, h, t);
    turn(p.query.at(b, h, t), cos, sin, -1.0f, p.new_query.at(b, h, t), p.channels);
    turn(p.key.at(b, h, t), cos, sin, -1.0f, key, p.channels);
    turn(p.value.at(b, h, t), p.turn_values ? cos : nullptr, sin, -1.0f, p.values.at(b, h, t), p.channels);
    float norm = 0.0f;
    int64_t c = 0;
    Floats total{};
    for (; c + LANES <= p.channels; c += LANES) total += load(key + c) * load(key + c);
    for (; c < p.channels; c++) norm += key[c] * key[c];
    *p.norms.at(b, h, t) = norm + sum(total);
  }
}

}  // namespace rfa
