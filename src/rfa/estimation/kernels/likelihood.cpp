// The log-likelihood of a series by the Kalman filter with an exact diffuse start, for many models.
//
// With e the innovations from a start at zero and W the innovations from a start at each diffuse direction alone, both over
// their standard deviations s:
//   -(N log 2 pi + log det W^T W + min_d |e - W d|^2) / 2 - sum_k log s_k
// where det is the product of the eigenvalues that are not 0. W and e are reduced to a triangle row by row. As soon as the
// triangle tells all directions that were seen from each other, the filter takes the state that it determines, and goes on
// as an ordinary filter.
// Source: De Jong, The diffuse Kalman filter (1991).
#include <algorithm>
#include <exception>
#include <iterator>
#include <numeric>

#include "gaussian.h"
#include "problem.h"

namespace rfa {

constexpr double NO_SHARE = 1e-12;  // of a direction's innovations: a smaller one shows nothing of it
constexpr double UNSEEN = 1e-5;     // of a direction's size: a row that shows less shows the rounding of the times
constexpr double TOLD_APART = 0.1;  // share of a direction that no other one explains, from which on it is determined
const double LOG_TWO_PI = std::log(2 * std::acos(-1.0));

template <int N> struct Likelihood {
  const LikelihoodProblem& p;
  const int64_t model, n;
  Steps<N> steps;
  Matrices<N> of;
  std::vector<double> mean, covariance, spread, gain, moved;
  std::vector<double> directions, origin, next;  // (n, q): what is left of each diffuse direction; without observations
  std::vector<double> shown, sizes;              // (q,): what a row shows of each; its unit
  std::vector<bool> seen;                        // (q,): whether any row has shown it
  std::vector<double> triangle, right, lengths;  // (q, q), of W; of e; squared lengths of the columns of W
  int64_t q = 0;
  double total = 0;

  Likelihood(const LikelihoodProblem& problem, Matrices<N> size, int64_t index)
      : p(problem), model(index), n(p.states), steps(size), of(size), mean(size_t(n)),
        covariance(p.covariance + index * n * n, p.covariance + (index + 1) * n * n), spread(size_t(n)),
        gain(size_t(n)), moved(size_t(n)) {
    std::copy_if(p.units, p.units + n, std::back_inserter(sizes), [](double unit) { return unit > 0; });
    q = int64_t(sizes.size());
    directions.resize(size_t(n * q));
    for (int64_t i = 0, column = 0; i < n; i++)
      if (p.units[i] > 0) directions[i * q + column++] = p.units[i];
    origin = directions;
    clear();
  }

  // No row has shown any direction yet.
  void clear() {
    next.resize(size_t(n * q)), shown.resize(size_t(q)), seen.assign(size_t(q), false);
    right.assign(size_t(q), 0.0), lengths = right, triangle.assign(size_t(q * q), 0.0);
  }

  double run() {
    for (int64_t k = 0; k < p.length; k++) {
      if (k) predict((model * p.lags + p.lag_index[k - 1]) * n * n);
      if (std::isnan(p.values[k])) continue;
      read(k);
      if (q && determined()) collapse();
    }
    return total - log_volume();
  }

  // log det(E E^T) / 2 of the rows E of the triangle, from the last one: where E is a triangle too, of its diagonal.
  double log_volume() {
    double found = 0;
    for (int64_t i = q - 1; i >= 0; i--) {
      if (!shows(i)) continue;
      double *line = &triangle[i * q], length = 0;
      for (int64_t j = 0; j < q; j++) line[j] /= sizes[j];
      for (int64_t k = i + 1; k < q; k++) {
        if (!shows(k)) continue;
        const double* other = &triangle[k * q];
        const double part = std::inner_product(line, line + q, other, 0.0);
        for (int64_t j = 0; j < q; j++) line[j] -= part * other[j];
      }
      for (int64_t j = 0; j < q; j++) length += line[j] * line[j];
      for (int64_t j = 0; j < q; j++) line[j] /= std::sqrt(length);
      found += std::log(length) / 2;
    }
    return found;
  }

  void predict(int64_t at) {
    const double* transition = p.transition + at;
    of.sandwich(transition, covariance.data(), steps.a.data());
    for (int i = 0; i < of.nn(); i++) covariance[i] += p.variance[at + i];
    of.apply(transition, mean.data(), moved.data());
    mean.swap(moved);
    if (!q) return;
    move(transition, directions);
    if (std::find(seen.begin(), seen.end(), false) != seen.end()) move(transition, origin);
  }

  void move(const double* transition, std::vector<double>& columns) {
    std::fill(next.begin(), next.end(), 0.0);
    for (int64_t i = 0; i < n; i++)
      for (int64_t k = 0; k < n; k++)
        for (int64_t j = 0; j < q && transition[i * n + k] != 0; j++)
          next[i * q + j] += transition[i * n + k] * columns[k * q + j];
    columns.swap(next);
  }

  // Whether a row shows a direction that none has shown before.
  bool sees(const double* row, int64_t j) const {
    double part = 0, most = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
      const double entry = origin[i * q + j], unit = p.units[i] > 0 ? p.units[i] : 1;
      part += row[i] * entry, size = std::max(size, std::abs(entry) / unit);
      if (entry != 0) most += std::abs(row[i]) * unit;
    }
    return std::abs(part) > UNSEEN * most * size;
  }

  void read(int64_t k) {
    const double* row = p.rows + k * n;
    const double noise = p.sensor_noise[model * p.sensors + p.sensor[k]] + p.noise[k];
    of.apply(covariance.data(), row, spread.data());
    const double across = of.dot(row, spread.data()), variance = across + noise, deviation = std::sqrt(variance);
    const double innovation = p.values[k] - of.dot(row, mean.data());
    for (int64_t i = 0; i < n; i++) gain[i] = spread[i] / variance, mean[i] += gain[i] * innovation;
    steps.joseph(covariance.data(), row, gain.data(), spread.data(), across, noise);
    total -= (std::log(variance) + LOG_TWO_PI) / 2;
    double residual = innovation / deviation;
    if (q) residual = reduce(row, deviation, residual);
    total -= residual * residual / 2;
  }

  // Turns a row of W and e into the triangle. Returns what is left of e.
  double reduce(const double* row, double deviation, double residual) {
    std::fill(shown.begin(), shown.end(), 0.0);
    for (int64_t j = 0; j < q; j++) seen[j] = seen[j] || sees(row, j);
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = 0; j < q && row[i] != 0; j++) shown[j] += seen[j] ? row[i] * directions[i * q + j] : 0;
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = 0; j < q; j++) directions[i * q + j] -= gain[i] * shown[j];
    for (int64_t j = 0; j < q; j++) shown[j] /= deviation, lengths[j] += shown[j] * shown[j];
    for (int64_t j = 0; j < q; j++) {
      if (!(std::abs(shown[j]) > NO_SHARE * std::sqrt(lengths[j]))) continue;
      double* line = &triangle[j * q];
      const double size = std::hypot(line[j], shown[j]), c = line[j] / size, s = shown[j] / size;
      for (int64_t i = j; i < q; i++) {
        const double x = line[i], y = shown[i];
        line[i] = c * x + s * y, shown[i] = c * y - s * x;
      }
      const double x = right[j];
      right[j] = c * x + s * residual, residual = c * residual - s * x;
    }
    return residual;
  }

  bool shows(int64_t i) const { return std::abs(triangle[i * q + i]) > NO_SHARE * std::sqrt(lengths[i]); }

  bool determined() const {
    bool any = false;
    for (int64_t i = 0; i < q; i++) {
      if (seen[i] && !(std::abs(triangle[i * q + i]) > TOLD_APART * std::sqrt(lengths[i]))) return false;
      any |= seen[i];
    }
    return any;
  }

  // The state given the triangle R and its right side u: m + D R^-1 u with covariance P + D R^-1 (D R^-1)^T. Directions
  // that no row has shown stay diffuse.
  void collapse() {
    for (int64_t i = 0; i < n; i++) {
      double* line = &directions[i * q];
      for (int64_t j = 0; j < q; j++) {
        if (!seen[j]) continue;
        for (int64_t k = 0; k < j; k++) line[j] -= line[k] * triangle[k * q + j];
        line[j] /= triangle[j * q + j];
        mean[i] += line[j] * right[j];
      }
    }
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = 0; j < n; j++)
        for (int64_t k = 0; k < q; k++)
          if (seen[k]) covariance[i * n + j] += directions[i * q + k] * directions[j * q + k];
    for (int64_t i = 0; i < q; i++)
      if (seen[i]) total -= std::log(std::abs(triangle[i * q + i]) / sizes[i]);
    for (auto* columns : {&directions, &origin, &sizes}) {
      size_t kept = 0;
      for (size_t i = 0; i < columns->size(); i++)
        if (!seen[i % size_t(q)]) (*columns)[kept++] = (*columns)[i];
      columns->resize(kept);
    }
    q = int64_t(sizes.size());
    clear();
  }
};

}  // namespace rfa

extern "C" int64_t rfa_likelihood_problem_size() { return sizeof(rfa::LikelihoodProblem); }

// 0, or 1 where there is no memory.
extern "C" int rfa_likelihood(const rfa::LikelihoodProblem* p) {
  int failed = 0;
#pragma omp parallel for num_threads(p->threads) schedule(dynamic)
  for (int64_t index = 0; index < p->models; index++) try {
      rfa::with_size(p->states, [&](auto of) {
        p->log_likelihood[index] = rfa::Likelihood<decltype(of)::SIZE>(*p, of, index).run();
      });
    } catch (const std::exception&) {
#pragma omp atomic write
      failed = 1;
    }
  return failed;
}
