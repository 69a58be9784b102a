// Tasks are handed out to threads one after the other; results do not depend on which.
#pragma once
#include <atomic>
#include <new>

#include "buffer.h"
#include "lag_tables.h"
#include "problem.h"
#include "product_path.h"
#include "separable_path.h"

namespace rfa {

// The kernel for a filter's score and form of prior.
template <template <int64_t, class> class Kernel, class Prior> void run_filter(const Task& task) {
  if (task.p.score_kind == STUDENT_T) return Kernel<STUDENT_T, Prior>(task).run();
  return Kernel<EXPONENTIAL, Prior>(task).run();
}

template <template <int64_t, class> class Kernel> void run_products(const Task& task) {
  if (task.p.tables) return Kernel<DOT_PRODUCT, LagTables>(task).run();
  if (task.p.causal) return Kernel<DOT_PRODUCT, ProductPath<true>>(task).run();
  return Kernel<DOT_PRODUCT, ProductPath<false>>(task).run();
}

template <template <int64_t, class> class Kernel> void run_task(const Problem& p, int64_t index) {
  const Task task(p, index);
  if (p.score_kind == DOT_PRODUCT) return run_products<Kernel>(task);
  if (p.tables) return run_filter<Kernel, LagTables>(task);
  if (p.path_rows == 3)
    return p.causal ? run_filter<Kernel, SeparablePath<true, true>>(task) : run_filter<Kernel, SeparablePath<true, false>>(task);
  return p.causal ? run_filter<Kernel, SeparablePath<false, true>>(task) : run_filter<Kernel, SeparablePath<false, false>>(task);
}

// Lets go of what a thread holds for products in bfloat16 when its task ends.
struct ProductsOfThread {
  const Problem& p;
  ~ProductsOfThread() {
    if (p.brgemm) p.brgemm_release(true);
  }
};

enum Failure : int { NO_MEMORY = 1, NO_PRODUCT = 2 };  // as in run_kernel of library.py

// Calls `task(index)` for each index below `count`.
template <class F> int run_tasks(int64_t count, int64_t threads, F task) {
  std::atomic<int64_t> next{0};
  std::atomic<int> failed{0};
#pragma omp parallel num_threads(threads)
  for (int64_t index; (index = next++) < count;) try {
      stock().clear();
      task(index);
    } catch (const std::bad_alloc&) {
      failed = NO_MEMORY;
    } catch (...) {  // nothing but PyTorch's brgemm throws anything else
      failed = NO_PRODUCT;
    }
  return failed;
}

template <template <int64_t, class> class Kernel> int run(const Problem& p) {
  return run_tasks(p.batch * p.heads * p.slices, p.threads, [&](int64_t index) {
    const ProductsOfThread products{p};
    run_task<Kernel>(p, index);
  });
}

}  // namespace rfa
