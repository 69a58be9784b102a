// What Python hands over, field by field as in compiled.py.
#pragma once
#include <cstdint>

namespace rfa {

// A filter of `series` series along a grid. Covariances are shared by all series (`covariances` = 1) or each has its own.
struct Problem {
  int64_t series, covariances, models, length, components, states, threads, smooth;
  int64_t diffuse;            // whether nothing is known of the state before the first row
  const double *rows;         // (models, length, m, n): H, zeros where nothing is seen
  const double *values;       // (series, length, m)
  const double *transition;   // (lags, n, n)
  const double *variance;     // (lags, n, n)
  const int64_t *lag_index;   // (models, length - 1)
  const double *start_mean;   // (series, n)
  const double *start_covariance;  // (covariances, n, n)
  double *mean;               // (series, length, n)
  double *covariance;         // (covariances, length, n, n)
  double *least_squares;      // (series, length)
  int64_t *overflow;          // (covariances,): the time index at which a covariance overflows, or -1
  // before each row, where they are wanted: of the Kalman filter with `series` = `covariances`, and of the robust filter
  double *predicted_mean;     // (series, length, n)
  double *predicted_covariance;  // (series, length, n, n)
  // of the robust filter, for which every series has its own covariance
  double *weight;             // (series, length): of each row, as the filter used it
  const double *resumed;      // (series, RobustFilter::carried_size()): what earlier rows carry on, in place of the start
  double *carried;            // the same after the last row, where it is wanted
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
