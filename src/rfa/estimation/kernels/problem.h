// What Python hands over, field by field as in compiled.py.
#pragma once
#include <cstdint>

namespace rfa {

// The rows of one series, for the filter and the smoother.
struct Problem {
  int64_t length, components, states, smooth;
  const double *rows;         // (length, m, n): H, zeros where nothing is seen
  const double *values;       // (length, m)
  const double *transition;   // (lags, n, n)
  const double *variance;     // (lags, n, n)
  const int64_t *lag_index;   // (length - 1,)
  double *mean;               // (length, n)
  double *covariance;         // (length, n, n)
  int64_t *overflow;          // the row at which a covariance overflows, or -1
  // of the robust filter: before each row, where that is wanted, and the weight of each row
  double *predicted_mean;     // (length, n)
  double *predicted_covariance;  // (length, n, n)
  double *weight;             // (length,)
  const void *constants;      // RobustConstants
};

// Models of one series, and its log-likelihood under each. Readings of one time follow each other.
struct LikelihoodProblem {
  int64_t models, length, states, sensors, lags, threads;
  const double *rows;         // (length, n): C
  const double *values;       // (length,), NaN where nothing is read
  const int64_t *sensor;      // (length,)
  const double *noise;        // (length,): of each reading, beside its sensor's
  const double *sensor_noise; // (models, sensors)
  const int64_t *lag_index;   // (length - 1,)
  const double *transition;   // (models, lags, n, n)
  const double *variance;     // (models, lags, n, n)
  const double *covariance;   // (models, n, n): of the stationary states before the first reading
  const double *units;        // (n,): of the diffuse states, 0 elsewhere
  double *log_likelihood;     // (models,)
};

}  // namespace rfa
