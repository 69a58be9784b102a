// An autoregression of several lags, of values or of their changes, on a grid of whole steps. Burg's recursion gives
// the coefficients of each order (Burg 1975; they are stable), a corrected Akaike criterion the order.
#pragma once
#include <limits>
#include <stdexcept>

#include "filter.h"

namespace rfa {

struct Lags {
  bool changes = false;
  double middle = 0, variance = 0;           // the mean of what is regressed; the variance of an error
  std::vector<double> coefficients, recent;  // recent: values, the newest first

  // To values 0 ... count - 1, of which the last MOST_LAG_ROWS are used.
  void fit(const double* values, int64_t count) {
    const int64_t first = std::max<int64_t>(0, count - MOST_LAG_ROWS), skip = first + changes, n = count - skip;
    std::vector<double> forward(static_cast<size_t>(n)), backward, own, reversed;
    double sum = 0;
    for (int64_t t = 0; t < n; t++)
      forward[t] = values[skip + t] - (changes ? values[skip + t - 1] : 0), sum += forward[t];
    middle = sum / (double(n) + (changes ? DRIFT_SHRINK : 0));
    double square = 0;
    for (double& x : forward) x -= middle, square += x * x / double(n);
    backward = forward;
    const int64_t most = std::min<int64_t>(MOST_LAGS, int64_t(double(n) * LAGS_PART));
    double least = std::numeric_limits<double>::infinity();
    const double floor = 1e-12 * square;
    coefficients.clear(), variance = square;
    for (int64_t order = 0;; order++) {
      const double k = double(order) + 1,
                   criterion = double(n) * std::log(square) + 2 * k * double(n) / (double(n) - k - 1);
      if (criterion < least) least = criterion, coefficients = own, variance = square * double(n) / (double(n) - k);
      if (order >= most || !(square > floor)) break;
      double both = 0, total = 0;
      for (int64_t t = order + 1; t < n; t++) {
        both += forward[t] * backward[t - 1], total += forward[t] * forward[t] + backward[t - 1] * backward[t - 1];
      }
      const double reflection = total > 0 ? 2 * both / total : 0;
      for (int64_t t = n - 1; t > order; t--) {
        const double f = forward[t], b = backward[t - 1];
        forward[t] = f - reflection * b, backward[t] = b - reflection * f;
      }
      reversed.assign(own.rbegin(), own.rend());
      for (size_t j = 0; j < own.size(); j++) own[j] -= reflection * reversed[j];
      own.push_back(reflection), square *= 1 - reflection * reflection;
    }
    recent.assign(coefficients.size() + changes, 0.0);
    for (size_t j = 0; j < recent.size(); j++) recent[j] = values[count - 1 - int64_t(j)];
  }

  void pass(Archive& a) {
    int64_t count = int64_t(coefficients.size());
    a.pass_integer(changes), a.pass(middle), a.pass(variance), a.pass_integer(count);
    if (!(count >= 0 && count <= MOST_LAGS)) throw std::invalid_argument("state");
    coefficients.resize(size_t(count)), recent.resize(size_t(count) + changes);
    for (double& x : coefficients) a.pass(x);
    for (double& x : recent) a.pass(x);
  }

  double next() const {
    double value = middle + (changes ? recent[0] : 0);
    for (size_t j = 0; j < coefficients.size(); j++)
      value += coefficients[j] * (recent[j] - (changes ? recent[j + 1] : 0) - middle);
    return value;
  }

  void join(double value) {
    if (recent.empty()) return;
    std::rotate(recent.begin(), recent.end() - 1, recent.end()), recent[0] = value;
  }

  // The next values; a variance is the sum of the squared responses to the errors before.
  std::vector<Forecast> path(int64_t count) const {
    Lags copy = *this;
    std::vector<Forecast> found;
    std::vector<double> response;
    double total = 0, level = 0;
    for (int64_t k = 0; k < count; k++) {
      double now = k == 0;
      for (size_t j = 0; j < coefficients.size() && int64_t(j) < k; j++)
        now += coefficients[j] * response[size_t(k) - 1 - j];
      response.push_back(now), level = changes ? level + now : now, total += level * level;
      found.push_back({copy.next(), variance * total}), copy.join(found.back().mean);
    }
    return found;
  }
};

}  // namespace rfa
