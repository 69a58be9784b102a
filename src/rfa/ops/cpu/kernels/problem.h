// The problem that Python hands over, field by field as in library.py, and how the work is cut.
#pragma once
#include "buffer.h"
#include "gemm.h"

namespace rfa {

struct States {  // (batch, heads, length, channels), the last dimension contiguous
  float* data;
  int64_t batch, head, row;
  float* at(int64_t b, int64_t h, int64_t t = 0) const { return as<float>(b, h, t); }
  template <class T> T* as(int64_t b, int64_t h, int64_t t = 0) const {
    return reinterpret_cast<T*>(data) + b * batch + h * head + t * row;
  }
};

struct Phases {  // cosine or sine, (b, heads, length, modes)
  const float* data;
  int64_t batch, head, row;
  const float* at(int64_t b, int64_t h, int64_t t = 0) const { return data + b * batch + h * head + t * row; }
};

// C (m x n) (+)= A (m x k) B (k x n) of bfloat16, see factors.h: at::native::cpublas::brgemm of PyTorch.
typedef void (*Brgemm)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const void* a, const void* b,
                       float* c, bool in_pairs);

enum Score : int64_t { STUDENT_T, EXPONENTIAL, DOT_PRODUCT };

struct Problem {
  int64_t batch, heads, queries, keys, channels, value_channels;
  int64_t causal, score_kind, gate, turned, rotate_values, threads, slices;
  States query, key, value, out;
  Phases key_cos, key_sin, query_cos, query_sin;
  double* log_sum;        // (batch, heads, queries), or null in a decoder's step
  const float* scalars;   // (1 or 6, heads)
  const float* bound;     // (heads,)
  const float* tables;    // (3, heads, lags) or null
  int64_t lags;
  const double *key_path, *query_path;  // (path_rows, path_batch, heads, length) or null
  const float* key_bias;                // (path_batch, heads, keys)
  int64_t path_rows, path_batch;
  const double *key_times, *query_times;  // (times_batch, length)
  int64_t times_batch;
  const int32_t *key_groups, *query_groups;  // (batch, length) or null
  Phases key_norm;                           // (batch, heads, 1, keys) or null
  const float* tail;     // (heads,) beside tables, (path_batch, heads, keys) beside a path; null: all keys are visited
  int32_t* first_block;  // (batch, heads, groups of queries): the first block of keys that a group visits, or null
  // backward only
  States grad_out, grad_query, grad_key, grad_value;
  const float* grad_log_sum;
  int64_t query_slice;      // floats from one slice's grad_query to the next one's
  double* grad_tables;      // (batch, heads, slices, 3, lags)
  double* grad_scalars;     // (batch, heads, slices, 6)
  double *grad_key_path;    // (path_rows, batch, heads, keys)
  double *grad_query_path;  // (slices, path_rows, batch, heads, queries)
  double* grad_key_bias;    // (batch, heads, keys)
  // decoding only
  int64_t number;        // of key and value
  int64_t* uncertified;  // (batch, heads): counts rows to which keys that were dropped might matter, or null
  // forward and backward in bfloat16 only, else null
  Brgemm brgemm;
  void (*brgemm_release)(bool in_pairs);  // of what the thread keeps for it
};

constexpr float FAR = 9.0949470e-13f;  // 2^-40: a key with less has no effect beside one that has not decayed
constexpr int64_t GROUP = 12;  // queries that use a block of keys together, while it is in the second-level cache
constexpr int64_t QUERY_BLOCK = 8 * GROUP;
constexpr int64_t KEY_BLOCK = 128;
static_assert(GROUP % ROWS == 0, "a group is cut into tiles");
static_assert(KEY_BLOCK % COLUMNS == 0, "a block of keys is cut into panels");

// E, b and w of one query with consecutive keys, and their gradients; `b` in bits.
struct Pairs {
  const float *decay, *bias, *weight;
};
struct GradPairs {
  float *decay, *bias, *weight;
};

// One task: a head of one sample, and a slice of its query blocks (forward) or key blocks (backward).
struct Task {
  const Problem& p;
  int64_t b, h, slice;
  int64_t channels, value_channels;  // padded to whole tiles
  Task(const Problem& problem, int64_t index)
      : p(problem),
        b(index / (problem.slices * problem.heads)),
        h(index / problem.slices % problem.heads),
        slice(index % problem.slices),
        channels(round_up(problem.channels, COLUMNS)),
        value_channels(round_up(problem.value_channels, COLUMNS)) {}
  float scalar(int row) const { return p.scalars[row * p.heads + h]; }
  const double* key_times() const { return p.key_times + (p.times_batch > 1 ? b : 0) * p.keys; }
  const double* query_times() const { return p.query_times + (p.times_batch > 1 ? b : 0) * p.queries; }
  int64_t group_of_key(int64_t j) const { return p.key_groups ? p.key_groups[b * p.keys + j] : 0; }
  int64_t row_index() const { return b * p.heads + h; }
  // Of the group of queries that begins with the first-th one.
  int32_t* first_block(int64_t first) const {
    return p.first_block + row_index() * ((p.queries + GROUP - 1) / GROUP) + first / GROUP;
  }
};

}  // namespace rfa
