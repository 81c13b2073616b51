// Work shared among threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace molora {

constexpr int64_t THREAD_BYTES = 128 * 1024;  // of weights, below which another thread costs more than it saves

template <class F>
void in_parallel(int64_t threads, const F& work) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num(), omp_get_num_threads());
    return;
  }
#endif
  work(0, 1);
}

inline void wait_for_all(int threads) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp barrier
  }
#endif
}

// Part `id` of `count` of n things, cut at multiples of `grain`.
inline std::pair<int64_t, int64_t> share(int64_t n, int64_t grain, int id, int count) {
  int64_t grains = (n + grain - 1) / grain;
  return {std::min(n, grains * id / count * grain), std::min(n, grains * (id + 1) / count * grain)};
}

}  // namespace molora
